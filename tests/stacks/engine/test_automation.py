"""The engine, against a stand-in for Pulumi's CLI that replays event logs (``events/``) in the CLI's own format."""

from __future__ import annotations

import errno
import json
import os
import platform
import pwd
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import psutil
import pytest
from pulumi.automation import CommandResult, PulumiCommand
from pulumi.automation.errors import create_command_error
from pulumi.runtime.proto import events_pb2, events_pb2_grpc
from semver import VersionInfo

from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.engine import interrupts
from gpuctl.stacks.engine.automation import Engine
from gpuctl.stacks.engine.errors import FailureKind, StackFailed, first_line
from gpuctl.stacks.engine.events import ResourceProgress
from gpuctl.stacks.engine.pulumi_install import found_cli
from gpuctl.stacks.plan.planner import declared
from gpuctl.stacks.state.paths import state_dir
from tests.fakes.pulumi.monitor import Monitor, run
from tests.fakes.requests import asked
from tests.paths import ROOT
from tests.waiting import PATIENCE_S, until

EVENTS = Path(__file__).with_name("events")
VPC = "urn:pulumi:demo::gpuctl::gpuctl:aws:Network$aws:ec2/vpc:Vpc::demo"
TEMPLATE = "urn:pulumi:demo::gpuctl::gpuctl:aws:Group$aws:ec2/launchTemplate:LaunchTemplate::demo"
LOCKED = (
    "error: the stack is currently locked by 1 lock(s). Either wait for the other process(es) to end or delete the"
    " lock file with `pulumi cancel`.\n  file:///state/.pulumi/locks/organization/gpuctl/demo/5c6d.json: created by {}"
)


@dataclass(frozen=True)
class Scene:
    """What the CLI does when it is run once more."""

    events: str
    """Name of a log."""
    error: str = ""
    """What it writes before it fails; empty: it does not."""
    pending: tuple[tuple[str, str], ...] | None = None
    """Operations that the state has afterwards, as (type, URN); ``None``: as before."""


@dataclass
class Cli(PulumiCommand):
    """Pulumi's CLI, as far as the Automation API sees it."""

    scenes: dict[str, list[Scene]] = field(default_factory=dict)
    """By verb, the next one first; a lock's scene is taken away by ``cancel``."""
    there: bool = False
    resources: tuple[str, ...] = ()
    pending: tuple[tuple[str, str], ...] = ()
    ran: list[str] = field(default_factory=list)
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""

    def __post_init__(self) -> None:
        self.command = "pulumi"
        self.version = VersionInfo(3, 200, 0)  # the last that writes its events to a file is 3.205

    def run(
        self,
        args: list[str],
        cwd: str,
        additional_env: Mapping[str, str],
        on_output: Callable[[str], Any] | None = None,  # noqa: ARG002
        on_error: Callable[[str], Any] | None = None,  # noqa: ARG002
    ) -> CommandResult:
        self.env, self.cwd = additional_env, cwd
        words = [word for word in args if not word.startswith("-")]
        verb = " ".join(words[:2]) if words[0] == "stack" else words[0]
        self.ran.append("refresh --clear-pending-creates" if "--clear-pending-creates" in args else verb)
        if verb in ("up", "preview", "refresh", "destroy"):
            return self._play(verb, args[args.index("--event-log") + 1])
        if verb == "stack select" and not self.there:
            raise create_command_error(CommandResult("", "error: no stack named 'demo' found", 255))
        self.there = (self.there or verb == "stack init") and verb != "stack rm"
        return CommandResult(json.dumps(self._answer(verb)), "", 0)

    def _play(self, verb: str, log: str) -> CommandResult:
        scene = self.scenes[verb].pop(0)
        self._log((EVENTS / f"{scene.events}.jsonl").read_bytes(), log)
        self.pending = self.pending if scene.pending is None else scene.pending
        if scene.error:
            raise create_command_error(CommandResult("", scene.error, 255))
        return CommandResult("", "", 0)

    def _log(self, events: bytes, where: str) -> None:
        Path(where).write_bytes(events)

    def _answer(self, verb: str) -> Any:
        return {
            "stack output": {"bucket": "s3://gpuctl-demo"},
            "stack history": [
                {
                    "kind": "update",
                    "startTime": "2026-11-21T18:00:00.000Z",
                    "message": "",
                    "environment": {},
                    "config": {},
                    "result": "succeeded",
                }
            ],
            "stack export": {"version": 3, "deployment": self._deployment()},
        }.get(verb)

    def _deployment(self) -> dict[str, Any]:
        inner = ("urn:pulumi:demo::gpuctl::pulumi:pulumi:Stack::gpuctl-demo", *self.resources)
        return {
            "resources": [{"urn": urn, "type": urn.split("::")[2].rpartition("$")[2]} for urn in inner],
            "pending_operations": [{"type": doing, "resource": {"urn": urn}} for doing, urn in self.pending],
        }


@dataclass
class Running(Cli):
    """It runs the program too, as the CLI does."""

    monitor: Monitor = field(default_factory=Monitor)
    said: str = ""
    """By the program, if it failed."""

    def run(self, args: list[str], *rest: Any, **more: Any) -> CommandResult:
        for arg in args:
            if arg.startswith("--client="):
                self.said = run(arg.removeprefix("--client="), self.monitor)
        if self.said:
            self.scenes["up"] = [Scene("refused", "error: update failed")]
        return super().run(args, *rest, **more)


@dataclass
class Interrupted(Cli):
    """Somebody presses Ctrl-C when a resource begins."""

    by: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGINT)
    heard: threading.Event = field(default_factory=threading.Event)
    """By the process that called it."""
    ended: bool = False

    def _log(self, events: bytes, where: str) -> None:
        self.by()
        assert self.heard.wait(20)
        super()._log(events, where)
        self.ended = True


@dataclass
class Newer(Cli):
    """Newer ones send their events to a server of the caller's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.version = VersionInfo(3, 206, 0)

    def _log(self, events: bytes, where: str) -> None:
        with grpc.insecure_channel(where.removeprefix("tcp://")) as channel:
            requests = (events_pb2.EventRequest(event=line) for line in events.decode().splitlines())
            events_pb2_grpc.EventsStub(channel).StreamEvents(requests, timeout=30)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))


def _cli(**scenes: Scene | list[Scene]) -> Cli:
    return Cli(scenes={verb: many if isinstance(many, list) else [many] for verb, many in scenes.items()}, there=True)


def _failed(call: Callable[[], object]) -> StackFailed:
    with pytest.raises(StackFailed) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


def _lock(host: str, pid: int, user: str = "") -> str:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return LOCKED.format(f"{user or pwd.getpwuid(os.getuid()).pw_name}@{host} (pid {pid}) at {now}")


@contextmanager
def _ended(is_zombie: bool = False) -> Iterator[int]:
    """The number of a process that is gone, or (``is_zombie``) that nobody has asked for its end."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        if is_zombie:
            until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "its end")
            yield process.pid
    if not is_zombie:
        yield process.pid


# -- what goes well ----------------------------------------------------------------------------------------------------


def test_up_makes_the_stack_and_returns_its_outputs() -> None:
    cli = Cli(scenes={"up": [Scene("up")]})
    assert Engine("demo", command=cli).up(asked("aws")) == {"bucket": "s3://gpuctl-demo"}
    assert "stack init" in cli.ran
    assert "stack init" not in cli.ran[cli.ran.index("up") :]


def test_a_stack_that_is_there_is_used_again() -> None:
    cli = _cli(up=[Scene("up"), Scene("up-repaired")])
    engine = Engine("demo", command=cli)
    engine.up(asked("aws"))
    engine.up(asked("aws"))
    assert "stack init" not in cli.ran


@pytest.mark.parametrize("version", [Cli, Newer], ids=["through a file", "through a server"])
def test_each_resource_is_told_of_when_it_begins_and_when_it_is_there(version: type[Cli]) -> None:
    told: list[ResourceProgress] = []
    Engine("demo", command=version(scenes={"up": [Scene("up")]}), on_progress=told.append).up(asked("aws"))
    vpc = [progress for progress in told if progress.type == "aws:ec2/vpc:Vpc"]
    assert vpc == [
        ResourceProgress("demo", "aws:ec2/vpc:Vpc", "create", "running"),
        ResourceProgress("demo", "aws:ec2/vpc:Vpc", "create", "done"),
    ]


def test_what_is_nothing_in_a_cloud_or_has_not_changed_is_not_told_of() -> None:
    told: list[ResourceProgress] = []
    Engine("demo", command=_cli(up=Scene("up-repaired")), on_progress=told.append).up(asked("aws"))
    assert {progress.type.partition(":")[0] for progress in told} == {"aws"}
    assert {progress.operation for progress in told} == {"create"}


def test_destroy_takes_the_stack_away_too() -> None:
    cli = _cli(destroy=Scene("destroy"))
    engine = Engine("demo", command=cli)
    engine.destroy()
    assert cli.ran[-1] == "stack rm"
    assert _failed(engine.outputs).kind == FailureKind.NO_STACK


def test_pulumi_runs_the_program_that_was_planned() -> None:
    request = asked("aws")
    cli = Running(scenes={"up": [Scene("up")]})
    Engine("demo", command=cli).up(request)
    planned = declared(request, catalog().type(request.type))
    assert cli.monitor.resources == {(resource.type, resource.name) for resource in planned}
    assert set(cli.monitor.outputs) == {"bucket", "group", "region", "zones", "account"}


def test_a_request_that_is_wrong_is_a_line_for_pulumi_and_no_traceback() -> None:
    cli = Running(scenes={"up": [Scene("up")]})
    _failed(lambda: Engine("demo", command=cli).up(asked("aws", type="p9.nothing")))
    assert cli.said.startswith("unknown instance type 'p9.nothing'") and "Traceback" not in cli.said
    told = _cli(up=Scene("up-bad-program", "error: update failed"))
    assert "p9.nothing" in _failed(lambda: Engine("demo", command=told).up(asked("aws"))).message


# -- where it works ----------------------------------------------------------------------------------------------------


def test_the_state_is_a_folder_for_this_user_alone() -> None:
    cli = _cli(up=Scene("up"))
    Engine("demo", command=cli).up(asked("aws"))
    folder = state_dir() / "pulumi" / "demo"
    assert cli.cwd == str(folder)
    assert cli.env["PULUMI_BACKEND_URL"] == f"file://{folder / 'state'}"
    assert [p.stat().st_mode & 0o777 for p in (folder.parent, folder, folder / "state")] == [0o700] * 3


def test_another_backend_is_passed_on() -> None:
    cli = _cli(up=Scene("up"))
    Engine("demo", backend="s3://team-state?region=eu-west-1", command=cli).up(asked("aws"))
    assert cli.env["PULUMI_BACKEND_URL"] == "s3://team-state?region=eu-west-1"


def test_a_backend_that_others_share_has_the_passphrase_that_they_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "agreed")
    cli = _cli(up=[Scene("up"), Scene("up")])
    Engine("demo", backend="s3://team-state", command=cli).up(asked("aws"))
    assert "PULUMI_CONFIG_PASSPHRASE" not in cli.env, "the CLI has the environment's own"
    Engine("other", command=cli).up(asked("aws"))
    assert cli.env["PULUMI_CONFIG_PASSPHRASE"] != "agreed"


def test_a_state_on_this_machine_depends_on_no_other_file() -> None:
    cli = _cli(up=[Scene("up"), Scene("up")])
    Engine("demo", command=cli).up(asked("aws"))
    first = cli.env["PULUMI_CONFIG_PASSPHRASE"]
    Engine("other", command=cli).up(asked("aws"))
    assert first and cli.env["PULUMI_CONFIG_PASSPHRASE"] == first
    assert not [path for path in (state_dir() / "pulumi").rglob("*") if "passphrase" in path.name]


def test_a_passphrase_in_a_file_is_left_to_pulumi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE_FILE", "/shared/passphrase")
    cli = _cli(up=Scene("up"))
    Engine("demo", backend="s3://team-state", command=cli).up(asked("aws"))
    assert "PULUMI_CONFIG_PASSPHRASE" not in cli.env


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_resource_that_failed_is_named_with_the_first_thing_its_provider_said() -> None:
    told: list[ResourceProgress] = []
    cli = _cli(up=Scene("up-failed", "error: update failed"))
    cli.resources = (VPC,)
    failed = _failed(lambda: Engine("demo", command=cli, on_progress=told.append).up(asked("aws")))
    assert failed.kind == FailureKind.RESOURCE and failed.exit_code == 1
    assert failed.message.startswith(
        "aws:ec2/launchTemplate:LaunchTemplate demo (create) failed: creating EC2 Launch Template"
    )
    assert failed.message.endswith("You are not authorized to perform this operation.")
    assert failed.left == ("aws:ec2/vpc:Vpc demo",) and "1 resource is there" in failed.hint
    assert [(p.name, p.error[:8]) for p in told if p.state == "failed"] == [("demo", "creating")]


def test_the_next_up_goes_on_from_a_failed_one() -> None:
    cli = _cli(up=[Scene("up-failed", "error: update failed"), Scene("up-repaired")])
    engine = Engine("demo", command=cli)
    _failed(lambda: engine.up(asked("aws")))
    assert engine.up(asked("aws")) == {"bucket": "s3://gpuctl-demo"}
    assert "cancel" not in cli.ran and "refresh" not in cli.ran


def test_what_a_failed_destroy_could_not_take_away_is_told() -> None:
    cli = _cli(destroy=Scene("destroy-failed", "error: update failed"))
    cli.resources = (VPC,)
    failed = _failed(Engine("demo", command=cli).destroy)
    assert failed.kind == FailureKind.RESOURCE and "is in use" in failed.message and failed.left
    assert "stack rm" not in cli.ran


def test_a_cancelled_update_says_what_is_left() -> None:
    cli = _cli(up=Scene("up-cancelled", "error: update cancelled"))
    cli.resources = (VPC, TEMPLATE)
    failed = _failed(lambda: Engine("demo", command=cli).up(asked("aws")))
    assert failed.kind == FailureKind.CANCELLED
    on = "repeat it to go on from them, or `gpuctl down --cluster demo` to remove them"
    assert failed.hint == f"2 resources are there: {on}"


@pytest.mark.parametrize(
    ("scene", "raised"),
    [(Scene("up-cancelled", "error: update cancelled"), StackFailed), (Scene("up"), KeyboardInterrupt)],
    ids=["the CLI gives up", "the CLI was done"],
)
def test_ctrl_c_waits_until_the_cli_has_ended(scene: Scene, raised: type[BaseException]) -> None:
    _interrupted(Interrupted(scenes={"up": [scene]}), raised)


def test_whatever_the_cli_ends_with_once_it_was_interrupted_is_an_interruption() -> None:
    """Such as `stack output`, which follows an `up` and knows no word for it."""
    cli = Interrupted(scenes={"up": [Scene("refused", "error: signal: interrupt")]})
    failed = _interrupted(cli, StackFailed)
    assert isinstance(failed, StackFailed) and failed.kind == FailureKind.CANCELLED and failed.exit_code == 130


def test_a_signal_in_the_moment_in_which_the_cli_is_begun_waits_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = Interrupted(scenes={"up": [Scene("up")]}, there=True, by=lambda: None)

    class Begun(threading.Thread):
        def start(self) -> None:
            super().start()
            cli.heard.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(interrupts, "Thread", Begun)
    with pytest.raises(KeyboardInterrupt):
        Engine("demo", command=cli).up(asked("aws"))
    assert cli.ended


def test_a_signal_that_another_thread_received_is_heard_at_once() -> None:
    """The system chooses the thread; Python runs the handler in the main one, which may be waiting."""
    by = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # noqa: E731
    _interrupted(Interrupted(scenes={"up": [Scene("up")]}, by=by), KeyboardInterrupt)


def _interrupted(cli: Interrupted, raised: type[BaseException]) -> BaseException:
    def press(signum: int, frame: object) -> None:  # noqa: ARG001
        cli.heard.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        with pytest.raises(raised) as caught:
            Engine("demo", command=cli).up(asked("aws"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert cli.ended
    return caught.value


@pytest.mark.parametrize("force", [False, True])
def test_the_lock_of_a_process_that_lives_is_never_cleared(force: bool) -> None:
    cli = _cli(up=Scene("refused", _lock(platform.node(), os.getpid())))
    failed = _failed(lambda: Engine("demo", command=cli).up(asked("aws"), force=force))
    assert failed.kind == FailureKind.BUSY and f"@{platform.node()}" in failed.message
    assert "cancel" not in cli.ran


@pytest.mark.parametrize("then", ["", "wait"], ids=["that nobody has", "that a container's shell has taken in"])
def test_an_engine_whose_gpuctl_was_killed_is_waited_for(then: str) -> None:
    env = {**os.environ, "GPUCTL_STACK": str(state_dir() / "pulumi" / "demo")}
    starts = ["sh", "-c", f": gpuctl up; sleep 1000 > /dev/null 2>&1 & echo $!; {then}"]
    shell = subprocess.Popen(starts, env=env, stdout=subprocess.PIPE, text=True)
    assert shell.stdout
    engine, said = psutil.Process(int(shell.stdout.readline())), list[str]()
    if not then:
        shell.wait(PATIENCE_S)

    def say(line: str) -> None:
        said.append(line)
        engine.kill()

    cli = _cli(up=[Scene("refused", _lock(platform.node(), engine.pid)), Scene("up")])
    try:
        assert Engine("demo", command=cli, say=say).up(asked("aws"))
    finally:
        with suppress(psutil.NoSuchProcess):
            engine.kill()
        shell.communicate(timeout=PATIENCE_S)
    assert [verb for verb in cli.ran if not verb.startswith("stack")] == ["up", "up"]
    assert len(said) == 1 and f"whose gpuctl has ended: waiting for it (to end it: kill {engine.pid})" in said[0]


@pytest.mark.parametrize("kind", ["ended here", "a zombie", "number used again"])
def test_the_lock_of_a_process_that_ended_here_is_cleared(kind: str) -> None:
    said: list[str] = []
    with _ended(kind == "a zombie") as pid:
        lock = _lock(platform.node(), pid)
        if kind == "number used again":
            lock = re.sub(r"\(pid .*", f"(pid {os.getpid()}) at 2020-01-01T00:00:00Z", lock)
        cli = _cli(up=[Scene("refused", lock), Scene("up")])
        assert Engine("demo", command=cli, say=said.append).up(asked("aws"))
    assert [verb for verb in cli.ran if not verb.startswith("stack")] == ["up", "cancel", "up"]
    assert len(said) == 1 and "which has ended: clearing that lock" in said[0]


@pytest.mark.parametrize("kind", ["elsewhere", "another of this machine's name", "a server's"])
def test_the_lock_of_another_machine_is_cleared_by_force_only(kind: str) -> None:
    with _ended() as pid:
        locks = {
            "elsewhere": _lock("elsewhere", os.getpid()),
            "another of this machine's name": _lock(platform.node(), pid, "somebody-else"),
            "a server's": "error: [409] Conflict: Another update is in progress.",
        }
    cli = _cli(up=[Scene("refused", locks[kind])])
    failed = _failed(lambda: Engine("demo", command=cli).up(asked("aws")))
    assert failed.kind == FailureKind.HELD and "--force" in failed.hint and "cancel" not in cli.ran
    cli = _cli(up=[Scene("refused", locks[kind]), Scene("up")])
    assert Engine("demo", command=cli).up(asked("aws"), force=True)
    assert [verb for verb in cli.ran if not verb.startswith("stack")] == ["up", "cancel", "up"]


def test_an_operation_whose_outcome_the_cloud_knows_is_settled() -> None:
    cli = _cli(refresh=Scene("refresh", pending=()))
    cli.pending = (("updating", VPC),)
    assert Engine("demo", command=cli).unknown() == ()
    assert "refresh" in cli.ran


def test_what_was_being_created_is_told_until_it_is_forgotten() -> None:
    cli = _cli(refresh=[Scene("refresh"), Scene("refresh", pending=())])
    cli.pending = (("creating", TEMPLATE),)
    engine = Engine("demo", command=cli)
    assert [str(one) for one in engine.unknown()] == ["aws:ec2/launchTemplate:LaunchTemplate demo"]
    engine.forget_unknown()
    assert cli.ran[-1] == "stack export" or "refresh --clear-pending-creates" in cli.ran
    assert engine.unknown() == ()


def test_operations_of_an_update_that_goes_on_are_not_unknown() -> None:
    cli = _cli(refresh=[Scene("refused", _lock(platform.node(), os.getpid()))] * 2)
    cli.pending = (("creating", TEMPLATE),)
    for force in (False, True):
        failed = _failed(lambda force=force: Engine("demo", command=cli).unknown(force=force))  # type: ignore[misc]
        assert failed.kind == FailureKind.BUSY
    assert "refresh --clear-pending-creates" not in cli.ran


@pytest.mark.parametrize(
    "said",
    [
        "error: failed to load checkpoint: incorrect passphrase",
        "error: could not deserialize deployment: unexpected end of JSON input",
        "error: passphrase must be set with PULUMI_CONFIG_PASSPHRASE or PULUMI_CONFIG_PASSPHRASE_FILE",
    ],
)
def test_a_state_that_cannot_be_opened_is_told_apart(said: str) -> None:
    class Sealed(Cli):
        def run(self, *args: Any, **kwargs: Any) -> CommandResult:  # noqa: ARG002
            raise create_command_error(CommandResult("", said, 255))

    failed = _failed(Engine("demo", command=Sealed()).destroy)
    assert failed.kind == FailureKind.UNREADABLE and "by its tags" in failed.hint


def test_a_destroy_that_ends_well_with_things_left_was_interrupted() -> None:
    """So the CLI ends a destroy that was cancelled."""
    cli = _cli(destroy=Scene("destroy"))
    cli.resources = (VPC,)
    failed = _failed(Engine("demo", command=cli).destroy)
    assert failed.kind == FailureKind.CANCELLED and failed.exit_code == 130 and failed.left == ("aws:ec2/vpc:Vpc demo",)
    assert "stack rm" not in cli.ran


def test_a_shared_state_that_cannot_be_deleted_is_told_with_what_deletes_it() -> None:
    class Sealed(Cli):
        def run(self, args: list[str], *rest: Any, **more: Any) -> CommandResult:
            if "rm" in args:
                raise create_command_error(CommandResult("", "error: incorrect passphrase", 255))
            return super().run(args, *rest, **more)

    said: list[str] = []
    Engine("demo", backend="s3://team", command=Sealed(there=True), say=said.append).forget()
    assert len(said) == 1 and said[0].endswith("PULUMI_BACKEND_URL=s3://team pulumi stack rm --force demo")
    Engine("demo", backend="s3://team", command=Cli(), say=said.append).forget()
    assert len(said) == 1, "where there is none, nothing is told"


def test_a_state_is_forgotten_whatever_it_holds() -> None:
    cli = _cli(up=Scene("up"))
    engine = Engine("demo", command=cli)
    engine.up(asked("aws"))
    state = state_dir() / "pulumi" / "demo" / "state"
    (state / "half").write_text("{")
    engine.forget()
    assert not state.exists()


@pytest.mark.parametrize("where", ["pulumi/demo/Pulumi.yaml", "pulumi/demo/state"])
def test_files_that_cannot_be_written_are_a_failure_of_the_stack(where: str) -> None:
    """Such as on a full disk: then nothing but the cluster's tags can remove it."""
    path = state_dir() / where
    (path if where.endswith("yaml") else path.parent).mkdir(parents=True)
    if not path.exists():
        path.touch()
    engine = Engine("demo", command=_cli(destroy=Scene("destroy")))
    for verb in (engine.destroy, engine.refresh, engine.outputs, engine.resources, engine.unknown):
        failed = _failed(verb)
        assert failed.kind == FailureKind.OTHER and str(path) in failed.message and "free some space" in failed.hint
    engine.forget()


def test_a_cli_that_cannot_be_run_is_a_failure_of_the_stack() -> None:
    class Full(Cli):
        def run(self, args: list[str], *rest: Any, **more: Any) -> CommandResult:
            if "export" in args:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().run(args, *rest, **more)

    failed = _failed(Engine("demo", command=Full(there=True)).resources)
    assert failed.kind == FailureKind.OTHER and failed.message.endswith("cannot be used: No space left on device")


def test_no_stack_is_what_the_cli_says_and_nothing_else() -> None:
    engine = Engine("demo", command=Cli())
    for verb in (engine.destroy, engine.refresh, engine.outputs, engine.resources):
        assert _failed(verb).kind == FailureKind.NO_STACK

    class Broken(Cli):
        def run(self, *args: Any, **kwargs: Any) -> CommandResult:  # noqa: ARG002
            raise create_command_error(CommandResult("", "error: the moon is in the wrong house", 255))

    failed = _failed(Engine("demo", command=Broken()).destroy)
    assert failed.kind == FailureKind.OTHER and "the moon is in the wrong house" in failed.message


def test_a_missing_plugin_is_named_with_the_command_that_brings_it() -> None:
    cli = _cli(up=Scene("up-no-plugin", "error: update failed"))
    failed = _failed(lambda: Engine("demo", command=cli).up(asked("aws")))
    assert failed.kind == FailureKind.NO_PLUGIN and "aws v7.51.1" in failed.message
    assert failed.hint == "run: pulumi plugin install resource aws v7.51.1"


# -- the CLI -----------------------------------------------------------------------------------------------------------


def _program(path: Path, version: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)


def test_without_a_cli_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    failed = _failed(lambda: Engine("demo").up(asked("aws")))
    assert failed.kind == FailureKind.NO_CLI and "install" in failed.hint and "pulumi-cli/bin/pulumi" in failed.hint


def test_a_cli_that_is_too_old_is_refused_unless_there_is_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path / "bin" / "pulumi", "v3.100.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    failed = _failed(found_cli)
    assert failed.kind == FailureKind.OLD_CLI and "3.100.0" in failed.message
    own = state_dir() / "pulumi-cli" / "bin" / "pulumi"
    _program(own, "v3.200.0")
    assert found_cli().command == str(own)


def test_a_cli_that_does_not_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path / "bin" / "pulumi", "v3.200.0; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert _failed(found_cli).kind == FailureKind.NO_CLI


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("<{%reset%}>1 error occurred:\n\t* creating VPC: no\n\n<{%reset%}>", "creating VPC: no"),
        ("  \tsdk-v2/provider2.go:572: sdk.helper_schema: no: provider=aws@7.51.1\n", "no"),
        ("googleapi: Error 403: Quota 'GPUS' exceeded", "googleapi: Error 403: Quota 'GPUS' exceeded"),
        ("error: update failed\n", "it gave no reason"),
    ],
)
def test_the_first_line_is_the_first_that_says_something(said: str, line: str) -> None:
    assert first_line(said) == line


def test_a_verb_does_not_wait_for_events_that_do_not_come() -> None:
    began = time.monotonic()
    _failed(lambda: Engine("demo", command=_cli(up=Scene("refused", "error: no"))).up(asked("aws")))
    assert time.monotonic() - began < 4


def test_nothing_but_the_engine_knows_the_automation_api() -> None:
    house = ROOT
    modules = [
        path
        for floor in ("cli", "stacks", "bootstrap", "trainers", "cluster")
        for path in (house / floor).rglob("*.py")
    ]
    assert sorted(path.name for path in modules if "pulumi.automation" in path.read_text()) == [
        "automation.py",
        "events.py",
        "pulumi_install.py",
        "pulumi_process.py",
    ]
