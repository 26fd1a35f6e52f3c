"""What the loop of the agent holds of a round that runs, and what others learn from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from gpuctl.bootstrap.agent.heartbeat import Heartbeat
from gpuctl.bootstrap.agent.log_shipper import LogShipper
from gpuctl.bootstrap.agent.round_run import RoundRun
from gpuctl.bootstrap.monitors.stall import StallWatch
from gpuctl.bootstrap.wake import Wake
from gpuctl.cluster.membership.peers import Peers
from gpuctl.cluster.records.rounds import NodeExit, Round


@dataclass(frozen=True, slots=True)
class RoundWork:
    """A round's workers with what ships their output and watches them. See ``reconcile.Work``."""

    run: RoundRun
    shipper: LogShipper
    stall: StallWatch

    @property
    def exit(self) -> NodeExit | None:
        return self.run.exit

    def is_of(self, round_: Round) -> bool:
        return self.run.is_of(round_)

    def ask_to_stop(self, round_: Round) -> None:
        self.run.ask_to_stop(round_)

    def kill(self) -> None:
        self.run.kill()

    def send_last_words(self) -> None:
        self.shipper.finish()

    def end(self) -> None:
        self.stall.stop()
        threading.Thread(target=self.shipper.finish, name="last-logs", daemon=True).start()


@dataclass(frozen=True, slots=True)
class AgentSurroundings:
    """See ``reconcile.Surroundings``."""

    heartbeat: Heartbeat
    peers: Peers
    wake_up: Wake
    print_line: Callable[[str], None]

    @property
    def told_of_notice(self) -> bool:
        return self.heartbeat.told_of_notice

    def send_heartbeat(self) -> None:
        self.heartbeat.send()

    def poke(self) -> None:
        self.peers.poke()

    def wake(self) -> None:
        self.wake_up.set()

    def say(self, line: str) -> None:
        self.print_line(line)
