"""AWS on loopback: a moto server, with what it does not know and what it lets go too early.

moto 5.2 knows no placement groups and no instance connect endpoints, starts machines where there are none, takes sizes
beyond a group's maximum, and deletes what others still stand in. Its instances, NAT gateways and groups go at once; AWS
takes minutes.
"""

from __future__ import annotations

import http.client
import re
import threading
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

import boto3
from botocore.exceptions import ClientError

from tests.stacks.clouds.aws.preflight.test_checks import quota, simulated

Asked = dict[str, str]

_GROUPS_XML = 'xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/"'
_EC2_XML = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
_NO_ROOM = f"""
<DescribeScalingActivitiesResponse {_GROUPS_XML}><DescribeScalingActivitiesResult><Activities><member>
<ActivityId>1</ActivityId><StatusCode>Failed</StatusCode><StatusMessage>We currently do not have sufficient capacity
in the Availability Zone you requested (us-east-1a).</StatusMessage></member></Activities>
</DescribeScalingActivitiesResult></DescribeScalingActivitiesResponse>"""

_ALL_WELL = f"""
<DescribeScalingActivitiesResponse {_GROUPS_XML}><DescribeScalingActivitiesResult><Activities/>
</DescribeScalingActivitiesResult></DescribeScalingActivitiesResponse>"""


class Refused(Exception):
    """``code``, and what AWS says."""

    def __init__(self, code: str, said: str) -> None:
        super().__init__(said)
        self.code = code


@contextmanager
def amazon(endpoint: str, without: list[str], vcpus: list[int], denied: Container[str] = ()) -> Iterator[str]:
    """The moto server at ``endpoint`` as AWS. Zones that are in ``without`` have no machines: AWS agrees to a number
    there, starts none, and says why when it is asked. The last of ``vcpus`` is the account's quota. ``denied``: calls
    that the user's policies do not allow."""
    rules: dict[str, _Rules] = {}
    making = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            scope = re.search(r"Credential=[^/]+/\d+/([\w-]+)/", self.headers.get("Authorization", ""))
            region = scope[1] if scope and scope[1] != "aws-global" else "us-east-1"
            with making:
                if region not in rules:
                    rules[region] = _Rules(endpoint, region, without)
            own = rules[region]
            status, data, headers = self._answered(own, dict(parse_qsl(body.decode(errors="replace")))) or self._theirs(
                body
            )
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)) if self.command != "HEAD" else headers["Content-Length"])
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

        def _answered(self, own: _Rules, asked: Asked) -> tuple[int, bytes, dict[str, str]] | None:
            if self.headers.get("X-Amz-Target", "").endswith(".GetServiceQuota"):
                return 200, str(quota(vcpus[-1])).encode(), {}
            if asked.get("Action") in denied:
                refused = Refused("UnauthorizedOperation", "You are not authorized to perform this operation.")
                return 400, _refusal(asked, refused).encode(), {}
            try:
                answer = own.answer(asked)
            except Refused as refused:
                return 400, _refusal(asked, refused).encode(), {}
            except ClientError:  # such a thing is not there, and moto says so
                return None
            return None if answer is None else (200, answer.encode(), {})

        def _theirs(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=30)
            connection.request(self.command, self.path, body or None, dict(self.headers))
            answer = connection.getresponse()
            found = answer.status, answer.read(), dict(answer.getheaders())
            connection.close()
            return found

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # a scan asks for many things at once

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _refusal(asked: Asked, refused: Refused) -> str:
    error = f"<Error><Type>Sender</Type><Code>{refused.code}</Code><Message>{escape(str(refused))}</Message></Error>"
    if "AutoScaling" in asked.get("Action", "") or asked.get("Action") == "SetDesiredCapacity":
        return f"<ErrorResponse {_GROUPS_XML}>{error}</ErrorResponse>"
    return f"<Response><Errors>{error}</Errors><RequestID>1</RequestID></Response>"


class _Rules:
    """Of one region: what it answers itself (``answer``), and refuses."""

    def __init__(self, endpoint: str, region: str, without: list[str]) -> None:
        self._without = without
        self._ec2 = boto3.client("ec2", region_name=region, endpoint_url=endpoint)
        self._groups = boto3.client("autoscaling", region_name=region, endpoint_url=endpoint)
        self._starved: set[str] = set()
        """Groups that asked for machines where there are none."""
        self._placement: dict[str, Asked] = {}
        """By name: tags."""
        self._endpoints: dict[str, tuple[str, Sequence[str], Asked]] = {}
        """By id: subnet, security groups, tags."""

    def answer(self, asked: Asked) -> str | None:
        """``None``: moto's. Raises ``Refused``."""
        rule: Callable[[Asked], str | None] | None = getattr(self, f"_{asked.get('Action', '')}", None)
        return rule(asked) if rule else None

    # -- machines ------------------------------------------------------------------------------------------------------

    def _SetDesiredCapacity(self, asked: Asked) -> str | None:  # noqa: N802 (AWS's names, here and below)
        group, wanted = self._group(asked["AutoScalingGroupName"]), int(asked["DesiredCapacity"])
        if wanted > group["MaxSize"]:
            most = group["MaxSize"]
            said = f"New SetDesiredCapacity value {wanted} is above max value {most} for the AutoScalingGroup."
            raise Refused("ValidationError", said)
        if set(group["AvailabilityZones"]) <= set(self._without):
            self._starved.add(asked["AutoScalingGroupName"])
            return f"<SetDesiredCapacityResponse {_GROUPS_XML}/>"
        return None

    def _DescribeScalingActivities(self, asked: Asked) -> str:  # noqa: N802
        return _NO_ROOM if asked["AutoScalingGroupName"] in self._starved else _ALL_WELL

    def _SimulatePrincipalPolicy(self, _: Asked) -> str:  # noqa: N802
        return str(simulated())

    def _group(self, name: str) -> dict[str, Any]:
        (found,) = self._groups.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
        return dict(found)

    # -- what moto does not know ---------------------------------------------------------------------------------------

    def _DeleteKeyPair(self, asked: Asked) -> str | None:  # noqa: N802
        """By its id: moto goes by the name alone, and finds every deletion good."""
        for pair in self._ec2.describe_key_pairs()["KeyPairs"]:
            if pair["KeyPairId"] == asked.get("KeyPairId"):
                self._ec2.delete_key_pair(KeyName=pair["KeyName"])
                return f"<DeleteKeyPairResponse {_EC2_XML}><return>true</return></DeleteKeyPairResponse>"
        return None

    def _CreatePlacementGroup(self, asked: Asked) -> str:  # noqa: N802
        name = asked["GroupName"]
        if name in self._placement:
            raise Refused("InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists.")
        self._placement[name] = _tags(asked)
        return _response("CreatePlacementGroup", f"<placementGroup>{_placed(name, {})}</placementGroup>")

    def _DescribePlacementGroups(self, asked: Asked) -> str:  # noqa: N802
        wanted = _listed(asked, "GroupName")
        if unknown := [name for name in wanted if name not in self._placement]:
            raise Refused("InvalidPlacementGroup.Unknown", f"The Placement Group '{unknown[0]}' is unknown.")
        found = {name: tags for name, tags in self._placement.items() if not wanted or name in wanted}
        items = "".join(f"<item>{_placed(name, tags)}</item>" for name, tags in found.items() if _fits(asked, tags))
        return _response("DescribePlacementGroups", f"<placementGroupSet>{items}</placementGroupSet>")

    def _DeletePlacementGroup(self, asked: Asked) -> str:  # noqa: N802
        name = asked["GroupName"]
        if name not in self._placement:
            raise Refused("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
        groups = self._groups.describe_auto_scaling_groups()["AutoScalingGroups"]
        if any(group["Instances"] for group in groups if group.get("PlacementGroup") == name):
            raise Refused("InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use.")
        del self._placement[name]
        return _response("DeletePlacementGroup", "<return>true</return>")

    def _CreateInstanceConnectEndpoint(self, asked: Asked) -> str:  # noqa: N802
        subnet = asked["SubnetId"]
        self._ec2.describe_subnets(SubnetIds=[subnet])
        id_ = f"eice-{uuid.uuid4().hex[:17]}"
        self._endpoints[id_] = subnet, _listed(asked, "SecurityGroupId"), _tags(asked)
        made = f"<instanceConnectEndpoint>{self._connects(id_)}</instanceConnectEndpoint>"
        return _response("CreateInstanceConnectEndpoint", made)

    def _DescribeInstanceConnectEndpoints(self, asked: Asked) -> str:  # noqa: N802
        wanted = _listed(asked, "InstanceConnectEndpointId")
        found = [id_ for id_ in self._endpoints if not wanted or id_ in wanted]
        items = [f"<item>{self._connects(id_)}</item>" for id_ in found if _fits(asked, self._endpoints[id_][2])]
        endpoints = f"<instanceConnectEndpointSet>{''.join(items)}</instanceConnectEndpointSet>"
        return _response("DescribeInstanceConnectEndpoints", endpoints)

    def _DeleteInstanceConnectEndpoint(self, asked: Asked) -> str:  # noqa: N802
        id_ = asked["InstanceConnectEndpointId"]
        if id_ not in self._endpoints:
            raise Refused("InvalidInstanceConnectEndpointId.NotFound", f"The endpoint '{id_}' does not exist")
        told = self._connects(id_)
        del self._endpoints[id_]
        return _response("DeleteInstanceConnectEndpoint", f"<instanceConnectEndpoint>{told}</instanceConnectEndpoint>")

    def _connects(self, id_: str) -> str:
        subnet, _, tags = self._endpoints[id_]
        about = f"<instanceConnectEndpointId>{id_}</instanceConnectEndpointId><subnetId>{subnet}</subnetId>"
        return f"{about}<state>create-complete</state>{_tag_set(tags)}"

    # -- what moto lets go too early, or not at all --------------------------------------------------------------------

    def _DeleteVpc(self, asked: Asked) -> None:  # noqa: N802
        vpc = asked["VpcId"]
        within = [{"Name": "vpc-id", "Values": [vpc]}]
        attached = [{"Name": "attachment.vpc-id", "Values": [vpc]}]
        groups = self._ec2.describe_security_groups(Filters=within)["SecurityGroups"]
        endpoints = self._ec2.describe_vpc_endpoints(Filters=within)["VpcEndpoints"]
        if (
            any(group["GroupName"] != "default" for group in groups)
            or any(one["State"].lower() != "deleted" for one in endpoints)
            or self._ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]
        ):
            raise Refused("DependencyViolation", f"The vpc '{vpc}' has dependencies and cannot be deleted.")

    def _DeleteSubnet(self, asked: Asked) -> None:  # noqa: N802
        subnet = asked["SubnetId"]
        within = [{"Name": "subnet-id", "Values": [subnet]}]
        nats = self._ec2.describe_nat_gateways(Filters=within)["NatGateways"]
        found = [one for r in self._ec2.describe_instances(Filters=within)["Reservations"] for one in r["Instances"]]
        if (
            any(one["State"]["Name"] != "terminated" for one in found)
            or any(nat["State"] != "deleted" and nat["SubnetId"] == subnet for nat in nats)
            or any(subnet == used for used, _, _ in self._endpoints.values())
        ):
            raise Refused("DependencyViolation", f"The subnet '{subnet}' has dependencies and cannot be deleted.")

    def _DeleteSecurityGroup(self, asked: Asked) -> None:  # noqa: N802
        group = asked["GroupId"]
        rules = self._ec2.describe_security_group_rules()["SecurityGroupRules"]
        named = [one for one in rules if one.get("ReferencedGroupInfo", {}).get("GroupId") == group]
        used = any(group in groups for _, groups, _ in self._endpoints.values())
        if used or any(one["GroupId"] != group for one in named):
            raise Refused("DependencyViolation", f"resource {group} has a dependent object")

    def _DetachInternetGateway(self, asked: Asked) -> None:  # noqa: N802
        within = [{"Name": "vpc-id", "Values": [asked["VpcId"]]}]
        nats = self._ec2.describe_nat_gateways(Filters=within)["NatGateways"]
        if any(nat["State"] != "deleted" and nat["VpcId"] == asked["VpcId"] for nat in nats):
            said = f"Network {asked['VpcId']} has some mapped public address(es)."
            raise Refused("DependencyViolation", said)

    def _ReleaseAddress(self, asked: Asked) -> None:  # noqa: N802
        id_ = asked["AllocationId"]
        nats = self._ec2.describe_nat_gateways()["NatGateways"]
        used = [one.get("AllocationId") for n in nats if n["State"] != "deleted" for one in n["NatGatewayAddresses"]]
        if id_ in used:
            raise Refused("AuthFailure", "You do not have permission to access the specified resource.")
        # moto keeps the association of a gateway that is gone, and then refuses
        for address in self._ec2.describe_addresses(AllocationIds=[id_])["Addresses"]:
            if association := address.get("AssociationId"):
                with suppress(ClientError):
                    self._ec2.disassociate_address(AssociationId=association)

    def _DeleteVpcEndpoints(self, asked: Asked) -> None:  # noqa: N802
        """moto breaks on one whose routes are there."""
        for id_ in _listed(asked, "VpcEndpointId"):
            for one in self._ec2.describe_vpc_endpoints(VpcEndpointIds=[id_])["VpcEndpoints"]:
                self._ec2.modify_vpc_endpoint(VpcEndpointId=id_, RemoveRouteTableIds=one["RouteTableIds"])


def _listed(asked: Asked, key: str) -> list[str]:
    return [value for name, value in asked.items() if re.fullmatch(rf"{key}\.\d+", name)]


def _tags(asked: Asked) -> Asked:
    pairs = re.compile(r"TagSpecification\.1\.Tag\.(\d+)\.Key")
    return {
        value: asked[f"TagSpecification.1.Tag.{found[1]}.Value"]
        for name, value in asked.items()
        if (found := pairs.fullmatch(name))
    }


def _fits(asked: Asked, tags: Asked) -> bool:
    """The filters by tag, such as ``tag:gpuctl:cluster`` and ``tag-key``."""
    for name, what in asked.items():
        if found := re.fullmatch(r"Filter\.(\d+)\.Name", name):
            values = _listed(asked, rf"Filter\.{found[1]}\.Value")
            if what == "tag-key" and not tags.keys() & set(values):
                return False
            if what.startswith("tag:") and tags.get(what.removeprefix("tag:")) not in values:
                return False
    return True


def _placed(name: str, tags: Asked) -> str:
    about = f"<groupName>{name}</groupName><groupId>pg-{name}</groupId><state>available</state>"
    return f"{about}<strategy>cluster</strategy>{_tag_set(tags)}"


def _tag_set(tags: Asked) -> str:
    items = "".join(f"<item><key>{key}</key><value>{escape(value)}</value></item>" for key, value in tags.items())
    return f"<tagSet>{items}</tagSet>"


def _response(operation: str, inner: str) -> str:
    return f"<{operation}Response {_EC2_XML}><requestId>1</requestId>{inner}</{operation}Response>"
