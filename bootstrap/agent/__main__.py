"""``python -m gpuctl.bootstrap.agent FOLDER``: how a node's service starts it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from gpuctl.bootstrap.agent.agent import SIGTERM, Agent, say
from gpuctl.bootstrap.boot.metadata import Metadata
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.bootstrap.monitors.preemption import CLOUDS, PreemptionWatcher
from gpuctl.cluster.errors import GpuctlError


def main(folder: str) -> None:
    """Run the agent of the node whose files are in ``folder``; SIGTERM is its notice."""
    path = Path(folder).absolute()
    identity = NodeIdentity.read(path)
    try:
        agent = Agent(path, identity)
    except GpuctlError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        agent.notice(_lead_s(path, identity), SIGTERM)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watcher = None
    if identity.provider in CLOUDS:
        metadata = Metadata(identity.provider)
        watcher = PreemptionWatcher(metadata, agent.notice, agent.at_risk, say, promised_s=identity.promised_s)
        watcher.start()
    try:
        agent.serve()
    except GpuctlError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    if watcher:
        watcher.stop()


def _lead_s(folder: Path, identity: NodeIdentity) -> float:
    """Seconds from a SIGTERM to the end: whoever sends one may say so in ``notice_s`` first."""
    try:
        return float((folder / "notice_s").read_text())
    except (OSError, ValueError):
        return identity.notice_s


if __name__ == "__main__":
    main(sys.argv[1])
