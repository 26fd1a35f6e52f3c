"""Every command in the README and the docs runs, and so does every script of the guides.

A page is a story: its commands run in their order, in one place, and each must exit with 0, or with what its comment
says (``# exits 1``). A block of code with a title is a file, written where it stands; a guide's script without one is
run as it is. What a page starts it also takes down.

A page that names a cloud or ``ssh`` has its commands carried out against that one's stand-in, others on local nodes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gpuctl.cli import main
from gpuctl.stacks.providers import processes
from tests.docs.stories import Block, Command, blocks, pages
from tests.docs.terminal import Running
from tests.fakes.gcp.api import URL, Google
from tests.fakes.stores import s3
from tests.fakes.user import User
from tests.paths import ROOT
from tests.stacks.conftest import account as aws
from tests.stacks.conftest import aws_account, project
from tests.stacks.providers.test_ssh import StandIn
from tests.stacks.providers.test_ssh import user as ssh
from tests.stacks.rented.test_clusters_azure import account as azure
from tests.stacks.rented.test_clusters_gcp import owner as gcp
from tests.waiting import PATIENCE_S

__all__ = ["aws", "aws_account", "azure", "gcp", "project", "ssh"]

_NO_AGENT = "the stand-in's machines are records in a bucket, and run nothing"
NOT_RUN = (
    (r"README\.md", r"gpuctl train train\.py", _NO_AGENT),
    (r"docs/get-started/(aws|gcp|azure|ssh)\.md", r"gpuctl (train|logs|ckpt|ssh|exec|net)", _NO_AGENT),
    (r".*spot-and-costs\.md", r"gpuctl ssh NODE", _NO_AGENT),
    (r".*/mingle\.md", r"gpuctl mingle .*--nodes 4", "waits for three other machines"),
    (r".*/frameworks\.md", r"gpuctl mingle .*--nodes 4", "waits for three other machines"),
    (
        r".*/frameworks\.md",
        r"gpuctl train --launcher",
        "frameworks that are not in .venv: tests/e2e/test_frameworks.py",
    ),
    (r".*jobs\.md", r"gpuctl cp :/var/lib/", "a folder of rented machines"),
    (r".*", r"gpuctl train .*--image", "needs a container runtime and an image of some GB"),
    (r".*", r"gpuctl ssh\s*(#|$)", "a shell, until its user leaves it"),
)
"""Page, command, and why it is only held against the program's options. Patterns match from the start."""

SLOW = re.compile(
    r"README\.md|.*/(demo|aws|gcp|azure|preemption|spot-and-costs|leaks|networks?)\.md"
    r"|.*/(hugging-face|dcp|lightning|jobs|unchanged-script|remote-work|checkpoints|overview)\.md"
)
"""Pages that take more than 2 s."""
MACHINE_USAGE = re.compile(r"gpuctl (status -w|forward)")
"""Goes on until Ctrl-C."""
NEEDS_NO_CLUSTER = re.compile(r"gpuctl (--\S+|completion|demo|mingle|offers|check|leaks|buckets|config|net --here)")

LOOKS = re.compile(r"--dry-run|gpuctl offers")
"""Names a provider, and rents nothing there."""
INTERRUPTED = (0, 130, -signal.SIGINT)
"""The last: it was just about to end by itself."""


class Place(NamedTuple):
    """Where a page is told."""

    home: Path
    env: dict[str, str]
    cluster: str
    bucket: str
    """In place of ``MY_BUCKET``."""


MY_BUCKET = "s3://my-bucket/lab"


class Story:
    """One page, told in one place."""

    def __init__(self, page: str, place: Place) -> None:
        self.page = page
        self.place = place
        self.env = place.env
        self.folder = place.home / "work"
        self.state = place.home / "state"
        self._open: list[Running] = []
        shutil.copytree(ROOT / "examples", self.folder / "examples")

    def tell(self) -> None:
        parts = blocks(self.page)
        if has_a_cluster(self.page):
            self.run(Command("gpuctl up --nodes 3"))
            if "digits-1" in (ROOT / self.page).read_text():
                self.run(Command("gpuctl train examples/digits.py -- --steps 20"))
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            self._tell(part, stays=following is not None and following.is_elsewhere)
            if part.is_elsewhere:
                self.close()
        self.close()

    def _tell(self, part: Block, *, stays: bool) -> None:
        if part.title:
            (self.folder / part.title).write_text(part.text)
        elif part.language == "python" and "/guides/" in self.page:
            done = subprocess.run([sys.executable, "-c", part.text], cwd=self.folder, env=self.env, timeout=PATIENCE_S)
            assert done.returncode == 0, part.text
        commands = part.commands
        for number, command in enumerate(commands, start=1):
            if reason_not_to_run(self.page, command.line) is not None:
                continue
            running = Running(self._filled_in(command.line), self.folder, self.env)
            if stays and number == len(commands):
                self._open.append(running)
            else:
                self._end(running, command)

    def run(self, command: Command) -> None:
        self._end(Running(command.line, self.folder, self.env), command)

    def _end(self, running: Running, command: Command) -> None:
        if MACHINE_USAGE.match(command.line):
            running.interrupt()
        printed = running.finish(INTERRUPTED if MACHINE_USAGE.match(command.line) else [command.exit_code])
        told = " ".join(printed.split())
        for line in command.said:
            pattern = ".*".join(re.escape(" ".join(piece.split())) for piece in line.split("…"))
            assert re.search(pattern, told), f"{command.line} does not say {line!r}:\n{printed}"

    def close(self) -> None:
        """What the last terminal has left open is waited for, or ended if it would go on."""
        for running in self._open:
            if MACHINE_USAGE.match(running.line):
                running.interrupt()
            running.finish(INTERRUPTED if MACHINE_USAGE.match(running.line) else [0])
        self._open.clear()

    def _filled_in(self, line: str) -> str:
        line = line.replace(MY_BUCKET, self.place.bucket)
        return re.sub(r"\b(NODE|NAME|BUCKET|URL)\b", lambda found: self._value(found[1]), line)

    def _value(self, placeholder: str) -> str:
        """What the reader would put there."""
        match placeholder:
            case "NODE":
                return str(self._asked("gpuctl status -o json")["nodes"][0]["node"])
            case "BUCKET":
                return str(self._asked("gpuctl buckets ls -o json")["buckets"][0]["name"])
            case "URL":
                known = self.state / "clusters" / f"{self.place.cluster}.json"
                return str(msgspec.json.decode(known.read_bytes())["bucket"])
        return self.place.cluster

    def _asked(self, line: str) -> Any:
        done = subprocess.run(["bash", "-c", line], cwd=self.folder, env=self.env, capture_output=True, timeout=60)
        return msgspec.json.decode(done.stdout)


def has_a_cluster(page: str) -> bool:
    """Whether the page takes for granted that its reader has one already."""
    lines = [command.line for part in blocks(page) for command in part.commands]
    makes_one = any("gpuctl up" in line for line in lines)
    return not makes_one and any("gpuctl " in line and not NEEDS_NO_CLUSTER.search(line) for line in lines)


def reason_not_to_run(page: str, line: str) -> str | None:
    return next((why for where, what, why in NOT_RUN if re.match(where, page) and re.match(what, line)), None)


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def s3_endpoint() -> Iterator[str]:
    """An account of the page's own: it looks for all that there is, also for what other tests have left."""
    with s3.serving() as endpoint:
        yield endpoint


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Where the page is told. ``request.param``: its provider."""
    (tmp_path / "programs").mkdir()
    program = tmp_path / "programs" / "gpuctl"
    url = f"file://{tmp_path}/bucket"
    if request.param in ("aws", "gcp", "azure"):
        user: User = request.getfixturevalue(request.param)
        _SELLS[request.param](user)
        user.boot_machines()
        env, cluster = {**user.env, "GPUCTL_CLUSTER": user.cluster}, user.cluster
    else:
        if request.param == "ssh":
            StandIn(request.getfixturevalue("ssh"), url)
        env, cluster = {**os.environ, "HOME": str(tmp_path), "GPUCTL_STATE_DIR": str(tmp_path / "state")}, "default"
    # Rented nodes run nothing here: a test of their network would wait for ever.
    known = f"{shlex.quote(str(tmp_path))}/state/clusters/*.json"
    is_rented = f"""{{ [ "$2 $3" = "--provider {request.param}" ] || grep -qs '"provider":"[ag]' {known}; }}"""
    only = f'[ "$1" = up ] && {is_rented} && set -- "$@" --no-verify'
    program.write_text(f'#!/bin/sh\n{only}\nexec {shlex.quote(sys.executable)} -m gpuctl.cli.main "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{env['PATH']}"
    env |= {"PATH": path, "TERM": "xterm-256color", "COLUMNS": "140", "HF_HUB_OFFLINE": "1"}
    env["GPUCTL_CHECKIP"] = "data:,203.0.113.7"
    yield Place(tmp_path, env, cluster, url)
    processes.kill_all(tmp_path / "state" / "local")


def _aws_sells(account: Any) -> None:
    account.vcpus.append(100_000)


def _google_sells(owner: Any) -> None:
    """What the page rents, in the one region that it names."""
    google: Google = owner.google
    google.put_everywhere("machineTypes", {"zones/us-central1-a": [{"name": "g2-standard-4"}]})
    quotas = [{"metric": "PREEMPTIBLE_NVIDIA_L4_GPUS", "limit": 4.0, "usage": 0.0}]
    zones = [f"{URL}/zones/us-central1-a"]
    google.put("regions/us-central1", {"name": "us-central1", "status": "UP", "zones": zones, "quotas": quotas})


def _azure_sells(account: Any) -> None:
    size = {"resourceType": "virtualMachines", "name": "Standard_NC4as_T4_v3", "family": "standardNCASv3_T4Family"}
    where = {"locations": ["eastus"], "locationInfo": [{"location": "eastus", "zones": ["1"]}]}
    more = {"capabilities": [{"name": "LowPriorityCapable", "value": "True"}], "restrictions": []}
    account.api.answers["providers/microsoft.compute/skus"].append({**size, **where, **more})


_SELLS: dict[str, Callable[[Any], None]] = {"aws": _aws_sells, "gcp": _google_sells, "azure": _azure_sells}


def provider_of(page: str) -> str:
    """The one that a command of the page names, if it is not only to look."""
    lines = [command.line for part in blocks(page) for command in part.commands]
    named = (re.search(r"--provider (aws|gcp|azure|ssh)\b", line) for line in lines if not LOOKS.search(line))
    return next((found[1] for found in named if found), "local")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("page", "place"),
    [
        pytest.param(page, provider_of(page), id=page, marks=[pytest.mark.slow] if SLOW.fullmatch(page) else [])
        for page in pages()
    ],
    indirect=["place"],
)
def test_a_page_is_a_story_that_works(page: str, place: Place) -> None:
    story = Story(page, place)
    story.tell()
    left = sorted(path.name for path in (story.state / "clusters").glob("*.json"))
    assert has_a_cluster(page) or not left, f"the page does not take its cluster down: {left}"


NOT_RUN_LINES = [
    (page, command.line)
    for page in pages()
    for part in blocks(page)
    for command in part.commands
    if reason_not_to_run(page, command.line) is not None
]


@pytest.mark.parametrize(("page", "line"), NOT_RUN_LINES)
def test_a_command_that_is_not_run_has_options_that_exist(page: str, line: str) -> None:
    del page
    words = shlex.split(line, comments=True)[1:]
    own = words[: words.index("--")] if "--" in words else words
    assert main.run([*own, "--help"]) == 0, line


@pytest.mark.parametrize(("where", "what", "why"), NOT_RUN)
def test_no_reason_outlives_its_command(where: str, what: str, why: str) -> None:
    lines = [(page, command.line) for page in pages() for part in blocks(page) for command in part.commands]
    assert any(re.match(where, page) and re.match(what, line) for page, line in lines), why
