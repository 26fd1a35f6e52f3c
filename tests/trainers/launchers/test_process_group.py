"""A node's processes under a launcher, which are programs of this machine's here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpuctl.trainers.launchers import process_group
from gpuctl.trainers.launchers.adapter import Launcher, Process, World, named
from gpuctl.trainers.launchers.process_group import Failure, Unable, missing, run
from tests.waiting import PATIENCE_S, until

EXEC = named("exec")
ALONE = World("job", 3, 0, ("127.0.0.1",), (1,), "127.0.0.1", 1)
MEETS = Launcher("meets", lambda process: {"PEERS": " ".join(process.peers)}, meets=True)
SH = ["sh", "-c"]


def _world(nprocs: tuple[int, ...], rank: int, port: int = 1) -> World:
    return World("job", 3, rank, ("127.0.0.1",) * len(nprocs), nprocs, "127.0.0.1", port)


def _printed(folder: Path, local_rank: int = 0) -> str:
    return (folder / "job-3" / "attempt_0" / str(local_rank) / "stdout.log").read_text()


def _run(script: str, folder: Path, world: World = ALONE, launcher: Launcher = EXEC, **env: str) -> list[Failure]:
    return run(launcher, world, [*SH, script], {**os.environ, **env}, folder)


def test_each_process_has_its_rank_and_a_log_of_its_own_with_both_streams(tmp_path: Path) -> None:
    script = 'echo "$RANK of $WORLD_SIZE: $EXTRA"; echo oops >&2'
    assert _run(script, tmp_path, _world((2, 2), 1), EXTRA="yes") == []
    assert [_printed(tmp_path, local) for local in (0, 1)] == ["2 of 4: yes\noops\n", "3 of 4: yes\noops\n"]


def test_a_hostfile_is_there_and_variables_of_another_scheduler_are_not(tmp_path: Path) -> None:
    script = 'cat "$GPUCTL_HOSTFILE"; env'
    _run(script, tmp_path, _world((2, 3), 0), SLURM_PROCID="7", PMI_RANK="7", PMIX_RANK="7", OMPI_COMM_WORLD_RANK="7")
    printed = _printed(tmp_path)
    assert printed.startswith("127.0.0.1 slots=2\n127.0.0.1 slots=3\n")
    assert not re.search(r"(?m)^(SLURM|PMI|OMPI)", printed)


def test_the_first_that_fails_ends_the_others_and_is_told_alone(tmp_path: Path) -> None:
    script = 'if [ "$RANK" = 1 ]; then exit 3; fi; trap "" TERM; while true; do sleep 0.05; done'
    hard = replace(EXEC, ends_softly=False)
    failures = _run(script, tmp_path, _world((3,), 0), hard)
    assert [(one.local_rank, one.exit_code) for one in failures] == [(1, 3)] and failures[0].pid


def test_a_program_may_end_softly(tmp_path: Path) -> None:
    script = 'if [ "$RANK" = 1 ]; then while ! [ -e ready ]; do sleep 0.02; done; exit 3; fi'
    script += '; trap "echo saved; exit 0" TERM; touch ready; while true; do sleep 0.05; done'
    failures = run(EXEC, _world((2,), 0), ["sh", "-c", f"cd {tmp_path}; {script}"], os.environ, tmp_path)
    assert [(one.local_rank, one.exit_code) for one in failures] == [(1, 3)]
    assert _printed(tmp_path, 0) == "saved\n"


def test_signals_are_told_as_a_shell_tells_them(tmp_path: Path) -> None:
    assert [one.exit_code for one in _run("kill -ABRT $$", tmp_path)] == [134]


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("no-such-program", 127, "no-such-program: command not found"),
        ("/etc/passwd", 126, "/etc/passwd: Permission"),
    ],
)
def test_a_program_that_cannot_be_started_is_told_as_a_shell_tells_it(
    tmp_path: Path, command: str, code: int, said: str
) -> None:
    assert [one.exit_code for one in run(EXEC, ALONE, [command], os.environ, tmp_path)] == [code]
    assert _printed(tmp_path).startswith(said)


def test_what_is_wrong_with_a_program_is_said(tmp_path: Path) -> None:
    def said(text: str) -> str:
        program = tmp_path / "program"
        program.write_text(text)
        program.chmod(0o755)
        run(EXEC, ALONE, [str(program), "a b"], os.environ, tmp_path)
        return _printed(tmp_path).splitlines()[-1]

    assert said("#!/bin/sh\r\necho hello\r\n").endswith("is not there; has the file Windows line ends?")
    assert said('echo "$1"') == "a b", "a shell runs what says no #! line"
    run(EXEC, ALONE, ["sleep 1"], os.environ, tmp_path)
    assert _printed(tmp_path).endswith("sleep 1: command not found; arguments go after `--`\n")


def test_a_python_script_is_run_by_this_interpreter_and_prints_at_once(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import sys; print(sys.executable, sys.argv[1:], sys.stdout.write_through)")
    assert run(EXEC, ALONE, [str(script), "a b"], os.environ, tmp_path) == []
    assert _printed(tmp_path) == f"{sys.executable} ['a b'] True\n"


def test_several_processes_share_the_cores_unless_told_otherwise(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for nproc, given, seen in ((1, None, "unset"), (2, None, "1"), (2, "3", "3")):
        more = {"OMP_NUM_THREADS": given} if given else {}
        run(EXEC, _world((nproc,), 0), [*SH, "echo ${OMP_NUM_THREADS-unset}"], {**env, **more}, tmp_path / seen)
        assert _printed(tmp_path / seen) == f"{seen}\n"


def test_the_processes_of_all_nodes_are_told_ports_of_their_own_that_they_can_listen_on(tmp_path: Path) -> None:
    held = socket.create_server(("127.0.0.1", 0))
    port = held.getsockname()[1]
    script = tmp_path / "listen.py"
    script.write_text(
        "import os, socket\n"
        "own = os.environ['PEERS'].split()[int(os.environ['RANK'])]\n"
        "server = socket.socket()\n"
        "server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "server.bind((own.rpartition(':')[0], int(own.rpartition(':')[2])))\n"
        "server.listen()\n"
        "print(os.environ['PEERS'])\n"
    )

    def node(rank: int) -> list[Failure]:
        world = _world((1, 2), rank, port)
        return run(MEETS, world, [str(script)], os.environ, tmp_path / str(rank), held if rank == 0 else None)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(node, (1, 0))] == [[], []]
    told = {_printed(tmp_path / "0"), _printed(tmp_path / "1", 0), _printed(tmp_path / "1", 1)}
    (peers,) = told
    assert len(set(peers.split())) == 3 and f":{port}" not in peers


def test_the_masters_port_is_free_for_the_framework_and_for_nobody_else(tmp_path: Path) -> None:
    held = socket.create_server(("127.0.0.1", 0))
    world = replace(ALONE, master_port=held.getsockname()[1])
    script = tmp_path / "serve.py"
    script.write_text(
        "import os, socket\n"
        "address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "try:\n"
        "    socket.socket().bind(address)\n"
        "except OSError:\n"
        "    print('taken')\n"
        "print(socket.create_server(address).getsockname()[1])\n"
    )
    with held.dup():  # as the agent has, for a moment
        assert run(EXEC, world, [str(script)], os.environ, tmp_path, held) == []
    assert _printed(tmp_path) == f"taken\n{world.master_port}\n"


def test_a_node_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_MEET_S", 0.2)
    held = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(Unable, match="not all nodes of the round have come: gpuctl/1 was not told"):
        run(MEETS, _world((1, 1), 0, held.getsockname()[1]), [*SH, "true"], os.environ, tmp_path, held)


def test_a_package_that_is_not_there_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    needs = replace(EXEC, needs="no_such_package", install="pip install it", packages=("json", "nor_this"))
    said = rf"{re.escape(sys.executable)} has no no_such_package on this node; install it there: pip install it"
    with pytest.raises(Unable, match=said):
        run(needs, ALONE, ["x.py"], os.environ, tmp_path)
    assert re.fullmatch(said, missing(needs, [sys.executable, "x"], os.environ))
    assert missing(replace(needs, needs="json"), ["x.py"], os.environ) == ""
    assert missing(needs, ["./my-program"], os.environ) == "", "nothing is known of what it needs"


def test_packages_that_make_a_difference_are_looked_for_where_the_script_will_run(tmp_path: Path) -> None:
    seen: list[frozenset[str]] = []

    def variables(process: Process) -> dict[str, str]:
        seen.append(process.packages)
        return {}

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "extra_one.py").touch()
    launcher = Launcher("x", variables, needs="json", packages=("extra_one", "nor_this"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "theirs")}
    run(launcher, ALONE, [sys.executable, "-c", ""], env, tmp_path)
    assert seen == [frozenset({"json", "extra_one"})]


# -- as a program -----------------------------------------------------------------------------------------------------

MINGLE = {
    "GPUCTL_NODE_ADDRESSES": "127.0.0.1",
    "MINGLE_ID": "run",
    "MINGLE_ROUND": "2",
    "NODE_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def _program(*command: str, launcher: str = "exec", nproc: int = 1) -> list[str]:
    return [sys.executable, "-P", "-m", process_group.__name__, launcher, str(nproc), *command]


def test_as_a_program_it_prints_where_it_is_and_ends_as_the_first_that_failed(tmp_path: Path) -> None:
    script = 'echo "$RANK/$WORLD_SIZE"; : > $RANK; until [ -e 0 ]; do :; done; exit $((RANK * 5))'
    command = _program(*SH, script, nproc=2)
    done = subprocess.run(command, env={**os.environ, **MINGLE}, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, sorted(done.stdout.split())) == (5, ["0/2", "1/2"])


def test_as_a_program_it_ends_by_the_signal_that_ended_a_process() -> None:
    done = subprocess.run(_program(*SH, "kill -ABRT $$"), env={**os.environ, **MINGLE})
    assert done.returncode == -signal.SIGABRT
    done = subprocess.run(_program(*SH, "kill -KILL $$"), env={**os.environ, **MINGLE})
    assert done.returncode == -signal.SIGKILL


def test_as_a_program_it_leaves_signals_to_the_processes(tmp_path: Path) -> None:
    script = f'trap "echo told; exit 0" USR1; touch {tmp_path}/ready; while true; do sleep 0.05; done'
    process = subprocess.Popen(
        _program(*SH, script), env={**os.environ, **MINGLE}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    until((tmp_path / "ready").exists, "the process to listen")
    os.killpg(process.pid, signal.SIGUSR1)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (0, "told\n")


def test_as_a_program_it_says_in_a_line_what_is_missing() -> None:
    command = _program(sys.executable, "-c", "", launcher="horovod")
    done = subprocess.run(command, env={**os.environ, **MINGLE}, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"gpuctl: \S+ has no horovod on this node; install it there: .*\n", done.stderr)
