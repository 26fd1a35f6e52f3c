"""A cloud of one test: a group of machines that replaces what it lost, its metadata service, and a user with gpuctl.

Everything is in the network of the test (see ``network``). As on the real ones, machines are told who they are by the
metadata service, come with user-data, and leave by the cloud's shrink call, which is answered here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec
import pytest

from gpuctl.bootstrap.node_spec import Host, NodeSpec
from gpuctl.bootstrap.user_data.render import render
from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import BootReport
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.providers import node_package
from gpuctl.stacks.state.clusters import KnownCluster
from tests.e2e.machine import Cluster
from tests.fakes.metadata import Provider, Service
from tests.fakes.stores import s3
from tests.machines import root
from tests.machines.machine import Machine
from tests.machines.network import HOST, METADATA, Network
from tests.waiting import PATIENCE_S

T = TypeVar("T")

_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
_SHUTDOWN_S = 30.0
"""So long a machine that is terminated may take for its shutdown."""


@dataclass(frozen=True)
class Site:
    """What outlives a test: the network, the bucket's server in it, and what machines install from."""

    network: Network
    s3_port: int
    s3_door: int
    """On this machine's loopback."""
    index: str
    """URL in the network of a folder with wheels."""
    apt: str
    """URL in the network of the repository of ``packages``."""
    layers: list[Path]
    """Of machines with all packages in place."""
    bare_layers: list[Path]
    """Of machines that have none."""


@dataclass
class Instance:
    """A machine as the cloud's group knows it."""

    id: str
    """Its node's name too."""
    machine: Machine
    gone_by: float | None = None
    """On our monotonic clock: then the cloud takes it, whatever it does."""
    born_at: float = field(default_factory=time.time)


class Cloud(Cluster):
    """``up`` gives machines; ``wait`` and whatever uses it let the group do its work meanwhile."""

    def __init__(self, site: Site, folder: Path, provider: Provider = "aws") -> None:
        super().__init__(folder / "state", folder / "work")
        self.site = site
        self.provider = provider
        self.instances: list[Instance] = []
        """All that there ever were, the oldest first."""
        self.desired = 0
        self.terminated: list[str] = []
        """Those that a call of their own took."""
        self.replaced: list[str] = []
        """Those among them in whose place another one was to come."""
        self._folder = folder
        self._at_once = contextlib.ExitStack()
        self._calls: list[_Left] = []
        self._bucket_name = f"clusters-{folder.name}".lower().replace("_", "-")[:60].rstrip("-")
        s3.create(f"http://127.0.0.1:{site.s3_door}", self._bucket_name)
        self.command = site.network.inside(*self.command)
        self.env = {**self.env, **_KEYS}
        self.metadata = site.network.within(lambda: Service(provider, METADATA, 80))
        self.metadata.believes = ("Cloud-Init", "python-requests")  # in a container it does not see that this is AWS
        self._at_once.enter_context(self.metadata.running())
        self._api = site.network.within(lambda: _Api(self._calls.append))
        self._at_once.enter_context(self._api.running())

    # -- the cluster --------------------------------------------------------------------------------------------------

    @property
    def bucket(self) -> Bucket:
        return open_bucket(self._url(f"http://127.0.0.1:{self.site.s3_door}", with_keys=True))

    @property
    def bucket_url(self) -> str:
        """As the machines and the user know it. Those of AWS have an identity that gives keys, the others' image has
        them: user-data may not."""
        return self._url(f"http://{HOST}:{self.site.s3_port}", with_keys=False)

    def _url(self, endpoint: str, *, with_keys: bool) -> str:
        keys = "&access_key_id=test&secret_access_key=test" if with_keys else ""
        return f"s3://{self._bucket_name}/{self.name}?endpoint={endpoint}&region=us-east-1{keys}"

    def spec(self, **changes: Any) -> NodeSpec:
        host: Host = self.provider
        api = f"http://{HOST}:{self._api.server_port}/"
        made = NodeSpec(
            cluster=self.name,
            provider=host,
            bucket=self.bucket_url,
            package=node_package.publish(self.bucket, root.EXTRAS),
            region="us-east-1",
            env={
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": self.site.index,
                "PIP_TRUSTED_HOST": HOST,
                "OMP_NUM_THREADS": "1",
            },
            sources=dict.fromkeys(("autoscaling", "compute", "arm"), api),
            unhealthy_minutes=0.0,
        )
        return msgspec.structs.replace(made, **changes)

    def create(self, count: int, nodes: str = "", spec: NodeSpec | None = None, **how: Any) -> list[Instance]:
        """A cluster and its group of ``count`` machines, which are booting. ``how`` is as in ``launch``."""
        fewest, _, most = (nodes or str(count)).partition(":")
        record = ClusterSpec(
            name=self.name,
            provider=self.provider,
            nodes_min=int(fewest),
            nodes_max=int(most or fewest),
            heartbeat_s=0.5,
            lease_s=3.0,
            token="a secret of the nodes",
            created_at=time.time(),
        )
        assert self.bucket.create(layout.CLUSTER, encode(record))
        known = KnownCluster(name=self.name, provider=self.provider, bucket=self.bucket_url)
        path = self.state / "clusters" / f"{self.name}.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(msgspec.json.encode(known))
        self.desired = count
        self._how = {"spec": spec or self.spec(), **how}
        return [self.launch() for _ in range(count)]

    def launch(self, **how: Any) -> Instance:
        """One more machine: of the ``spec``, with ``files``, ``layers`` and ``disk_mb`` as in ``Machine``."""
        how = {"layers": self.site.layers, "files": {}, "disk_mb": 0, **self._how, **how}
        number = len(self.instances)
        name, address = f"m{number}", f"10.77.0.{10 + number}"
        node = {"aws": f"i-{number:04x}", "gcp": f"demo-{number:04x}", "azure": f"demo_{number}"}[self.provider]
        user_data = render(how["spec"])
        self.metadata.add(id=node, address=address, user_data=user_data)
        files = {**self._delivery(node, user_data), **how["files"]}
        folder = self._folder / name
        made = Machine(self.site.network, folder, name, address, how["layers"], files, how["disk_mb"])
        self.instances.append(Instance(node, made))
        made.switch_on()
        return self.instances[-1]

    def _delivery(self, node: str, user_data: str) -> dict[str, str]:
        """How cloud-init comes by its user-data. In a container it asks AWS's service only, since that it is on one of
        the other clouds it would read from the firmware."""
        config = "/etc/cloud/cloud.cfg.d/91-datasource.cfg"
        if self.provider == "aws":
            return {config: "datasource_list: [ Ec2 ]\ndatasource: {Ec2: {strict_id: false}}\n"}
        seed = "/var/lib/cloud/seed/nocloud"
        meta_data = json.dumps({"instance-id": node, "local-hostname": node.replace("_", "-")})
        chosen = "datasource_list: [ NoCloud ]\n"
        keys = "[Service]\nEnvironment=" + " ".join(f"{name}={value}" for name, value in _KEYS.items()) + "\n"
        units = {f"/etc/systemd/system/gpuctl-{unit}.service.d/keys.conf": keys for unit in ("boot", "agent")}
        return {config: chosen, f"{seed}/user-data": user_data, f"{seed}/meta-data": meta_data, **units}

    # -- what the cloud does ------------------------------------------------------------------------------------------

    def take(self, instance: Instance, lead_s: float = 120.0) -> None:
        """Notice: the machine is taken in ``lead_s`` seconds, whatever it does."""
        self.metadata.take(lead_s, instance.id)
        instance.gone_by = time.monotonic() + lead_s

    def tend(self) -> None:
        """The group's work: do what shrink calls asked for, take what is due, replace what is gone."""
        while self._calls:
            left = self._calls.pop(0)
            found = self.instance(left.node)
            if found.id not in self.terminated:
                self.terminated.append(found.id)
                if left.is_replaced:
                    self.replaced.append(found.id)
                else:
                    self.desired -= 1
                found.gone_by = time.monotonic() + _SHUTDOWN_S
                with contextlib.suppress(OSError):
                    found.machine.run("systemctl", "poweroff", "--no-block", check=False)
        for each in self.instances:
            if each.gone_by is not None and each.machine.is_on and time.monotonic() > each.gone_by:
                each.machine.lose_power()
        while sum(1 for each in self.instances if each.machine.is_on) < self.desired:
            self.launch()

    def instance(self, node: str) -> Instance:
        return next(each for each in self.instances if each.id == node)

    def rank0(self) -> str:
        """By the ledger: what was lost has left its heartbeat behind."""
        return self.wait(lambda: ledgers.lease(self.bucket).read().value, "a rank 0").node

    def booted(self, instance: Instance) -> BootReport | None:
        """What its boot has told the bucket so far."""
        key = layout.boot_report(instance.id)
        data = self.bucket.get(key)
        return decode(data, BootReport, key) if data else None

    def await_ready(self, *instances: Instance, timeout: float = PATIENCE_S) -> None:
        for each in instances or self.instances:
            self.wait(lambda each=each: self._is_ready(each), f"{each.id} to be ready", timeout)  # type: ignore[misc]

    def _is_ready(self, instance: Instance) -> bool:
        report = self.booted(instance)
        if report and report.state == "failed":
            pytest.fail(f"{instance.id}: boot failed at {report.step}: {report.reason}\n{self.agents_said()}")
        return report is not None and report.state == "ready"

    # -- as any cluster -----------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], T | None], what: str, timeout: float = PATIENCE_S) -> T:
        def tended() -> T | None:
            self.tend()
            return condition()

        return super().wait(tended, what, timeout)

    def agents_said(self) -> str:
        told = [each.machine.said() for each in self.instances]
        if job := self.newest_job():
            told += [repr(self.now(job)), repr([(e.step, e.round, e.reason) for e in self.checkpoints(job).entries])]
        return "\n".join(told)

    def end(self) -> None:
        """Raises ``AssertionError`` where something of a machine is left."""
        self._at_once.close()
        for each in self.instances:
            each.machine.discard()


def slowness() -> float:
    """How many times longer than on an idle computer things may take now, as others use its cores too."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class _Left(NamedTuple):
    node: str
    is_replaced: bool


class _Api(ThreadingHTTPServer):
    """The calls of three clouds by which a machine leaves: each id that is to go is handed on."""

    daemon_threads = True

    def __init__(self, shrink: Callable[[_Left], None]) -> None:
        self.shrink = shrink
        super().__init__((HOST, 0), _Call)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class _Call(BaseHTTPRequestHandler):
    server: _Api

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        for node in _named(self.path, body):
            self.server.shrink(node)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _named(path: str, body: str) -> list[_Left]:
    if found := re.search(r"/(delete|recreate)Instances\?", path):
        names = [name.rpartition("/")[2] for name in json.loads(body)["instances"]]
        return [_Left(name, found[1] == "recreate") for name in names]
    if re.search(r"/delete\?", path):
        return [_Left(f"demo_{number}", False) for number in json.loads(body)["instanceIds"]]
    told: Mapping[str, list[str]] = parse_qs(body)
    assert told["Action"] == ["TerminateInstanceInAutoScalingGroup"], told
    (shrinks,) = told["ShouldDecrementDesiredCapacity"]
    return [_Left(node, shrinks == "false") for node in told["InstanceId"]]
