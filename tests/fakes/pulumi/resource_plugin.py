"""Pulumi's resource plug-ins for the three clouds on loopback: the protocol of the real ones (``provider.proto``) over
the makers of ``made``. Both the real CLI and the stand-in (``pulumi_cli``) find them on PATH.

A plug-in prints its port, serves, and ends when it is killed, or when the engine that started it is gone and nothing is
under way any more: what it was at goes on, as the real ones do.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]
from google.protobuf import empty_pb2, struct_pb2  # type: ignore[import-untyped]
from google.protobuf.json_format import MessageToDict, ParseDict  # type: ignore[import-untyped]
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

from tests.fakes.pulumi.obstacles import Obstacles, of_environment
from tests.fakes.pulumi.resources import ASKED, AUTONAMED, MAKERS, REPLACED, SEEN, UNMAKERS, UPDATERS
from tests.paths import ROOT

Record = dict[str, Any]

PACKAGES = ("aws", "gcp", "azure-native")
_LOOKED_UP = {"value": "ami-1", "id": "1", "name": "1"}
"""What a program is told where it does not matter."""


def install(folder: Path) -> Path:
    """A folder for PATH with a plug-in for each cloud in it."""
    folder.mkdir(parents=True, exist_ok=True)
    root = ROOT
    for package in PACKAGES:
        program = folder / f"pulumi-resource-{package}"
        # Its name is among the process's words, as a real one's is.
        script = folder / f"pulumi-resource-{package}.py"
        script.write_text("from tests.fakes.pulumi.resource_plugin import main\n\nmain()\n")
        command = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} {package}"
        program.write_text(f"#!/bin/sh\nPYTHONPATH={shlex.quote(f'{root}/src:{root}')} exec {command}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


class Plugin(provider_pb2_grpc.ResourceProviderServicer):
    def __init__(self, obstacles: Obstacles | None) -> None:
        self._obstacles = obstacles
        self._lock = threading.Lock()
        self.under_way = 0

    def GetPluginInfo(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 (Pulumi's names)
        return plugin_pb2.PluginInfo(version="100.0.0")

    def CheckConfig(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return provider_pb2.CheckResponse(inputs=request.news)

    def DiffConfig(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return provider_pb2.DiffResponse(changes=provider_pb2.DiffResponse.DIFF_NONE)

    def Configure(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        region = MessageToDict(request.args).get("region")
        if region:
            os.environ["AWS_REGION"] = str(region)
        return provider_pb2.ConfigureResponse()

    def Check(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        inputs = MessageToDict(request.news)
        if _kind(request.urn) in AUTONAMED and "name" not in inputs:
            before = MessageToDict(request.olds).get("name")
            inputs["name"] = before or f"{_name(request.urn)}-{os.urandom(4).hex()[1:]}"
        return provider_pb2.CheckResponse(inputs=_struct(inputs))

    def Diff(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        before, inputs = MessageToDict(request.old_inputs), MessageToDict(request.news)
        changed = sorted(key for key in {*before, *inputs} if before.get(key) != inputs.get(key))
        differs = provider_pb2.DiffResponse.DIFF_SOME if changed else provider_pb2.DiffResponse.DIFF_NONE
        replaces = changed if _kind(request.urn) in REPLACED else []
        return provider_pb2.DiffResponse(changes=differs, diffs=changed, replaces=replaces)

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind, inputs = _kind(request.urn), MessageToDict(request.properties)
        if request.preview:
            return provider_pb2.CreateResponse(properties=request.properties)
        if kind not in MAKERS:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"the plug-in cannot make {kind}")
        told = self._doing("create", request.urn, context, lambda: MAKERS[kind](inputs))
        outputs = {**inputs, **{key: value for key, value in told.items() if key != "id"}}
        return provider_pb2.CreateResponse(id=told["id"], properties=_struct(outputs))

    def Update(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind, id_ = _kind(request.urn), request.id
        before, inputs = MessageToDict(request.old_inputs), MessageToDict(request.news)
        if request.preview:
            return provider_pb2.UpdateResponse(properties=request.news)
        if kind not in UPDATERS:
            differ = sorted(key for key in {*before, *inputs} if before.get(key) != inputs.get(key))
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"the plug-in cannot update {kind}: {', '.join(differ)}")
        told = self._doing("update", request.urn, context, lambda: UPDATERS[kind](id_, before, inputs))
        return provider_pb2.UpdateResponse(properties=_struct({**MessageToDict(request.olds), **inputs, **told}))

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        unmake, id_, state = UNMAKERS.get(_kind(request.urn)), request.id, MessageToDict(request.properties)
        if unmake is not None:
            self._doing("delete", request.urn, context, lambda: unmake(id_, state))
        return empty_pb2.Empty()

    def Read(self, request: Any, context: Any) -> Any:  # noqa: N802
        seen, id_ = SEEN.get(_kind(request.urn)), request.id
        if seen is not None and not self._doing("read", request.urn, context, lambda: seen(id_)):
            return provider_pb2.ReadResponse()
        return provider_pb2.ReadResponse(id=id_, properties=request.properties, inputs=request.inputs)

    def Invoke(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        answer = provider_pb2.InvokeResponse()
        getattr(answer, "return").update(ASKED[request.tok]() if request.tok in ASKED else _LOOKED_UP)
        return answer

    def Cancel(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """What is under way goes on; the engine begins nothing more."""
        if self._obstacles is not None:
            self._obstacles.cancel()
        return empty_pb2.Empty()

    def _doing(self, verb: str, urn: str, context: Any, act: Callable[[], Any]) -> Any:
        """Whatever the cloud says no with is what the engine hears."""
        with self._lock:
            self.under_way += 1
        try:
            if self._obstacles is None:
                return act()
            return self._obstacles.meet(f"{verb} {_kind(urn)} {_name(urn)}", act)
        except Exception as error:  # noqa: BLE001
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
        finally:
            with self._lock:
                self.under_way -= 1


def _kind(urn: str) -> str:
    """In ``urn:pulumi:<stack>::<project>::<types, the parent's first>::<name>``."""
    return urn.split("::")[2].rpartition("$")[2]


def _name(urn: str) -> str:
    return urn.split("::", 3)[3]


def _struct(values: Record) -> Any:
    return ParseDict(values, struct_pb2.Struct())


def main() -> NoReturn:
    engine = os.getppid()
    plugin = Plugin(of_environment())
    server = grpc.server(ThreadPoolExecutor(max_workers=16))
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(plugin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    while os.getppid() == engine or plugin.under_way:
        time.sleep(0.1)
    sys.exit(0)


if __name__ == "__main__":
    main()
