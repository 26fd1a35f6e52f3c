"""``gpuctl train`` before it sends anything: which folders are nobody's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cluster.jobs import queue
from tests.fakes.package_index import write_wheel
from tests.fakes.written_cluster import WrittenCluster


@pytest.fixture
def home(written: WrittenCluster) -> Path:
    """A home folder with keys, and a project in it."""
    found = written.home / "ada"
    for name in (".ssh/id_rsa", ".config/gcloud/credentials.db", ".config/editor", "project/train.py", "train.py"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text("print('hello')\n")
    (found / ".config" / "train.py").touch()
    written.env["HOME"] = str(found)
    return found


@pytest.mark.parametrize(
    ("folder", "held"),
    [
        (".", "everything in your home"),
        ("..", "your home folder"),
        (".config", "{home}/.config/gcloud"),
        (".ssh", "{home}/.ssh"),
    ],
)
def test_a_folder_with_a_users_keys_is_refused(written: WrittenCluster, home: Path, folder: str, held: str) -> None:
    written.work = (home / folder).resolve()
    said = written.run("train", "-d", "train.py", code=2).stderr
    assert said == (
        f"error: the working folder is copied to the nodes, and {written.work} holds {held.format(home=home)}; "
        "move what is needed to a folder of its own, and work there\n"
    )
    assert written.store.list("code") == []


def test_a_project_at_home_is_sent(written: WrittenCluster, home: Path) -> None:
    written.work = home / "project"
    assert "not sent" not in written.run("train", "-d", "train.py").stderr
    assert written.store.list("code") != []


def test_what_may_hold_secrets_is_named_in_one_line(written: WrittenCluster) -> None:
    for name in ("train.py", ".env", "key.pem"):
        (written.work / name).touch()
    written.env["GPUCTL_STATE_DIR"] = str(written.work / "state")
    (written.home / "state").rename(written.work / "state")
    (said,) = [line for line in written.run("train", "-d", "train.py").stderr.splitlines() if "not uploaded" in line]
    assert said == (
        "not uploaded, as they may hold secrets: .env, key.pem, state/ (to send one: a line !NAME in .gpuctlignore)"
    )


@pytest.mark.slow
def test_that_a_slow_network_will_do_is_said_by_whoever_submits(written: WrittenCluster) -> None:
    (written.work / "train.py").touch()
    for args, allowed in (((), False), (("--allow-tcp",), True)):
        job = written.run("train", "-d", *args, "train.py").stdout.strip()
        assert queue.find(written.store, job).allow_tcp is allowed


def test_the_strategy_is_in_the_job_as_it_is_read_again(written: WrittenCluster) -> None:
    (written.work / "train.py").touch()
    (written.work / "gpuctl.yaml").write_text("strategy: topk:ratio=0.50\n")
    for args, strategy in (((), "topk:ratio=0.5"), (("--strategy", " dgc : clip = none"), "dgc:clip=none")):
        job = written.run("train", "-d", *args, "train.py").stdout.strip()
        assert queue.find(written.store, job).strategy == strategy


@pytest.mark.slow
def test_a_wrong_setting_of_up_keeps_nobody_from_other_verbs(written: WrittenCluster) -> None:
    written.env["GPUCTL_NODES"] = "abc"
    (written.work / "train.py").touch()
    for args in (["status"], ["train", "-d", "train.py"], ["jobs"], ["down", "-y"]):
        written.run(*args)
    assert "GPUCTL_NODES=abc is not a number of nodes" in written.run("up", code=2).stderr


def test_a_misspelt_variable_is_told(written: WrittenCluster) -> None:
    written.env |= {"GPUCTL_NODEZ": "3", "GPUCTL_DEBUG": ""}
    assert written.run("config", "show").stderr == "GPUCTL_NODEZ is ignored; did you mean GPUCTL_NODES?\n"


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "GPUCTL_CHECKPOINT_DIR"])
def test_a_variable_that_the_launcher_sets_is_refused(written: WrittenCluster, name: str) -> None:
    (written.work / "train.py").touch()
    said = written.run("train", "-d", "train.py", "-e", f"{name}=7", code=2).stderr
    assert said == f"error: {name} (from flag) is set for each worker by gpuctl; use another name\n"
    assert written.store.list("code") == []


def test_a_folder_is_no_script(written: WrittenCluster) -> None:
    assert written.run("train", ".", code=2).stderr == "error: . is a folder, not a script; name a script in it\n"


@pytest.mark.parametrize(("nproc", "is_warned"), [("1", False), ("100000", True)])
def test_more_processes_than_this_machine_can_run_are_warned_of(
    written: WrittenCluster, nproc: str, is_warned: bool
) -> None:
    (written.work / "train.py").touch()
    said = written.run("train", "-d", "train.py", "--nproc", nproc).stderr
    assert ("warning: 300000 processes on this machine with " in said) == is_warned


def test_the_packages_of_a_script_are_said_and_in_the_job(written: WrittenCluster) -> None:
    for name, text in {"train.py": "", "requirements.txt": "einops\norjson\n", "more.txt": "six\n"}.items():
        (written.work / name).write_text(text)
    for args, file, line in (
        ((), "requirements.txt", "environment: requirements.txt (2 packages)"),
        (("--environment", "more.txt"), "more.txt", "environment: more.txt (1 package)"),
    ):
        ran = written.run("train", "-d", *args, "train.py")
        environment = queue.find(written.store, ran.stdout.strip()).environment
        assert environment and environment.file == file and line in ran.stderr.splitlines()
    for args, line in ((("--environment", "none"), ""), (("--image", "debian:12"), "environment: image debian:12")):
        ran = written.run("train", "-d", *args, "train.py")
        assert queue.find(written.store, ran.stdout.strip()).environment is None
        assert [said for said in ran.stderr.splitlines() if "environment" in said] == [line] * bool(line)


def test_wheels_are_sent_once_and_are_in_the_job(written: WrittenCluster) -> None:
    (written.work / "train.py").touch()
    (written.work / "requirements.txt").write_text("alpha\n")
    write_wheel(written.work / "wheels", "alpha", "1.0")
    first = written.run("train", "-d", "--wheels", "wheels", "train.py")
    second = written.run("train", "-d", "--wheels", "wheels", "train.py")
    found = [queue.find(written.store, ran.stdout.strip()).environment for ran in (first, second)]
    assert found[0] == found[1] and found[0] and len(found[0].wheels) == 1
    assert "wheels (1 file)" in first.stderr and "wheels (0 files): 0 B" in second.stderr
    assert (
        written.store.get(found[0].wheels[0]) == (written.work / "wheels" / "alpha-1.0-py3-none-any.whl").read_bytes()
    )


@pytest.mark.parametrize(
    ("files", "args", "message"),
    [
        ({"requirements.txt": ""}, (), "requirements.txt names no packages; list some, or use --environment none"),
        ({"requirements.txt": "a\nb=1\n"}, (), "requirements.txt:2: "),
        ({}, ("--environment", "x.txt"), "environment file x.txt does not exist"),
        ({}, ("--wheels", "w"), "--wheels needs a requirements.txt that says which packages to install"),
        ({"requirements.txt": "a"}, ("--wheels", "w"), "--wheels w is not a folder"),
        ({"requirements.txt": "a"}, ("--wheels", "."), "--wheels . has no wheels"),
        (
            {"requirements.txt": "a"},
            ("--environment", "requirements.txt", "--image", "a"),
            "has no effect with --image",
        ),
        ({"requirements.txt": "a", ".gitignore": "*.txt"}, (), "requirements.txt is excluded by .gitignore, so the"),
    ],
)
def test_packages_that_cannot_be_are_refused_before_anything_is_queued(
    written: WrittenCluster, files: dict[str, str], args: tuple[str, ...], message: str
) -> None:
    (written.work / "train.py").touch()
    for name, text in files.items():
        (written.work / name).write_text(text)
    assert message in written.run("train", "-d", *args, "train.py", code=2).stderr
    assert queue.newest(written.store) is None
