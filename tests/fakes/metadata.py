"""A metadata service that answers as that of AWS, Google Cloud or Azure does, and takes machines when it is told to.

In a test: ``with Service("aws").running() as service: Metadata("aws", endpoint=service.url)``. As a program, for
machines in a network of their own, told apart by the address they ask from::

    python -m tests.fakes.metadata --provider aws --address 169.254.169.254 --port 80 --control PORT
    curl -d '{"id": "i-1", "address": "10.9.0.2"}' localhost:PORT/add
    curl -d '{"id": "i-1", "lead_s": 120}' localhost:PORT/take

The control port has every method of ``Service`` that is listed in ``_ORDERS``; ``/report`` answers with what was seen.

Sources: Amazon EC2 user guide (IMDSv2; spot interruption notices; rebalance recommendations); Google Compute Engine,
"About VM metadata" (``wait_for_change``, ``last_etag``); Azure, "Instance Metadata Service" and "Scheduled Events for
Linux VMs".
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from tests.fakes.stores.identity import Keys

Provider = Literal["aws", "gcp", "azure"]
PROVIDERS: tuple[Provider, ...] = ("aws", "gcp", "azure")
_ORDERS = ("add", "take", "recommend", "withdraw", "be_down", "garble", "expire_sessions", "hold_credentials")
_SET = "/subscriptions/sub/resourceGroups/gpuctl/providers/Microsoft.Compute/virtualMachineScaleSets/"
_REGION = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}
_ZONE = {"aws": "us-east-1a", "gcp": "us-central1-a", "azure": "1"}
_ID = {"aws": "i-0123456789abcdef0", "gcp": "demo-x1y2", "azure": "demo_3"}
_TYPE = {"aws": "p4d.24xlarge", "gcp": "a2-highgpu-8g", "azure": "Standard_ND96asr_v4"}


@dataclass
class Machine:
    """Whoever asks from ``address``; with several unknown addresses, all are the first machine."""

    id: str
    address: str = "127.0.0.1"
    public_address: str = ""
    zone: str = ""
    region: str = ""
    type: str = ""
    group: str = "demo"
    user_data: str = ""
    spot: bool = True
    tags: dict[str, str] = field(default_factory=dict)
    taken_at: float | None = None
    """Wall clock of the cloud; the others below as well."""
    advised_at: float | None = None
    event: int = 0
    """Number of Azure's event of its being taken."""
    taken_with: tuple[str, ...] = ()
    """Machines that the same event of Azure's is about."""


class Service:
    """``url`` answers as ``provider`` does once it is ``running``."""

    def __init__(self, provider: Provider, address: str = "127.0.0.1", port: int = 0, warming_s: float = 0.0) -> None:
        """``warming_s``: Azure's first answer about events takes so long (up to two minutes)."""
        self.provider = provider
        self.keys = Keys()
        self.seen: list[str] = []
        """``METHOD path`` of every request, in order."""
        self.acknowledged: list[str] = []
        """Ids of the events of Azure's that were approved: their machines are taken at once."""
        self.skew_s = 0.0
        """How much later it is for the cloud than for the machine."""
        self.believes: tuple[str, ...] = ()
        """AWS: who calls itself so needs no session (a cloud-init that does not know that it is on AWS)."""
        self.identities: tuple[str, ...] = ("",)
        """Azure: resource ids of those that the machine has; with several, one must be named."""
        self._warming_s = warming_s
        self._machines: list[Machine] = [_machine(provider, _ID[provider])]
        self._sessions: set[str] = set()
        self._numbers = itertools.count(1)
        self._incarnation = 1
        self._credentials: dict[str, str] | None = None
        self._down = False
        self._garbage: str | None = None
        self._warm = False
        self.changed = threading.Condition()
        self._server = _Server((address, port), self)
        self.url = f"http://{address}:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Service]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            with self.changed:
                self._down = True
                self.changed.notify_all()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    # -- orders -------------------------------------------------------------------------------------------------------

    @property
    def machine(self) -> Machine:
        """The first one."""
        return self._machines[0]

    def add(self, **facts: Any) -> None:
        """A machine with these fields of ``Machine``, in place of one of this id and of the one there is by default."""
        made = _machine(self.provider, facts.pop("id"), **facts)
        with self._change():
            default = _ID[self.provider]
            self._machines = [m for m in self._machines if m.id not in (made.id, default)] + [made]

    def take(self, lead_s: float = 120.0, id: str = "") -> None:  # noqa: A002
        """Notice: the machine will be taken in ``lead_s`` seconds (Google says no time)."""
        with self._change():
            machine = self._named(id)
            machine.taken_at = time.time() + self.skew_s + lead_s
            machine.event = next(self._numbers)
            self._incarnation += 1

    def recommend(self, id: str = "") -> None:  # noqa: A002
        """AWS thinks that the machine may be taken sooner than others."""
        with self._change():
            self._named(id).advised_at = time.time() + self.skew_s

    def withdraw(self, id: str = "") -> None:  # noqa: A002
        with self._change():
            machine = self._named(id)
            machine.taken_at = machine.advised_at = None
            self._incarnation += 1

    def be_down(self, down: bool = True) -> None:
        """Answer nothing from now on: 503, as clouds do when it is too much for them; or do again."""
        with self._change():
            self._down = down

    def garble(self, garbage: str | None = "<html>not what you asked for") -> None:
        """Say this, whatever the question; ``None``: the truth again."""
        with self._change():
            self._garbage = garbage

    def expire_sessions(self) -> None:
        """No session of IMDSv2 that was begun so far is good any more."""
        with self._change():
            self._sessions.clear()

    def hold_credentials(self, key: str, secret: str, token: str = "") -> None:
        """Give these from now on, in place of a new key every time."""
        with self._change():
            self._credentials = {"AccessKeyId": key, "SecretAccessKey": secret, "Token": token}

    def report(self) -> dict[str, Any]:
        return {"seen": self.seen, "acknowledged": self.acknowledged}

    def await_(self, what: Callable[[], object], timeout_s: float = 20.0) -> None:
        """Until ``what`` is true; looked at again after every request."""
        with self.changed:
            if not self.changed.wait_for(what, timeout_s):
                raise TimeoutError(f"waited {timeout_s:g} s; seen: {self.seen[-20:]}")

    # -- answers ------------------------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes, peer: str) -> Answer:
        with self._change():
            self.seen.append(f"{method} {target}")
            if self._down:
                return Answer(503)
            if self._garbage is not None:
                return Answer(200, self._garbage)
        machine = next((m for m in self._machines if m.address == peer), self._machines[0])
        ask = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[self.provider]
        return ask(method, target, headers, body, machine)

    def _aws(self, method: str, target: str, headers: dict[str, str], _: bytes, machine: Machine) -> Answer:
        if target == "/latest/api/token":
            if method != "PUT" or not headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
                return Answer(400 if method == "PUT" else 405)
            session = f"session-{next(self._numbers)}"
            self._sessions.add(session)
            return Answer(200, session)
        believed = headers.get("user-agent", "").startswith(self.believes)
        if not believed and headers.get("x-aws-ec2-metadata-token") not in self._sessions:
            return Answer(401)
        version, *parts = target.strip("/").split("/")
        if not re.fullmatch(r"latest|\d{4}-\d\d-\d\d", version):
            return Answer(404)
        found: Any = _aws_tree(machine, self._aws_keys)
        for part in parts:
            found = found.get(part) if isinstance(found, dict) else None
            if found is None:
                return Answer(404)
        if isinstance(found, dict):
            return Answer(200, "\n".join(f"{k}/" if isinstance(v, dict) else k for k, v in found.items()))
        return Answer(200, found() if callable(found) else found)

    def _aws_keys(self) -> str:
        return json.dumps({**self.keys.give(), **(self._credentials or {})})

    def _gcp(self, _: str, target: str, headers: dict[str, str], __: bytes, machine: Machine) -> Answer:
        if headers.get("metadata-flavor") != "Google":
            return Answer(403)
        parts, query = urlsplit(target), parse_qs(urlsplit(target).query)
        names = parts.path.strip("/").split("/")
        if names[:2] != ["computeMetadata", "v1"]:
            return Answer(404)

        def look() -> Any:
            found: Any = _gcp_tree(machine, self.keys)
            for name in names[2:]:
                found = found.get(name) if isinstance(found, dict) else None
            return found

        with self.changed:
            before = query.get("last_etag", [_etag(look())])[0]
            if query.get("wait_for_change") == ["true"]:
                wait_s = float(query.get("timeout_sec", ["3600"])[0])
                self.changed.wait_for(lambda: self._down or _etag(look()) != before, wait_s)
            found = look()
            if self._down or found is None:
                return Answer(503 if self._down else 404)
        if query.get("recursive", [""])[0].lower() == "true":
            return Answer(200, json.dumps(_camel(found)), _etag(found))
        if isinstance(found, dict):
            return Answer(200, "".join(f"{k}/\n" if isinstance(v, dict) else f"{k}\n" for k, v in found.items()))
        return Answer(200, found() if callable(found) else found, _etag(found))

    def _azure(self, method: str, target: str, headers: dict[str, str], body: bytes, machine: Machine) -> Answer:
        if headers.get("metadata", "").lower() != "true" or "x-forwarded-for" in headers:
            return Answer(400)
        parts, query = urlsplit(target), parse_qs(urlsplit(target).query)
        if "api-version" not in query:
            return Answer(400)
        match method, parts.path:
            case "GET", "/metadata/instance":
                return Answer(200, json.dumps(_azure_instance(machine)))
            case "GET", "/metadata/identity/oauth2/token" if "resource" in query:
                if len(self.identities) > 1 and query.get("msi_res_id", ["none"])[0] not in self.identities:
                    return Answer(400, "Multiple user assigned identities exist, please specify the clientId")
                token = f"token {next(self._numbers)} for {query['resource'][0]}"
                told = {"access_token": token, "expires_in": "86399", "token_type": "Bearer"}
                told |= {"expires_on": str(int(time.time()) + 86399), "not_before": str(int(time.time()))}
                return Answer(200, json.dumps({**told, "resource": query["resource"][0]}))
            case "GET", "/metadata/scheduledevents":
                self._warm_up()
                return Answer(200, json.dumps(self._events()))
            case "POST", "/metadata/scheduledevents":
                with self._change():
                    self.acknowledged += [each["EventId"] for each in json.loads(body)["StartRequests"]]
                return Answer(200)
        return Answer(404)

    def _warm_up(self) -> None:
        """Until someone has asked, the service is not on."""
        with self.changed:
            if not self._warm:
                self.changed.wait_for(lambda: self._down, self._warming_s)
            self._warm = True

    def _events(self) -> dict[str, Any]:
        """Of all machines of the set, as Azure tells every one of them."""
        events = []
        for machine in self._machines:
            started = event_id(machine) in self.acknowledged
            if machine.taken_at is not None:
                events.append(
                    {
                        "EventId": event_id(machine),
                        "EventType": "Preempt",
                        "ResourceType": "VirtualMachine",
                        "Resources": [machine.id, *machine.taken_with],
                        "EventStatus": "Started" if started else "Scheduled",
                        "NotBefore": "" if started else formatdate(machine.taken_at, usegmt=True),
                        "Description": "Spot capacity is needed elsewhere",
                        "EventSource": "Platform",
                        "DurationInSeconds": -1,
                    }
                )
        return {"DocumentIncarnation": self._incarnation, "Events": events}

    def _named(self, id: str) -> Machine:  # noqa: A002
        return next(m for m in self._machines if id in ("", m.id))

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self.changed:
            yield
            self.changed.notify_all()


@dataclass(frozen=True)
class Answer:
    status: int
    text: str = ""
    etag: str = ""


def event_id(machine: Machine) -> str:
    return f"602d9444-d2cd-49c7-8624-{machine.event:012x}"


def _machine(provider: Provider, name: str, **facts: Any) -> Machine:
    made = Machine(id=name, **{"zone": _ZONE[provider], "type": _TYPE[provider], **facts})
    made.region = made.region or _REGION[provider]
    return made


def _aws_tree(machine: Machine, keys: Callable[[], str]) -> dict[str, Any]:
    spot: dict[str, Any] = {}
    events: dict[str, Any] = {"maintenance": {"history": "[]", "scheduled": "[]"}}
    if machine.taken_at is not None:
        told = {"action": "terminate", "time": _zulu(machine.taken_at)}
        spot = {"spot": {"instance-action": json.dumps(told), "termination-time": told["time"]}}
    if machine.advised_at is not None:
        events["recommendations"] = {"rebalance": json.dumps({"noticeTime": _zulu(machine.advised_at)})}
    data: dict[str, Any] = {
        "ami-id": "ami-1",
        "events": events,
        "hostname": machine.id,
        "iam": {"security-credentials": {"node": keys}},
        "instance-id": machine.id,
        "instance-life-cycle": "spot" if machine.spot else "on-demand",
        "instance-type": machine.type,
        "local-hostname": machine.id,
        "local-ipv4": machine.address,
        "placement": {"availability-zone": machine.zone, "region": machine.region},
        **({"public-ipv4": machine.public_address} if machine.public_address else {}),
        **spot,
        "tags": {"instance": {"aws:autoscaling:groupName": machine.group, **machine.tags}},
    }
    document = {"instanceId": machine.id, "region": machine.region, "availabilityZone": machine.zone}
    return {
        "dynamic": {"instance-identity": {"document": json.dumps(document)}},
        "meta-data": data,
        **({"user-data": machine.user_data} if machine.user_data else {}),
    }


def _gcp_tree(machine: Machine, keys: Keys) -> dict[str, Any]:
    home = "projects/123456789"

    def token() -> str:
        key = keys.give()["AccessKeyId"]
        return json.dumps({"access_token": f"token of {key}", "expires_in": 3599, "token_type": "Bearer"})

    group = {"created-by": f"{home}/zones/{machine.zone}/instanceGroupManagers/{machine.group}"}
    public = {"access-configs": {"0": {"external-ip": machine.public_address, "type": "ONE_TO_ONE_NAT"}}}
    return {
        "instance": {
            "attributes": {
                **(group if machine.group else {}),
                **({"user-data": machine.user_data} if machine.user_data else {}),
                **machine.tags,
            },
            "hostname": f"{machine.id}.c.demo.internal",
            "id": "4520031799277581759",
            "machine-type": f"{home}/machineTypes/{machine.type}",
            "name": machine.id,
            "network-interfaces": {"0": {"ip": machine.address, **(public if machine.public_address else {})}},
            "preempted": "TRUE" if machine.taken_at is not None else "FALSE",
            "scheduling": {"preemptible": "TRUE" if machine.spot else "FALSE"},
            "service-accounts": {"default": {"email": "node@demo.iam.gserviceaccount.com", "token": token}},
            "zone": f"{home}/zones/{machine.zone}",
        },
        "project": {"attributes": {}, "numeric-project-id": "123456789", "project-id": "demo"},
    }


def _azure_instance(machine: Machine) -> dict[str, Any]:
    number = machine.id.rpartition("_")[2]
    address = {"privateIpAddress": machine.address, "publicIpAddress": machine.public_address}
    return {
        "compute": {
            "azEnvironment": "AzurePublicCloud",
            "location": machine.region,
            "name": machine.id,
            "priority": "Spot" if machine.spot else "",
            "resourceGroupName": "gpuctl",
            "resourceId": f"{_SET}{machine.group}/virtualMachines/{number}",
            "subscriptionId": "sub",
            "tagsList": [{"name": name, "value": value} for name, value in machine.tags.items()],
            "userData": machine.user_data,
            "vmId": "5c08b38e-4d57-4c23-ac45-aca61037f084",
            "vmScaleSetName": machine.group,
            "vmSize": machine.type,
            "zone": machine.zone,
        },
        "network": {"interface": [{"ipv4": {"ipAddress": [address]}, "macAddress": "000D3A000001"}]},
    }


def _zulu(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _etag(found: Any) -> str:
    return f"{hash(json.dumps(found, default=lambda _: '')) & 0xFFFFFFFFFFFFFFFF:016x}"


def _camel(found: Any, verbatim: bool = False) -> Any:
    """As Google's ``recursive`` does: names in camel case but for attributes, and a list for numbered entries."""
    if not isinstance(found, dict):
        return json.loads(found()) if callable(found) else found
    if found and all(name.isdigit() for name in found):
        return [_camel(value) for value in found.values()]
    return {
        name if verbatim else re.sub(r"-(\w)", lambda m: m[1].upper(), name): _camel(value, name == "attributes")
        for name, value in found.items()
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, at: tuple[str, int], service: Service) -> None:
        self.service = service
        super().__init__(at, _Exchange)


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None: ...

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate((timestamp or time.time()) + self.server.service.skew_s, usegmt=True)

    def exchange(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.reply(self.server.service.answer(self.command, self.path, headers, body, self.client_address[0]))

    def reply(self, answer: Answer) -> None:
        self.send_response(answer.status)
        if answer.etag:
            self.send_header("ETag", answer.etag)
        if self.server.service.provider == "gcp":
            self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(answer.text.encode())))
        self.end_headers()
        self.wfile.write(answer.text.encode())

    do_GET = do_PUT = do_POST = exchange  # noqa: N815 - the library's names


class _Control(_Exchange):
    """``POST /<order>`` with the order's arguments as JSON."""

    def exchange(self) -> None:
        order = self.path.strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"
        if order == "report":
            self.reply(Answer(200, json.dumps(self.server.service.report())))
        elif order in _ORDERS:
            getattr(self.server.service, order)(**json.loads(body))
            self.reply(Answer(200))
        else:
            self.reply(Answer(404, f"orders are {', '.join(_ORDERS)}, report\n"))

    do_GET = do_POST = exchange  # noqa: N815


def main() -> None:
    """Serve until the end. Prints one line once both ports answer."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.metadata")
    parser.add_argument("--provider", choices=PROVIDERS, required=True)
    parser.add_argument("--address", default="169.254.169.254")
    parser.add_argument("--port", type=int, default=80)
    parser.add_argument("--control-address", default="127.0.0.1")
    parser.add_argument("--control", type=int, default=0, help="port for orders; 0: any")
    chosen = parser.parse_args()
    service = Service(chosen.provider, chosen.address, chosen.port)
    control = _Server((chosen.control_address, chosen.control), service)
    control.RequestHandlerClass = _Control
    with service.running():
        print(json.dumps({"url": service.url, "control": control.server_port}), flush=True)
        control.serve_forever()


if __name__ == "__main__":
    main()
