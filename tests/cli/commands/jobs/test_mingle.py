"""``gpuctl mingle`` as people and scripts start it: real processes, a folder as the bucket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.faults import Proxy
from tests.waiting import PATIENCE_S, until


class Shells:
    """Several shells on one machine, each at an address of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[subprocess.Popen[str]] = []

    def mingle(
        self, *args: str, run: str = "exp1", address: int = 1, bucket: str | None = None
    ) -> subprocess.Popen[str]:
        where = ["--bucket", bucket or f"file://{self.folder}/b", "--address", f"127.0.0.{address}"]
        self._all.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "gpuctl.cli.main", "mingle", "--id", run, *where, *args],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=self.folder,
                env={**os.environ, "FOLDER": str(self.folder)},
            )
        )
        return self._all[-1]

    def wait_for(self, *names: str) -> None:
        for name in names:
            until((self.folder / name).exists, name)

    def end(self) -> None:
        for one in self._all:
            one.kill()
            one.communicate()


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    shells = Shells(tmp_path)
    yield shells
    shells.end()


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    said = [process.communicate(timeout=PATIENCE_S) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def test_what_it_prints_is_for_eval(shells: Shells) -> None:
    """Both shells meet through it: rank 0 listens at the address and port, the other connects."""
    serve = f'{sys.executable} -c \'import os, socket; s = socket.create_server((os.environ["MASTER_ADDR"], '
    serve += 'int(os.environ["MASTER_PORT"]))); s.accept()[0].sendall(b"hello from rank 0")\''
    call = f"{sys.executable} -c 'import os, socket, time\nwhile True:\n  try: s = socket.create_connection(("
    call += 'os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))); break\n  except OSError: time.sleep(0.05)\n'
    call += "print(s.recv(99).decode())'"
    mingle = f"{sys.executable} -m gpuctl.cli.main mingle --id e --nodes 2 --bucket file://{shells.folder}/b"
    script = f'eval "$({mingle} --address 127.0.0.$1)"; [ "$RANK" = 0 ] && {serve} || {call}'
    both = [
        subprocess.Popen(["bash", "-c", script, "sh", str(number)], stdout=subprocess.PIPE, text=True)
        for number in (1, 2)
    ]
    said = [process.communicate(timeout=PATIENCE_S)[0] for process in both]
    assert sorted(said) == ["", "hello from rank 0\n"]


def test_json_and_an_env_file_hold_the_same(shells: Shells) -> None:
    first = shells.mingle("--nodes", "2", "-o", "json", "--port", "29511")
    second = shells.mingle("--nodes", "2", "--env-file", "vars", "--rank", "0", "--port", "29511", address=2)
    (code, said, _), (other_code, nothing, _) = ended(first, second)
    assert (code, other_code, nothing) == (0, 0, "")
    place = json.loads(said)
    assert (place["rank"], place["world_size"], place["master_address"]) == (1, 2, "127.0.0.2")
    assert place["env"]["MASTER_PORT"] == "29511"
    lines = dict(line.split("=", 1) for line in (shells.folder / "vars").read_text().splitlines())
    assert lines == {**place["env"], "RANK": "0", "NODE_RANK": "0", "PET_NODE_RANK": "0", "LOCAL_ADDR": "127.0.0.2"}


def test_a_command_runs_on_all_and_its_output_is_this_ones_output(shells: Shells) -> None:
    say = ["--nodes", "2", "--", "bash", "-c", 'echo "out $RANK of $WORLD_SIZE"; echo "err $RANK" >&2']
    found = ended(shells.mingle(*say), shells.mingle(*say, address=2))
    assert [code for code, _, _ in found] == [0, 0]
    assert sorted(out for _, out, _ in found) == ["out 0 of 2\n", "out 1 of 2\n"]
    assert all("mingle: round 1 of exp1: this is rank" in err and "\nerr " in err for _, _, err in found)


def test_the_exit_code_is_the_commands_and_the_others_end_with_it(shells: Shells) -> None:
    fail = ["--nodes", "2", "--", "bash", "-c", 'if [ "$RANK" = 1 ]; then exit 7; else sleep 1000; fi']
    for code, _, err in ended(shells.mingle(*fail), shells.mingle(*fail, address=2)):
        assert code == 7
        assert "error: run exp1 failed: rank 1 on " in err
        assert "exited with code 7" in err


def test_a_command_that_failed_is_begun_again_as_often_as_told(shells: Shells) -> None:
    once = 'if [ "$RANK" = 0 ] && [ "$MINGLE_ROUND" = 1 ]; then exit 7; fi; echo "round $MINGLE_ROUND"'
    args = ["--nodes", "2", "--max-restarts", "1", "--", "bash", "-c", f"{once}; sleep 1"]
    for code, out, err in ended(shells.mingle(*args), shells.mingle(*args, address=2)):
        assert (code, out.splitlines()[-1]) == (0, "round 2")
        assert "restart 1 of 1: rank 0" in err


LIVES = 'trap "touch $FOLDER/asked-$RANK; exit 0" TERM; trap "touch $FOLDER/usr-$RANK" USR1; '
LIVES += 'touch "$FOLDER/up-$RANK-$MINGLE_ROUND"; while [ ! -e "$FOLDER/over" ]; do sleep 0.05; done'


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_node_that_is_to_end_asks_its_command_and_the_others_go_on(shells: Shells, number: int, code: int) -> None:
    both = [shells.mingle("--nodes", "1:2", "--", "bash", "-c", LIVES, address=n) for n in (1, 2)]
    shells.wait_for("up-0-1", "up-1-1")
    both[0].send_signal(number)
    ((found, _, err),) = ended(both[0])
    assert found == code, err
    shells.wait_for("up-0-2")
    assert len([*shells.folder.glob("asked-*")]) == 2, "the other's was asked too, and begun again"
    (shells.folder / "over").touch()
    assert [one[0] for one in ended(both[1])] == [0]


def test_a_second_ctrl_c_does_not_wait_for_the_command(shells: Shells) -> None:
    deaf = 'trap "touch $FOLDER/asked" TERM; touch "$FOLDER/up"; while :; do sleep 0.05; done'
    one = shells.mingle("--nodes", "1", "--grace", "1000", "--", "bash", "-c", deaf)
    shells.wait_for("up")
    one.send_signal(signal.SIGINT)
    shells.wait_for("asked")
    one.send_signal(signal.SIGINT)
    assert [found[0] for found in ended(one)] == [130]


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(shells: Shells) -> None:
    deaf = 'trap "" TERM; touch "$FOLDER/up"; echo $$ > "$FOLDER/pid"; while :; do sleep 0.05; done'
    one = shells.mingle("--nodes", "1", "--grace", "2.5", "--", "bash", "-c", deaf)
    shells.wait_for("up", "pid")
    one.send_signal(signal.SIGTERM)
    assert [found[0] for found in ended(one)] == [143]
    assert not psutil.pid_exists(int((shells.folder / "pid").read_text()))


def test_other_signals_go_to_the_command(shells: Shells) -> None:
    one = shells.mingle("--nodes", "1", "--", "bash", "-c", LIVES)
    shells.wait_for("up-0-1")
    one.send_signal(signal.SIGUSR1)
    shells.wait_for("usr-0")
    (shells.folder / "over").touch()
    assert [found[0] for found in ended(one)] == [0]


@pytest.mark.parametrize("command", [[], ["--", "true"]])
def test_ctrl_c_while_it_waits_leaves_nothing_behind(shells: Shells, command: list[str]) -> None:
    first, second = (shells.mingle("--nodes", "3", *command, address=n) for n in (1, 2))
    assert second.stderr is not None
    until(lambda: "2 of 3 are here" in second.stderr.readline(), "both to have met")  # type: ignore[union-attr]
    first.send_signal(signal.SIGINT)
    ((code, out, _),) = ended(first)
    assert (code, out) == (130, "")
    until(lambda: "1 of 3 are here" in second.stderr.readline(), "the other to be told")  # type: ignore[union-attr]
    assert len([*shells.folder.glob("b/mingle/exp1/*/nodes/*")]) == 1
    second.send_signal(signal.SIGTERM)
    assert [found[0] for found in ended(second)] == [143]
    assert [*shells.folder.glob("b/mingle/exp1/*/nodes/*")] == []


def test_a_node_that_is_killed_leaves_no_command_and_ends_no_run(shells: Shells) -> None:
    say = 'echo $$ > "$FOLDER/pid-$RANK-$MINGLE_ROUND"; ' + LIVES
    both = [shells.mingle("--nodes", "1:2", "--", "bash", "-c", say, address=n) for n in (1, 2)]
    shells.wait_for("up-0-1", "up-1-1")
    pids = [int((shells.folder / f"pid-{rank}-1").read_text()) for rank in (0, 1)]
    both[0].kill()
    shells.wait_for("up-0-2")
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "both commands of round 1 to be gone")
    (shells.folder / "over").touch()
    ((code, _, err),) = ended(both[1])
    assert code == 0, err
    assert " lost)" in err


def test_a_bucket_that_lets_everybody_win_is_refused(shells: Shells, s3_url: str, s3_endpoint: str) -> None:
    with Proxy(s3_endpoint, strip=["If-None-Match"]).running() as proxy:
        node = shells.mingle("--nodes", "2", bucket=s3_url.replace(s3_endpoint, proxy.url))
        ((code, out, err),) = ended(node)
    assert (code, out) == (1, "")
    assert "ignores create-only puts" in err
    assert len(err.splitlines()) == 1


def test_a_bucket_that_is_not_there_is_told_at_once(shells: Shells, s3_url: str) -> None:
    address, _, options = s3_url.partition("?")
    node = shells.mingle("--nodes", "2", bucket=f"{address.rpartition('/')[0]}-gone/x?{options}")
    ((code, out, err),) = ended(node)
    assert (code, out) == (1, "")
    assert "-gone" in err
    assert len(err.splitlines()) == 1


def test_modules_in_the_folder_of_the_command_are_not_imported(shells: Shells) -> None:
    for name in ("signal", "psutil", "gpuctl"):
        (shells.folder / f"{name}.py").write_text("raise SystemExit(9)")
    ((code, out, err),) = ended(shells.mingle("--nodes", "1", "--", "echo", "ok"))
    assert (code, out) == (0, "ok\n"), err


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_an_env_file_that_is_a_link_or_a_pipe_stays_one(shells: Shells, kind: str) -> None:
    file, target = shells.folder / "env", shells.folder / "target"
    if kind == "link":
        target.touch()
        file.symlink_to(target)
    else:
        os.mkfifo(file)
    node = shells.mingle("--nodes", "1", "--env-file", str(file))
    text = file.read_text() if kind == "pipe" else ""
    ((code, _, err),) = ended(node)
    assert code == 0, err
    assert file.is_symlink() if kind == "link" else file.is_fifo()
    assert "RANK=0\n" in (text or target.read_text())
