"""The engine of the stand-in for Pulumi's CLI: it makes what the program declares through resource plug-ins, and takes
away what it no longer declares.

What is done about a failure, an interrupted operation and a cancellation is what ``pkg/resource/deploy`` of
pulumi/pulumi does.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc  # type: ignore[import-untyped]
from google.protobuf import empty_pb2, struct_pb2  # type: ignore[import-untyped]
from google.protobuf.json_format import MessageToDict, ParseDict  # type: ignore[import-untyped]
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc, resource_pb2

from tests.fakes.pulumi.events import Events
from tests.fakes.pulumi.monitor import Monitor
from tests.fakes.pulumi.state import CliError, Record, State

_PROVIDER = "pulumi:providers:"
_STEP_S = 120
"""What a plug-in may take."""


class Plugins:
    """Processes of their own, which outlive this one if it is killed; each is started when it is first needed."""

    def __init__(self) -> None:
        self._stubs: dict[str, Any] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starting = threading.Lock()

    def of(self, kind: str) -> Any:
        """For a resource of this Pulumi token. Raises ``CliError`` if the plug-in is not installed."""
        package = kind.partition(":")[0]
        with self._starting:
            if package not in self._stubs:
                self._stubs[package] = self._start(package)
            return self._stubs[package]

    def configure(self, package: str, inputs: Record) -> None:
        self.of(f"{package}:").Configure(provider_pb2.ConfigureRequest(args=_struct(inputs)), timeout=_STEP_S)

    def cancel(self) -> None:
        for stub in list(self._stubs.values()):  # another thread may be starting one more
            with suppress(grpc.RpcError):
                stub.Cancel(empty_pb2.Empty(), timeout=_STEP_S)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, package: str) -> Any:
        name = f"pulumi-resource-{package}"
        program = shutil.which(name)
        if program is None:
            raise CliError(
                f"no resource plugin '{name}' found in the workspace or on your $PATH, install the plugin using"
                f" `pulumi plugin install resource {package}`"
            )
        # In a group of its own: Ctrl-C is for the engine alone.
        process = subprocess.Popen(
            [program, "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        assert process.stdout is not None
        self._processes.append(process)
        port = int(process.stdout.readline())
        return provider_pb2_grpc.ResourceProviderStub(grpc.insecure_channel(f"127.0.0.1:{port}"))


class Deployment(Monitor):
    """One change of a stack. ``stop`` is set when it is cancelled, or when something has failed: what is under way
    goes on, and nothing more is begun."""

    def __init__(self, stack: str, state: State, events: Events, plugins: Plugins, *, preview: bool = False) -> None:
        super().__init__(stack)
        self._state = state
        self._events = events
        self._plugins = plugins
        self._preview = preview
        self.stop = threading.Event()
        self.failed = False
        self._steps = threading.Condition()
        self._under_way = 0
        self.declared: set[str] = set()
        """URNs."""

    # -- the program's side --------------------------------------------------------------------------------------------

    def Invoke(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 (Pulumi's names)
        asked = provider_pb2.InvokeRequest(tok=request.tok, args=request.args)
        told = getattr(self._plugins.of(request.tok).Invoke(asked, timeout=_STEP_S), "return")
        answer = resource_pb2.ResourceInvokeResponse()
        getattr(answer, "return").CopyFrom(told)
        return answer

    def RegisterResource(self, request: Any, context: Any) -> Any:  # noqa: N802 (Pulumi's name)
        if self.stop.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "resource monitor shut down")
        if self._preview:
            return self._foresee(request, context)
        urn = self.urn(request)
        self.resources.add((request.type, request.name))
        self.declared.add(urn)
        try:
            one = self._registered(urn, request)
        except (grpc.RpcError, CliError) as error:
            if isinstance(error, CliError):
                self._events.failed("create", urn, str(error))
            self.failed = True
            self.stop.set()
            context.abort(
                grpc.StatusCode.UNAVAILABLE, "resource monitor shut down while waiting on step's done channel"
            )
        return resource_pb2.RegisterResourceResponse(urn=urn, id=one["id"], object=_struct(one["outputs"]))

    def RegisterResourceOutputs(self, request: Any, context: Any) -> Any:  # noqa: N802
        known = self._state.find(request.urn)
        if known is not None and not self._preview:
            known["outputs"] = MessageToDict(request.outputs)
            self._state.save()
        return super().RegisterResourceOutputs(request, context)

    def _foresee(self, request: Any, context: Any) -> Any:
        known = self._state.find(self.urn(request))
        inputs = MessageToDict(request.object)
        answer = super().RegisterResource(request, context)
        if known is None:
            self._events.changes["create"] += 1
            return answer
        changed = inputs != known["inputs"] and request.custom
        self._events.changes["update" if changed else "same"] += 1
        outputs = _struct(known["outputs"] or known["inputs"])
        return resource_pb2.RegisterResourceResponse(urn=answer.urn, id=known["id"], object=outputs)

    def _registered(self, urn: str, request: Any) -> Record:
        kind = request.type
        one = {
            "urn": urn,
            "custom": request.custom,
            "type": kind,
            "inputs": MessageToDict(request.object),
            "parent": request.parent,
            "dependencies": list(request.dependencies),
            "retainOnDelete": request.retainOnDelete,
            "provider": request.provider,
        }
        known = self._state.find(urn)
        if not request.custom or kind.startswith(_PROVIDER):
            id_ = (known["id"] if known else str(uuid.uuid4())) if request.custom else ""
            if request.custom:
                self._plugins.configure(kind.removeprefix(_PROVIDER), one["inputs"])
            one |= {"id": id_, "outputs": known["outputs"] if known and not request.custom else one["inputs"]}
            self._state.put(one)
            return one
        before = known["inputs"] if known else {}
        news = pinned(before, one["inputs"], request.ignoreChanges) if known else one["inputs"]
        asked = provider_pb2.CheckRequest(urn=urn, olds=_struct(before), news=_struct(news))
        one["inputs"] = MessageToDict(self._plugins.of(kind).Check(asked, timeout=_STEP_S).inputs)
        return self._changed(known, one) if known else self._created("create", one)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _created(self, verb: str, one: Record, old: Record | None = None) -> Record:
        asked = provider_pb2.CreateRequest(urn=one["urn"], properties=_struct(one["inputs"]))
        with self._telling(verb, one["urn"]), self._state.operation("creating", one):
            made = self._plugins.of(one["type"]).Create(asked, timeout=_STEP_S)
            one |= {"id": made.id, "outputs": MessageToDict(made.properties)}
            if old is None:
                self._state.put(one)
            else:
                self._state.replace(old, one)
        return one

    def _changed(self, known: Record, one: Record) -> Record:
        plugin = self._plugins.of(one["type"])
        about = {
            "id": known["id"],
            "urn": known["urn"],
            "olds": _struct(known["outputs"]),
            "news": _struct(one["inputs"]),
            "old_inputs": _struct(known["inputs"]),
        }
        differs = plugin.Diff(provider_pb2.DiffRequest(**about), timeout=_STEP_S)
        if differs.replaces:
            return self._created("create-replacement", one, known)
        one |= {"id": known["id"], "outputs": known["outputs"]}
        if differs.changes != provider_pb2.DiffResponse.DIFF_SOME:
            self._state.put(one)
            self._events.same(one["urn"])
            return one
        with self._telling("update", one["urn"]), self._state.operation("updating", one):
            updated = plugin.Update(provider_pb2.UpdateRequest(**about), timeout=_STEP_S)
            one["outputs"] = MessageToDict(updated.properties)
            self._state.put(one)
        return one

    def take_away(self, wanted: Iterable[str] = ()) -> None:
        """All but what is ``wanted`` (URNs), the last one first. What cannot be taken away keeps what it needs."""
        self._configure()
        kept: set[str] = set()
        for one in reversed(self._state.resources):
            if self.stop.is_set() and not self.failed:
                return
            if (one["urn"] in wanted and not one.get("delete")) or one["urn"] in kept:
                continue
            try:
                self._deleted(one)
            except grpc.RpcError:
                self.failed = True
                kept |= self._needed_by(one)

    def _deleted(self, one: Record) -> None:
        verb = "delete-replaced" if one.get("delete") else "delete"
        if not one["custom"] or one["type"].startswith(_PROVIDER):
            self._state.drop(one)
            return
        if one["retainOnDelete"]:
            self._events.begun(verb, one["urn"], retained=True)
            self._state.drop(one)
            self._events.done(verb, one["urn"], retained=True)
            return
        asked = provider_pb2.DeleteRequest(id=one["id"], urn=one["urn"], properties=_struct(one["outputs"]))
        with self._telling(verb, one["urn"]), self._state.operation("deleting", one):
            self._plugins.of(one["type"]).Delete(asked, timeout=_STEP_S)
            self._state.drop(one)

    def _needed_by(self, one: Record) -> set[str]:
        """Of all that ``one`` was made with, and all that that was made with."""
        by_urn = {other["urn"]: other for other in self._state.resources}
        found: set[str] = set()
        left = [one]
        while left:
            now = left.pop()
            provider = now["provider"].rpartition("::")[0]
            needs = {*now["dependencies"], now["parent"], provider} & by_urn.keys() - found
            found |= needs
            left += [by_urn[urn] for urn in needs]
        return found

    def refresh(self) -> None:
        """What is gone is known no more."""
        self._configure()
        for one in self._state.resources:
            if self.stop.is_set():
                return
            if not one["custom"] or one["type"].startswith(_PROVIDER):
                continue
            asked = provider_pb2.ReadRequest(
                id=one["id"], urn=one["urn"], properties=_struct(one["outputs"]), inputs=_struct(one["inputs"])
            )
            with self._telling("refresh", one["urn"]):
                read = self._plugins.of(one["type"]).Read(asked, timeout=_STEP_S)
            if not read.id:
                self._state.drop(one)
        self._state.save()

    def _configure(self) -> None:
        """Providers as they were when the state was made."""
        for one in self._state.resources:
            if one["type"].startswith(_PROVIDER) and one["urn"] not in self.declared:
                self._plugins.configure(one["type"].removeprefix(_PROVIDER), one["inputs"])

    def finish_steps(self) -> None:
        """What is under way goes on to its end, whatever has become of the program."""
        with self._steps:
            self._steps.wait_for(lambda: not self._under_way, _STEP_S)

    @contextmanager
    def _telling(self, verb: str, urn: str) -> Iterator[None]:
        self._events.begun(verb, urn)
        with self._steps:
            self._under_way += 1
        try:
            yield
        except grpc.RpcError as error:
            self._events.failed(verb, urn, error.details() or str(error))
            raise
        else:
            self._events.done(verb, urn)
        finally:
            with self._steps:
                self._under_way -= 1
                self._steps.notify_all()


def pinned(before: Record, inputs: Record, paths: Iterable[str]) -> Record:
    """``inputs`` with what was there before at ``paths``, such as ``disks[0].sourceImage``: so Pulumi ignores changes.
    What the program says now of such a path counts for nothing, and what the cloud says neither."""
    kept = copy.deepcopy(inputs)
    for path in paths:
        *way, last = (int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", path))
        old: Any = before
        new: Any = kept
        for step in way:
            old, new = old[step], new[step]
        if last in old:
            new[last] = old[last]
        else:
            new.pop(last, None)
    return kept


def _struct(values: Record) -> Any:
    return ParseDict(values, struct_pb2.Struct())
