"""Real torchruns at addresses of their own on this machine, with a folder as the bucket; they are really killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.providers import processes
from tests.waiting import PATIENCE_S, until

TRAIN = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

folder = Path(os.environ["FOLDER"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
kept = folder / "checkpoint"
step = torch.tensor([int(kept.read_text()) if kept.exists() else 0, 0])
dist.broadcast(step, 0)
while True:
    step[0] += 1
    step[1] = int((folder / "over").exists())
    dist.all_reduce(step, dist.ReduceOp.MAX)
    with (folder / "steps").open("a") as log:
        log.write(f"{step[0].item()} {rank} {world} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()}\\n")
    if rank == 0:
        (folder / "checkpoint.new").write_text(str(step[0].item()))
        (folder / "checkpoint.new").rename(kept)
    if step[1]:
        break
    if rank == 1 and (folder / "fail").exists():
        (folder / "fail").unlink()
        raise ValueError("of the script's own making")
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Torchruns:
    """torchruns of one run, by number; number N has the address 127.0.0.N."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "train.py").write_text(TRAIN)

    def start(self, *numbers: int, nodes: str = "2:3", restarts: int = 0, more: tuple[str, ...] = ()) -> None:
        for number in numbers:
            with (self.folder / f"out-{number}").open("wb") as out:
                self.all[number] = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=gpuctl", "--rdzv-id=exp1"),
                        *(f"--rdzv-endpoint=file://{self.folder}/bucket", f"--local-addr=127.0.0.{number}"),
                        *(f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={restarts}", *more),
                        str(self.folder / "train.py"),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, "FOLDER": str(self.folder), processes.MARK: str(self.folder / f"run-{number}")},
                    start_new_session=True,
                )

    def lose(self, number: int) -> None:
        """With all its workers."""
        processes.kill_all(self.folder / f"run-{number}")
        self.all.pop(number).wait()

    def lose_bit_by_bit(self, number: int) -> None:
        """The worker first, and the agent when the others' workers have noticed."""
        workers = {step[4] for step in self.steps()[-3:]}
        self.all[number].send_signal(signal.SIGSTOP)  # it would report its worker
        own = next(pid for pid in workers if self._starter_of(pid) == number)
        os.kill(own, signal.SIGKILL)
        until(lambda: not any(_lives(pid) for pid in workers - {own}), "the others' workers to fail")
        self.lose(number)

    def spare_ports(self) -> tuple[int, ...]:
        """Those that rank 0's next stores will have, in their order."""
        store = open_bucket(f"file://{self.folder}/bucket")
        found = [entry.key for entry in store.list("mingle") if "/nodes/" in entry.key]
        return decode(store.get(found[0]) or b"", NodeRecord, found[0]).spare_ports if found else ()

    def steps(self) -> list[tuple[int, ...]]:
        """Step, rank, world size, restart count and pid of each step so far."""
        path = self.folder / "steps"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [tuple(map(int, line)) for line in lines if len(line) == 5]

    def train_on(self, size: int) -> tuple[int, ...]:
        """Waits until so many have made ten steps together after now; the last one."""
        before = len(self.steps())

        def found() -> tuple[int, ...] | None:
            made = [step for step in self.steps()[before:] if step[2] == size]
            return made[-1] if len(made) >= 10 * size else None

        try:
            return until(found, f"ten steps of {size}")
        except Exception as error:
            raise AssertionError(self.said()) from error

    def said(self, number: int | None = None) -> str:
        names = [f"out-{number}"] if number else sorted(path.name for path in self.folder.glob("out-*"))
        return "\n".join(f"{name}:\n{(self.folder / name).read_text()[-4000:]}" for name in names)

    def number_of(self, rank: int) -> int:
        """Of the torchrun whose worker has that rank."""
        return self._starter_of(next(step[4] for step in reversed(self.steps()) if step[1] == rank))

    def _starter_of(self, pid: int) -> int:
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next(n for n in self.all if f"{processes.MARK}={self.folder / f'run-{n}'}".encode() in env)

    def finish(self) -> None:
        (self.folder / "over").touch()
        for number, torchrun in self.all.items():
            assert torchrun.wait(PATIENCE_S) == 0, self.said(number)

    def end(self) -> None:
        for number in [*self.all]:
            self.lose(number)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def torchruns(tmp_path: Path) -> Iterator[Torchruns]:
    made = Torchruns(tmp_path)
    yield made
    made.end()


def test_a_port_that_somebody_has_at_another_address_costs_a_round_and_not_the_run(torchruns: Torchruns) -> None:
    """torch's store listens at all addresses, and would for ever find the port in use."""
    torchruns.start(1, nodes="2:2")
    with contextlib.ExitStack() as held:
        for port in until(torchruns.spare_ports, "the ports that the first one keeps")[:1]:
            held.enter_context(socket.create_server(("127.0.0.9", port)))
        torchruns.start(2, nodes="2:2")
        torchruns.train_on(2)
    assert "is in use at another address of this host; the next round has another one" in torchruns.said()


def test_survivors_go_on_without_rank_0s_host_and_no_restart_is_counted(torchruns: Torchruns) -> None:
    torchruns.start(1, 2, 3)
    step = torchruns.train_on(3)
    torchruns.lose_bit_by_bit(torchruns.number_of(rank=0))
    later = torchruns.train_on(2)
    assert later[0] > step[0]
    assert {made[3] for made in torchruns.steps()} == {0}, "with --max-restarts 0 none would be left"
    torchruns.finish()


@pytest.mark.slow
def test_nodes_join_are_lost_leave_and_are_replaced(torchruns: Torchruns) -> None:
    torchruns.start(1, 2)
    torchruns.train_on(2)
    torchruns.start(3)
    torchruns.train_on(3)
    torchruns.lose(torchruns.number_of(rank=1))
    torchruns.train_on(2)
    torchruns.start(4)
    step = torchruns.train_on(3)
    leaving = torchruns.all.pop(torchruns.number_of(rank=0))
    leaving.send_signal(signal.SIGTERM)
    assert torchruns.train_on(2)[0] > step[0]
    assert leaving.wait(PATIENCE_S) != 0
    assert {made[3] for made in torchruns.steps()} == {0}
    torchruns.finish()


@pytest.mark.slow
def test_a_node_that_falls_silent_is_missed(torchruns: Torchruns) -> None:
    torchruns.start(1, 2, 3)
    step = torchruns.train_on(3)
    silent = torchruns.number_of(rank=0)
    for process in processes.marked_processes(torchruns.folder / f"run-{silent}"):
        process.send_signal(signal.SIGSTOP)
    assert torchruns.train_on(2)[0] > step[0]
    torchruns.lose(silent)
    torchruns.finish()


@pytest.mark.slow
def test_a_script_that_fails_is_begun_again_as_often_as_torchrun_was_told(torchruns: Torchruns) -> None:
    torchruns.start(1, 2, nodes="2", restarts=1)
    step = torchruns.train_on(2)
    (torchruns.folder / "fail").touch()
    later = torchruns.train_on(2)
    while later[3] == 0:
        later = torchruns.train_on(2)
    assert later[0] > step[0]
    (torchruns.folder / "fail").touch()
    assert [torchrun.wait(PATIENCE_S) for torchrun in torchruns.all.values()] == [1, 1], torchruns.said()
    assert "of the script's own making" in torchruns.said()
    outcome = queue.outcome(open_bucket(f"file://{torchruns.folder}/bucket").at(layout.run("exp1", 1)), "exp1")
    assert outcome and outcome.result == "failed", "whoever comes later is to know, and not to wait"


@pytest.mark.slow
def test_one_too_many_waits_and_ends_with_the_others(torchruns: Torchruns) -> None:
    torchruns.start(1, 2, nodes="2")
    torchruns.train_on(2)
    torchruns.start(3, nodes="2")
    until(lambda: "a spare beside 2" in torchruns.said(3), "it to be told")
    torchruns.finish()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rdzv-id=exp1"], "error: --rdzv-endpoint is missing; name a bucket: --rdzv-endpoint=s3://my-bucket/lab"),
        (
            ["--rdzv-endpoint=file:///tmp/b"],
            "error: --rdzv-id is missing; choose a name that all nodes of the run give",
        ),
        (["--rdzv-id=a/b", "--rdzv-endpoint=file:///tmp/b"], "error: 'a/b' cannot be an ID"),
        (["--rdzv-id=exp1", "--rdzv-endpoint=host:29400"], "error: 'host:29400' is not a bucket URL"),
        (
            ["--rdzv-id=exp1", "--rdzv-endpoint=file:///tmp/b", "--local-addr=203.0.113.7"],
            "error: this machine does not have the address 203.0.113.7; it has ",
        ),
        (
            ["--rdzv-id=exp1", "--rdzv-endpoint=file:///tmp/b", "--rdzv-conf=timeout=10m"],
            "error: --rdzv-conf timeout=10m is not a number of seconds; for example timeout=600",
        ),
    ],
)
def test_flags_that_cannot_be_are_one_line(tmp_path: Path, flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=gpuctl", "--nnodes=2", *flags, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
