"""When a machine counts as idle, on a machine made of files: a folder with what its kernel and its agent would tell."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from gpuctl.bootstrap.boot.idle import BOOT_S, CLAIM_S, EVERY_S, GpuUse, cpu_seconds, sessions, watch
from gpuctl.bootstrap.boot.leave import claim
from gpuctl.bootstrap.boot.metadata import Metadata
from tests.fakes.metadata import Service
from tests.fakes.unkillable import held
from tests.waiting import until

MINUTE_S = 60.0


class Bare:
    """A machine. ``run`` is its idle watch under a clock of its own; ``happens`` is called before each look."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 1000.0
        self.load = 0.0
        self.cores = 0.0
        self.ticks = 0.0
        self.left: list[tuple[float, str]] = []
        self.replaced: list[bool] = []
        """Of each time that it left: whether another was to come in its place."""
        self.end_s = 2 * 3600.0
        self.sleeps_s: dict[float, float] = {}
        """Moment to the length of a sleep of the machine that begins then."""
        self.happens: Callable[[float], object] = lambda _: None
        """What a test changes: ``minutes`` since the watch began."""
        (root / "run/gpuctl").mkdir(parents=True)
        (root / "proc/1").mkdir(parents=True)
        self.booted()

    def booted(self) -> None:
        marker = self.root / "var/lib/gpuctl/boot/agent.done"
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()

    def hangs_in_boot(self) -> None:
        (self.root / "var/lib/gpuctl/boot/agent.done").unlink()

    def log_in(self, title: str = "sshd: ubuntu@pts/0") -> None:
        (self.root / "proc/77").mkdir(exist_ok=True)
        (self.root / "proc/77/cmdline").write_bytes(title.encode() + b"\0" * 9)

    def log_out(self) -> None:
        (self.root / "proc/77/cmdline").unlink(missing_ok=True)

    def touch_busy(self) -> None:
        busy = self.root / "run/gpuctl/busy"
        busy.touch()
        os.utime(busy, ns=(0, int(self.now * 1e9)))

    def say_ill(self) -> None:
        (self.root / "run/gpuctl/ill").write_text("GPU 1: it has fallen off the bus (Xid 79)")

    def run(self, minutes: float = 15, provider: str = "aws", hold: float = 0.0) -> list[tuple[float, str]]:
        """Minutes at which it left, and why."""
        self._began = self.now
        self._count()
        with contextlib.suppress(StopIteration):
            watch(
                self.root,
                {"provider": provider, "idle_minutes": minutes, "hold_ill_minutes": hold},
                Metadata("ssh"),
                monotonic=lambda: self.now,
                sleep=self._sleep,
                take_away=self._leave,
                gpu_load=lambda: self.load,
            )
        return self.left

    def _leave(self, _spec: object, _metadata: object, why: str, *, replace: bool) -> None:
        self.left.append(((self.now - self._began) / MINUTE_S, why))
        self.replaced.append(replace)

    def _sleep(self, seconds: float) -> None:
        self.ticks += self.cores * seconds * 100
        self.now += seconds + self.sleeps_s.pop(self.now - self._began, 0.0)
        if self.now - self._began > self.end_s:
            raise StopIteration
        self.happens((self.now - self._began) / MINUTE_S)
        self._count()

    def _count(self) -> None:
        stat = f"1 (a (b) c) S 0 1 1 0 -1 4194560 1 1 1 1 {int(self.ticks)} 0 0 0 20 0 1 0 5\n"
        (self.root / "proc/1/stat").write_text(stat)


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    return Bare(tmp_path)


def test_the_kernel_finds_out_within_minutes_that_the_laptop_at_the_other_end_of_a_login_has_died(
    bare: Bare,
) -> None:
    """By itself it asks after two hours; until then the dead login would keep the machine."""
    knobs = bare.root / "proc/sys/net/ipv4"
    knobs.mkdir(parents=True)
    bare.run()
    after_s, every_s, times = (
        int((knobs / f"tcp_keepalive_{name}").read_text()) for name in ("time", "intvl", "probes")
    )
    assert 60 <= after_s + every_s * times <= 5 * MINUTE_S


def test_a_machine_to_which_no_job_comes_leaves_after_the_minutes_it_was_given(bare: Bare) -> None:
    ((after, why),) = bare.run(minutes=15)[:1]
    assert after == pytest.approx(15, abs=0.6) and why == "idle for 15 minutes"
    assert (bare.root / "run/gpuctl/leaving").read_text() == why


@pytest.mark.parametrize("how", ["job", "login", "gpu", "cpu"])
def test_whatever_is_done_on_it_keeps_a_machine_until_it_is_over(bare: Bare, how: str) -> None:
    def happens(minutes: float) -> None:
        works = minutes < 40
        if how == "job" and works:
            bare.touch_busy()
        elif how == "login":
            bare.log_in() if works else bare.log_out()
        elif how == "gpu":
            bare.load = 30.0 if works else 1.0
        elif how == "cpu":
            bare.cores = 1.0 if works else 0.1

    bare.happens = happens
    ((after, _),) = bare.run()[:1]
    assert after == pytest.approx(55, abs=0.6)


def test_work_in_between_starts_the_count_anew(bare: Bare) -> None:
    bare.happens = lambda minutes: bare.touch_busy() if minutes % 10 == 0 else None
    assert bare.run() == []


@pytest.mark.parametrize(
    ("title", "counts"),
    [
        ("sshd: ubuntu@pts/0", True),
        ("sshd: root@notty", True),
        ("/usr/bin/ssm-session-worker\0me-0123456789abcdef0", True),
        ("/snap/amazon-ssm-agent/9881/ssm-session-worker\0me-0123456789abcdef0", True),
        ("/usr/bin/ssm-agent-worker\0", False),
        ("sshd-session: ubuntu@pts/3", True),
        ("sshd: root", True),
        ("sshd-session: first.last-name", True),
        ("sshd: unknown [priv]", False),
        ("sshd: ubuntu [net]", False),
        ("sshd-session: [accepted]", False),
        ("sshd-session: ubuntu [priv]", False),
        ("sshd-auth: ubuntu [net]", False),
        ("sshd: /usr/sbin/sshd", False),
        ("sshd: [accepted]", False),
        ("sshd: ubuntu [priv]", False),
        ("sshd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups", False),
        ("vim notes-on-sshd: a@b", False),
        ("vim notes-on-sshd: root", False),
    ],
)
def test_a_login_is_told_from_somebody_who_only_knocks(bare: Bare, title: str, counts: bool) -> None:
    bare.log_in(title)
    assert sessions(bare.root) == counts


def test_a_machine_that_sleeps_is_not_idle_for_that_long(bare: Bare) -> None:
    bare.sleeps_s = {MINUTE_S: 3600.0}
    ((after, _),) = bare.run()[:1]
    assert after == pytest.approx(75, abs=0.8)


def test_the_time_of_day_does_not_matter(bare: Bare) -> None:
    """The agent touches its file with a clock that was set back by years."""

    def happens(minutes: float) -> None:
        busy = bare.root / "run/gpuctl/busy"
        busy.touch()
        os.utime(busy, ns=(0, int(1e9 * (1e6 - minutes))))

    bare.happens = happens
    assert bare.run() == []


def test_a_boot_keeps_a_machine_and_one_that_hangs_does_not(bare: Bare) -> None:
    bare.hangs_in_boot()
    bare.cores = 4.0  # whatever it is that loops
    ((after, _),) = bare.run()[:1]
    assert after == pytest.approx(BOOT_S / 60 + 15, abs=0.8)


@pytest.mark.slow
def test_who_looks_into_a_boot_that_hangs_is_not_thrown_out(bare: Bare) -> None:
    bare.hangs_in_boot()
    bare.log_in()
    assert bare.run() == []


def test_a_machine_that_is_taken_already_is_left_alone(bare: Bare) -> None:
    assert claim(bare.root, "aws: terminate")
    bare.end_s = CLAIM_S - 2 * EVERY_S
    assert bare.run(minutes=2) == []


def test_a_claim_that_came_to_nothing_does_not_keep_a_machine_for_ever(bare: Bare) -> None:
    assert claim(bare.root, "aws: terminate")
    ((after, why),) = bare.run(minutes=2)[:1]
    assert after == pytest.approx(CLAIM_S / 60, abs=0.8) and why == "idle for 2 minutes"


def test_a_machine_that_is_still_there_after_it_has_left_tries_again(bare: Bare) -> None:
    first, second, *_ = bare.run(minutes=2)
    assert second[0] - first[0] == pytest.approx(CLAIM_S / 60, abs=0.8)


def test_who_owns_the_machine_has_no_watch(bare: Bare) -> None:
    bare.say_ill()
    assert bare.run(15, "ssh") == [] and bare.now == 1000.0


def test_with_0_minutes_a_machine_is_never_idle_and_is_looked_at_as_rarely_as_others(bare: Bare) -> None:
    looks: list[float] = []
    bare.happens = looks.append
    assert bare.run(0) == [] and len(looks) <= bare.end_s / EVERY_S


@pytest.mark.slow
@pytest.mark.parametrize("idle_minutes", [0, 15])
def test_a_machine_that_is_ill_is_replaced_at_once(bare: Bare, idle_minutes: float) -> None:
    def happens(minutes: float) -> None:
        if minutes < 40:
            bare.touch_busy()
        else:
            bare.say_ill()

    bare.happens = happens
    ((after, why), *_) = bare.run(idle_minutes)
    assert after == pytest.approx(40, abs=0.8) and bare.replaced[0]
    assert why == "ill: GPU 1: it has fallen off the bus (Xid 79)"


def test_a_machine_that_is_ill_is_held_for_a_look_and_is_not_idle_meanwhile(bare: Bare) -> None:
    bare.touch_busy()
    bare.say_ill()
    ((after, why), *_) = bare.run(15, hold=60)
    assert after == pytest.approx(60, abs=0.8) and why.startswith("ill: ") and bare.replaced[0]


def test_who_looks_at_a_machine_that_is_ill_has_all_of_the_time_after_the_last_login(bare: Bare) -> None:
    bare.touch_busy()
    bare.say_ill()
    bare.happens = lambda minutes: bare.log_in() if 10 < minutes < 50 else bare.log_out()
    ((after, _), *_) = bare.run(15, hold=30)
    assert after == pytest.approx(80, abs=0.8) and bare.replaced[0]


def test_one_that_is_ill_and_never_had_a_job_is_taken_away_and_not_replaced(bare: Bare) -> None:
    """Else what makes all machines seem ill, such as a driver in an image, would cost money without end."""
    bare.say_ill()
    ((after, why), *_) = bare.run()
    assert after < 1 and why.startswith("ill: ") and not bare.replaced[0]


def test_azures_notices_are_warmed_up_at_boot(bare: Bare) -> None:
    with Service("azure").running() as service:
        with pytest.raises(StopIteration):
            watch(
                bare.root,
                {"provider": "azure", "idle_minutes": 15, "hold_ill_minutes": 0},
                Metadata("azure", endpoint=service.url),
                sleep=_stop,
            )
        service.await_(lambda: any("scheduledevents" in asked for asked in service.seen))


def _stop(_: float) -> None:
    raise StopIteration


@pytest.mark.timing
def test_the_cpu_time_of_this_very_machine_grows_with_work() -> None:
    before = cpu_seconds(Path("/"))
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert cpu_seconds(Path("/")) - before > 0.2


@pytest.mark.timing
def test_gpus_that_do_not_answer_keep_no_machine_and_are_not_asked_twice_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question hangs in the driver, where not even SIGKILL ends it."""
    asked, smi = tmp_path / "asked", tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho $$ >> "{asked}"\n[ -e "{asked}.well" ] || exec sleep 600\necho 7; echo 40\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    use = GpuUse(timeout_s=2.0)

    def pids() -> list[int]:
        return [int(line) for line in asked.read_text().split()] if asked.exists() else []

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(use)
        until(pids, "the question")
        with held(pids()[0]):
            assert first.result(20) == 0.0
            assert use() == 0.0 and len(pids()) == 1
    asked.with_suffix(".well").touch()
    until(lambda: use() == 40.0, "an answer, once that process has ended")


@dataclass(frozen=True)
class Sshd:
    """A real one, that lets ``key`` in."""

    port: int
    pid: int

    def sessions(self, folder: Path) -> int:
        """As ``idle.sessions`` counts them, of this one alone: the machine may have others. ``folder`` is for links."""
        with tempfile.TemporaryDirectory(dir=folder) as root:
            proc = Path(root, "proc")
            proc.mkdir()
            for child in psutil.Process(self.pid).children(recursive=True):
                (proc / str(child.pid)).symlink_to(f"/proc/{child.pid}")
            return sessions(Path(root))

    def await_sessions(self, folder: Path, number: int) -> None:
        until(lambda: self.sessions(folder) == number, f"{number} sessions")


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    program = Path("/usr/sbin/sshd")
    if not program.exists() or os.geteuid() != 0:
        pytest.skip("needs sshd, and root to run it")
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    (tmp_path / "key.pub").rename(tmp_path / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = int(held.getsockname()[1])
    options = [
        f"ListenAddress=127.0.0.1:{port}",
        f"HostKey={tmp_path}/host",
        f"AuthorizedKeysFile={tmp_path}/authorized",
    ]
    options += ["StrictModes=no", "UsePAM=no", "PidFile=none", "PermitRootLogin=yes"]
    flags = [flag for option in options for flag in ("-o", option)]
    server = subprocess.Popen([str(program), "-D", "-e", "-f", "/dev/null", *flags], stderr=subprocess.DEVNULL)
    try:
        yield Sshd(port, server.pid)
    finally:
        server.terminate()
        server.wait(10)


def _in(path: Path, port: int, *how: str) -> list[str]:
    """The command of a login, by the key in ``path``."""
    options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectionAttempts=20"]
    flags = [flag for option in options for flag in ("-o", option)]
    return ["ssh", "-F", "none", "-i", str(path / "key"), "-p", str(port), *flags, *how]


@pytest.mark.slow
def test_a_real_login_counts_and_only_while_it_lasts(sshd: Sshd, tmp_path: Path) -> None:
    command = _in(tmp_path, sshd.port, "root@127.0.0.1", "echo in; cat")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as login:
        assert login.stdin and login.stdout
        assert login.stdout.readline() == "in\n"
        assert sshd.sessions(tmp_path) == 1
        login.stdin.close()
        login.wait(20)
    sshd.await_sessions(tmp_path, 0)


@pytest.mark.slow
def test_who_only_forwards_a_port_is_logged_in_too(sshd: Sshd, tmp_path: Path) -> None:
    """As ``gpuctl forward`` does; that it is in, ssh tells by its ``LocalCommand``."""
    told = ("-o", "PermitLocalCommand=yes", "-o", "LocalCommand=echo in")
    command = _in(tmp_path, sshd.port, "-N", "-T", "-L", f"{tmp_path}/local:127.0.0.1:9", *told, "root@127.0.0.1")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as login:
        assert login.stdout
        try:
            assert login.stdout.readline() == "in\n"
            sshd.await_sessions(tmp_path, 1)
        finally:
            login.terminate()
    sshd.await_sessions(tmp_path, 0)
