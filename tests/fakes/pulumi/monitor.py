"""A small server of what Pulumi's engine is to a program: it takes resources, as wanted, and says that they are there.

With it a stand-in for the CLI runs the inline program for real, through the SDK's own language server.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
from google.protobuf import empty_pb2  # type: ignore[import-untyped]
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from pulumi.runtime.proto import (
    engine_pb2_grpc,
    language_pb2,
    language_pb2_grpc,
    resource_pb2,
    resource_pb2_grpc,
)

_STACK = "pulumi:pulumi:Stack"


class Monitor(resource_pb2_grpc.ResourceMonitorServicer, engine_pb2_grpc.EngineServicer):
    def __init__(self, stack: str = "demo") -> None:
        self.stack = stack
        self.resources: set[tuple[str, str]] = set()
        """Type and name of each."""
        self.outputs: dict[str, Any] = {}
        """Of the stack."""

    def GetDeploymentInfo(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 (Pulumi's names)
        return resource_pb2.DeploymentInfo(
            supportedFeatures=[
                resource_pb2.RESOURCE_MONITOR_FEATURE_SECRETS,
                resource_pb2.RESOURCE_MONITOR_FEATURE_RESOURCE_REFERENCES,
                resource_pb2.RESOURCE_MONITOR_FEATURE_ALIAS_SPECS,
                resource_pb2.RESOURCE_MONITOR_FEATURE_PARAMETERIZATION,
            ]
        )

    def RegisterResource(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        if request.type != _STACK:
            self.resources.add((request.type, request.name))
        made = request.object
        made.update({"arn": f"arn of {request.name}", "name": request.name, "latestVersion": 1})
        return resource_pb2.RegisterResourceResponse(urn=self.urn(request), id=f"id of {request.name}", object=made)

    def urn(self, request: Any) -> str:
        """With the types of its parents, but for the stack's."""
        parents = request.parent.split("::")[2] if request.parent and _STACK not in request.parent else ""
        kinds = f"{parents}${request.type}" if parents else request.type
        return f"urn:pulumi:{self.stack}::gpuctl::{kinds}::{request.name}"

    def RegisterResourceOutputs(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        if _STACK in request.urn:
            self.outputs = MessageToDict(request.outputs)
        return empty_pb2.Empty()

    def RegisterPackage(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return resource_pb2.RegisterPackageResponse(ref="a package")

    def Invoke(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        answer = resource_pb2.ResourceInvokeResponse()
        getattr(answer, "return").update({"value": "ami-1", "id": "1", "name": "1"})
        return answer

    def SignalAndWaitForShutdown(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return empty_pb2.Empty()

    def Log(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return empty_pb2.Empty()


def run(client: str, monitor: Monitor, *, preview: bool = False) -> str:
    """Have the program that listens at ``client`` declare its resources. Returns why it did not; empty: it did."""
    with _serving(monitor) as address, grpc.insecure_channel(client) as channel:
        request = language_pb2.RunRequest(
            project="gpuctl", stack=monitor.stack, args=[address], monitor_address=address, parallel=4, dryRun=preview
        )
        try:
            return str(language_pb2_grpc.LanguageRuntimeStub(channel).Run(request, timeout=120).error)
        except grpc.RpcError as error:  # the process that it ran in has ended
            return f"rpc error: {error.details()}"


@contextmanager
def _serving(monitor: Monitor) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    resource_pb2_grpc.add_ResourceMonitorServicer_to_server(monitor, server)
    engine_pb2_grpc.add_EngineServicer_to_server(monitor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
