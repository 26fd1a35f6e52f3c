"""The way in: one line for a failure, exit codes, and what a verb may load."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpuctl import __version__
from gpuctl.cli.app import app
from gpuctl.cli.main import run
from gpuctl.cli.verbs import VERBS
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.providers import interface
from tests.fakes.written_cluster import WrittenCluster

PANICS = """
from gpuctl.stacks.providers.local import LocalProvider

class PanicException(BaseException):
    pass

class Broken(LocalProvider):
    def up(self, request):
        raise PanicException("called `unwrap()`\\nin Rust")
"""
HEAVY = ("torch", "numpy", "pulumi", "boto3", "google.cloud", "azure", "pydantic", "matplotlib", "tensorboard")
READ_ONLY = {
    "--help": ["--help"],
    "--version": ["--version"],
    "status": ["status", "-o", "json"],
    "logs": ["logs"],
    "jobs": ["jobs", "-o", "json"],
    "ckpt ls": ["ckpt", "ls"],
    "ckpt verify": ["ckpt", "verify"],
    "ckpt pull --format safetensors": ["ckpt", "pull", "last", "out", "--format", "safetensors"],
    "config show": ["config", "show"],
    "offers": ["offers"],
    "leaks --help": ["leaks", "--help"],
    "check --help": ["check", "--help"],
    "completion": ["completion", "bash"],
    "train --help": ["train", "--help"],
    "ssh --help": ["ssh", "--help"],
}
_REPORT_MODULES = """
import json, sys
from gpuctl.cli.main import run
code = run(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def modules_of(args: Sequence[str], cluster: WrittenCluster) -> tuple[int, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _REPORT_MODULES, *args],
        cwd=cluster.work,
        env=cluster.env,
        capture_output=True,
        text=True,
        check=True,
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return code, set(modules)


@pytest.mark.parametrize("name", READ_ONLY)
def test_a_verb_that_reads_loads_nothing_heavy(written: WrittenCluster, name: str) -> None:
    job = written.submit().job
    written.log(job, 1, "node-0", "hello")
    written.checkpoint(job, 5, {"weight": b"x"})
    code, modules = modules_of(READ_ONLY[name], written)
    assert code == 0
    heavy = {module for module in modules if module.startswith(HEAVY)}
    assert not heavy, f"gpuctl {name} loads {sorted(heavy)[:5]}"


def test_help_loads_no_verb(written: WrittenCluster) -> None:
    _, modules = modules_of(["--help"], written)
    assert not modules & {verb.module for verb in VERBS.values()}
    assert not [module for module in modules if module.startswith(("obstore", "rich", "yaml", "psutil"))]


def test_plain_status_loads_no_rich(written: WrittenCluster) -> None:
    _, modules = modules_of(["status"], written)
    assert "obstore" in modules
    assert not [module for module in modules if module.startswith("rich")]


@pytest.mark.parametrize("name", VERBS)
def test_the_table_of_verbs_says_what_each_verb_says_of_itself(name: str) -> None:
    module: Any = import_module(VERBS[name].module)
    function = getattr(module, "verb", getattr(module, name, None))
    about = module.app.info.help if hasattr(module, "app") else inspect.getdoc(function)
    assert about
    assert about.splitlines()[0] == VERBS[name].about


def test_help_lists_every_verb() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name, verb in VERBS.items():
        assert any(line.split() == [name, *verb.about.split()] for line in result.output.splitlines())


def test_a_bad_number_of_nodes_reaches_the_caller_as_bad_input() -> None:
    result = CliRunner().invoke(app, ["up", "--nodes", "4:2"])
    assert isinstance(result.exception, BadInput)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"gpuctl {__version__}\n"


def test_no_verb_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "Machines:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["up", "--nodes", "0"], "--nodes 0 is too few; use 1 or more"),
        (["up", "--nodes", "4:2"], "--nodes 4:2 has a minimum above the maximum; did you mean 2:4?"),
        (["up", "--nodes", "abc"], "--nodes abc is not a number of nodes; use a number such as 4, or MIN:MAX such as"),
        (["up", "--nodes", "-1"], "--nodes -1 is not a number of nodes"),
        (["up", "--provider", "moon"], "unknown provider 'moon'; use one of: "),
        (["up", "--qqq"], "No such option: --qqq; see `gpuctl up --help`"),
        (["up", "four"], "Got unexpected extra argument"),
        (["statsu"], "unknown command 'statsu'; did you mean `gpuctl status`?"),
        (["zork"], "unknown command 'zork'; see `gpuctl --help`"),
        (["--qqq"], "No such option: --qqq"),
        (["ckpt"], "say what: gpuctl ckpt ls, gpuctl ckpt pull, gpuctl ckpt rm, gpuctl ckpt verify, gpuctl ckpt gc"),
        (["train"], "Missing argument 'SCRIPT'"),
        (["train", "a.py", "--lr", "1"], "No such option: --lr; the script's own arguments go after `--`"),
        (["train", "nowhere.py"], "script nowhere.py does not exist"),
        (["status", "-o", "xml"], "--output xml is not a format; use text or json"),
        (["status", "--cluster", "other"], "no cluster named 'other'; there are: default"),
        (["status", "--bucket", "ftp://x"], "'ftp://x' is not a bucket URL; use one of s3://, "),
        (["status", "--bucket", "file:///no/such/folder"], "folder /no/such/folder does not exist"),
        (["logs", "nope"], "unknown job 'nope'"),
        (["logs", "../x"], "unknown job '../x'"),
        (["logs", "--rank", "x"], "--rank x is not a whole number"),
        (["preempt", "node-0", "--notice", "soon"], "--notice soon is not a number of seconds"),
        (
            ["preempt", "node-0", "--replace-after", "x"],
            "--replace-after x is not a number of seconds; use one such as",
        ),
        (["status", "--bucket", "s3:///p"], "'s3:///p' names no bucket; write it as s3://BUCKET/PREFIX"),
        (
            ["config", "show", "--bucket", "gs://Mine"],
            "'gs://Mine' has a name that no bucket can have; a Google Cloud bucket",
        ),
        (["jobs", "--last", "0"], "--last 0 is too few; use 1 or more"),
        (
            ["up", "--bucket", "memory://"],
            "--bucket memory:// is another bucket in each process; use a folder, such as",
        ),
        (["completion", "tcsh"], "no completion for 'tcsh'; use one of: bash, zsh, fish"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(written: WrittenCluster, args: list[str], said: str) -> None:
    done = written.run(*args, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--bucket", "s3://UPPER_case!/p?endpoint=http://127.0.0.1:1"],
        ["--bucket", "az://a--b/p?account_name=lab"],
        ["--provider", "aws", "--bucket", "s3://Mine", "--dry-run"],
    ],
    ids=lambda args: args[-1],
)
def test_a_bucket_that_cannot_be_is_refused_before_anything_is_made(
    written: WrittenCluster, tmp_path: Path, args: list[str]
) -> None:
    written.env["GPUCTL_STATE_DIR"] = str(tmp_path / "empty")
    said = written.run("up", "-c", "new", *args, code=2).stderr
    assert "has a name that no bucket can have; a" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "empty").exists()


def test_debug_shows_the_traceback(written: WrittenCluster) -> None:
    written.env["GPUCTL_DEBUG"] = "1"
    done = written.run("up", "--nodes", "0", code=1)
    assert "Traceback" in done.stderr
    assert "BadInput: --nodes 0 is too few" in done.stderr


def test_a_panic_in_a_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no ``Exception``."""
    (tmp_path / "broken.py").write_text(PANICS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(interface._PROVIDERS, "local", "broken:Broken")
    monkeypatch.chdir(tmp_path)
    assert run(["up"]) == 1
    said = capsys.readouterr().err
    assert said == "error: a library of gpuctl's broke off: called `unwrap()`; report it, with what you typed\n"


def test_without_a_cluster_the_line_says_how_to_get_one(tmp_path: Path, written: WrittenCluster) -> None:
    written.env["GPUCTL_STATE_DIR"] = str(tmp_path / "empty")
    (written.work / "train.py").write_text("print('hello')\n")
    for args in (["train", "train.py"], ["status"], ["down"]):
        said = written.run(*args, code=2).stderr
        line = "error: no cluster named 'default'; create one with `gpuctl up`"
        elsewhere = "; if it was made on another machine: gpuctl down --by-tag default --provider aws|gcp|azure"
        assert said == f"{line}{elsewhere if args == ['down'] else ''}\n"


def test_a_cluster_made_elsewhere_is_reached_by_its_bucket(tmp_path: Path, written: WrittenCluster) -> None:
    written.env["GPUCTL_STATE_DIR"] = str(tmp_path / "empty")
    state = json.loads(written.run("status", "-o", "json", "--bucket", written.url).stdout)
    assert state["cluster"] == "default"


def test_a_reader_who_has_seen_enough_is_no_failure(written: WrittenCluster) -> None:
    job = written.submit().job
    written.log(job, 1, "node-0", *(f"line {i} " + "x" * 200 for i in range(5000)))
    process = written.start("logs", job)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("node-0/0 | line 0")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 141


def test_a_reader_who_never_came_is_no_failure_either(written: WrittenCluster) -> None:
    """What is printed fits into the buffer, so that only the last flush finds out."""
    process = written.start("status")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 141


def test_ctrl_c_is_one_line(written: WrittenCluster) -> None:
    job = written.submit().job
    written.log(job, 1, "node-0", "working")
    process = written.start("logs", "-f", job)
    assert process.stdout is not None
    assert process.stdout.readline() == "node-0/0 | working\n"
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "module", ["gpuctl.cli.main", "enum", "gpuctl.cli.app", "typer", "gpuctl.cli.commands.machines.status"]
)
def test_ctrl_c_is_one_line_also_while_the_command_line_is_imported(written: WrittenCluster, module: str) -> None:
    """It comes in the moment in which ``module`` is looked for."""
    program = f"""
        import os, signal, sys
        for name in [name for name in sys.modules if name.split(".")[0] in ("enum", "signal", "re")]:
            del sys.modules[name]
        class Interrupting:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        sys.argv = ["gpuctl", "status"]
        from gpuctl.cli.entry import main
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=written.env,
        cwd=written.work,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_later_is_left_to_the_verb(written: WrittenCluster) -> None:
    (written.work / "digits.py").write_text("")
    process = subprocess.Popen(
        [sys.executable, "-c", "from gpuctl.cli.entry import main; main()", "train", "digits.py"],
        env=written.env,
        cwd=written.work,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any("is queued" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "detached; digits-1 goes on" in said


def test_a_command_that_ignores_ctrl_c_from_the_start_goes_on_ignoring_it(written: WrittenCluster) -> None:
    program = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from gpuctl.cli.entry import main"
    ask = "import atexit; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); import sys; sys.argv[1:] = []"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; {ask}; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"],
        env=written.env,
        cwd=written.work,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


@pytest.mark.parametrize(
    ("words", "at", "wanted"),
    [
        ("gpuctl sta", 1, {"status"}),
        ("gpuctl logs --ra", 2, {"--rank"}),
        ("gpuctl ckpt ", 2, {"ls", "pull", "rm", "verify", "gc"}),
    ],
)
def test_a_shell_can_complete_verbs_and_options(written: WrittenCluster, words: str, at: int, wanted: set[str]) -> None:
    written.env |= {"_GPUCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
    done = written.run()
    assert set(done.stdout.split()) == wanted


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("gpuctl logs ", {"digits-1", "train-2"}),
        ("gpuctl cancel tr", {"train-2"}),
        ("gpuctl ckpt ls -j ", {"digits-1", "train-2"}),
        ("gpuctl forward tensorboard --job d", {"digits-1"}),
        ("gpuctl preempt ", {"node-0", "node-10"}),
        ("gpuctl exec node-1", {"node-10"}),
        ("gpuctl logs --node ", {"node-0", "node-10"}),
        ("gpuctl status -o ", {"text", "json"}),
        ("gpuctl ckpt pull ", {"5", "last", "files"}),
        ("gpuctl ckpt pull 5 out --format s", {"safetensors"}),
        ("gpuctl status -c ", {"default"}),
        ("gpuctl up --provider a", {"aws", "azure"}),
        ("gpuctl logs -c nowhere ", set()),
        ("gpuctl train ", set()),
        ("gpuctl zork ", set()),
    ],
)
def test_a_shell_can_complete_values(written: WrittenCluster, words: str, wanted: set[str]) -> None:
    written.beat("node-0")
    written.beat("node-10")
    written.checkpoint(written.submit().job, 5, {"weight": b"x"})
    written.checkpoint(written.submit("train.py").job, 5, {"weight": b"x"})
    written.env |= {"_GPUCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    with written.start() as process:
        said, complaint = process.communicate(timeout=30)
    assert (set(said.split()), complaint) == (wanted, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_calls_back(written: WrittenCluster, shell: str) -> None:
    script = written.run("completion", shell).stdout
    assert f"_GPUCTL_COMPLETE=complete_{shell}" in script
    assert "gpuctl" in script
