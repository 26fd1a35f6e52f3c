"""``leaks`` on Google Cloud: every piece of a mess in a project on loopback is found, and nothing of a stranger's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.catalog.instance_types import Price, catalog, keep_spot_prices
from gpuctl.stacks.clouds.answers import CredentialsRefused, Leftover
from gpuctl.stacks.clouds.gcp.cleanup.leak_kinds import KINDS
from gpuctl.stacks.clouds.gcp.cleanup.leaks import scan
from gpuctl.stacks.clouds.gcp.client import GcpAccount, entering
from gpuctl.stacks.clouds.gcp.error_mapping import NotFound
from gpuctl.stacks.clouds.gcp.ownership import NAMED, ROLE, ROLE_ID, SERVICE_ACCOUNT, TAG_KEY
from tests.fakes.gcp.api import COMPUTE, EMAIL, PROJECT, URL, Google, matches, refusal, typed_refusal
from tests.fakes.gcp.buckets import Buckets
from tests.fakes.requests import Planned, asked, planned

pytestmark = pytest.mark.usefixtures("project")

ZONE, REGION = "us-central1-a", "us-central1"
MACHINE = "a2-highgpu-8g"
REMOVES = (
    "gpuctl down --cluster NAME; if it was made elsewhere: gpuctl down --by-tag NAME --provider gcp --region REGION"
)
IAM_POLICY = f"POST /v1/projects/{PROJECT}:getIamPolicy"


def labels(cluster: str) -> dict[str, str]:
    return {"gpuctl-cluster": cluster, "gpuctl-version": "0_1_0"}


def instance(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "status": "RUNNING",
        "machineType": f"{URL}/zones/{ZONE}/machineTypes/{MACHINE}",
        "scheduling": {"provisioningModel": "SPOT", "preemptible": True},
        "guestAccelerators": [{"acceleratorType": f"{URL}/zones/{ZONE}/acceleratorTypes/x", "acceleratorCount": 8}],
        **more,
    }


def disk(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sizeGb": "200", "type": f"{URL}/zones/{ZONE}/diskTypes/pd-balanced", **more}


class Mess:
    """One of each kind, of each of several clusters, and as many of a stranger's."""

    def __init__(self, project: Google, *clusters: str, region: str = REGION) -> None:
        self.made: dict[str, set[tuple[str, str]]] = {cluster: set() for cluster in clusters}
        self._project = project
        self._region, self._zone = f"regions/{region}", f"zones/{region}-a"
        self._machines(clusters)
        self._network(clusters)
        self._identity(clusters)

    def _put(self, kind: str, collection: str, place: str, things: dict[str, dict[str, Any]]) -> None:
        """``things`` by their cluster; what is of none is a stranger's. Half of them are on the second page."""
        for owner, thing in things.items():
            if owner in self.made:
                self.made[owner].add((kind, thing["name"]))
        some = list(things.values())
        half = len(some) // 2
        if place:
            self._project.put_everywhere(collection, {place: some[:half]}, {place: some[half:]})
        else:
            self._project.put(f"global/{collection}", [{"items": some[:half]}, {"items": some[half:]}])

    def _machines(self, clusters: tuple[str, ...]) -> None:
        self._put(
            "instance",
            "instances",
            self._zone,
            {one: instance(f"gpuctl-{one}-x1z9", labels=labels(one)) for one in clusters}
            | {"stranger": instance("gpuctl-web"), "other": instance("web", labels={"owner": "us"})},
        )
        self._put(
            "disk",
            "disks",
            self._zone,
            {one: disk(f"gpuctl-{one}-x1z9", labels=labels(one)) for one in clusters} | {"stranger": disk("data")},
        )
        self._put(
            "instance template",
            "instanceTemplates",
            "global",
            {one: {"name": f"gpuctl-{one}-2026", "properties": {"labels": labels(one)}} for one in clusters}
            | {"stranger": {"name": "gpuctl-web", "properties": {}}},
        )
        self._put(
            "instance group",
            "instanceGroupManagers",
            self._zone,
            {one: {"name": f"gpuctl-{one}", "targetSize": 4} for one in clusters} | {"stranger": {"name": "web"}},
        )
        self._put(
            "placement policy",
            "resourcePolicies",
            self._region,
            {one: {"name": f"gpuctl-{one}"} for one in clusters} | {"stranger": {"name": "nightly"}},
        )

    def _network(self, clusters: tuple[str, ...]) -> None:
        def at(cluster: str, name: str, **more: Any) -> dict[str, Any]:
            return {"name": name, "network": f"{URL}/global/networks/{cluster}", **more}

        elsewhere = {"stranger": at("default", "web")}
        self._put("network", "networks", "", {one: {"name": f"gpuctl-{one}"} for one in clusters} | elsewhere)
        for kind, collection, place in (
            ("firewall rule", "firewalls", ""),
            ("subnet", "subnetworks", self._region),
            ("router", "routers", self._region),
        ):
            inside = {one: at(f"gpuctl-{one}", f"made-by-hand-in-{one}") for one in clusters}
            self._put(kind, collection, place, inside | elsewhere)
        for kind, collection in (("address", "addresses"), ("forwarding rule", "forwardingRules")):
            labelled = {one: {"name": f"ip-{one}", "labels": labels(one)} for one in clusters}
            self._put(kind, collection, self._region, labelled | elsewhere)

    def _identity(self, clusters: tuple[str, ...]) -> None:
        google, made = self._project, self.made
        accounts, roles, bindings, keys = [], [], [], []
        for number, one in enumerate(clusters):
            email, underscored = f"gpuctl-{one}@{PROJECT}.iam.gserviceaccount.com", one.replace("-", "_")
            role, key = f"projects/{PROJECT}/roles/gpuctl_{underscored}", f"tagKeys/{number}"
            accounts.append({"email": email, "displayName": f"nodes of the gpuctl cluster {one}"})
            roles.append({"name": role, "title": f"leave the group of the gpuctl cluster {one}"})
            member = f"deleted:serviceAccount:{email}?uid=1"
            bindings.append({"role": role, "members": [member], "condition": {"title": "own group"}})
            described = f"marks what belongs to the gpuctl cluster {one}"
            keys.append({"name": key, "description": described, "namespacedName": f"{PROJECT}/gpuctl-{one}"})
            made[one] |= {
                ("service account", email),
                ("role", role),
                ("role binding", f"gpuctl_{underscored} of {member}"),
                ("tag key", key),
                ("tag value", f"tagValues/{one}"),
            }
        values = [{"tagValues": [{"name": f"tagValues/{one}"}]} for one in clusters]
        google.answers["GET /v3/tagValues"] = {f"tagKeys/{number}": value for number, value in enumerate(values)}
        mine = {"email": EMAIL, "displayName": "me"}
        gone = {"name": "roles/x", "title": "leave the group of the gpuctl cluster gone", "deleted": True}
        google.put(f"/v1/projects/{PROJECT}/serviceAccounts", [{"accounts": [mine]}, {"accounts": accounts}])
        google.put(f"/v1/projects/{PROJECT}/roles", [{"roles": [gone]}, {"roles": roles}])
        google.put(IAM_POLICY, {"bindings": [{"role": "roles/owner", "members": ["user:me@example.com"]}, *bindings]})
        google.put("/v3/tagKeys", [{"tagKeys": [{"name": "tagKeys/x", "description": "costs"}]}, {"tagKeys": keys}])


def pieces(found: tuple[Leftover, ...]) -> set[tuple[str, str]]:
    return {(one.kind, one.id) for one in found}


@pytest.mark.slow
def test_every_piece_of_a_mess_is_found_and_nothing_of_a_strangers(project: Google) -> None:
    mess = Mess(project, "demo", "my-next-2")
    seen = scan(["all"])
    assert seen.unseen == ()
    assert seen.regions == ("europe-west4", "us-central1")
    assert pieces(seen.found) == mess.made["demo"] | mess.made["my-next-2"]
    assert len(mess.made["demo"]) == len(KINDS) + 5
    (policy,) = project.requests(":getIamPolicy")
    assert policy.body == {"options": {"requestedPolicyVersion": 3}}


def test_one_cluster_is_looked_for_alone(project: Google) -> None:
    """Google is asked for its machines only: others may have thousands."""
    mess = Mess(project, "demo", "demo-2")
    assert pieces(scan([], "demo").found) == mess.made["demo"]
    (asked_,) = {one.query["filter"] for one in project.requests("/aggregated/instances")}
    assert asked_ == "labels.gpuctl-cluster=demo"


def test_of_a_region_that_is_named_and_of_none_is_all_that_is_looked_at(
    project: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mess(project, "demo", region="europe-west4")
    everywhere = scan([]).found
    assert {one.region for one in everywhere} == {"", "europe-west4"}
    here = scan([REGION])
    assert here.regions == (REGION,)
    assert pieces(here.found) == {(one.kind, one.id) for one in everywhere if not one.region}
    assert {kind for kind, _ in pieces(here.found)} >= {"network", "service account", "instance template"}
    monkeypatch.setenv("CLOUDSDK_COMPUTE_REGION", "europe-west4")
    assert scan([]).regions == ("europe-west4",)


def test_what_costs_something_is_told_its_price_and_comes_first(project: Google) -> None:
    nat = {"name": "r", "network": f"{URL}/global/networks/gpuctl-demo", "nats": [{"name": "out"}]}
    of = labels("demo")
    hung_on = {"acceleratorType": f"{URL}/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": 1}
    general = instance(
        "t4", labels=of, machineType=f"{URL}/machineTypes/n1-standard-8", guestAccelerators=[hung_on], scheduling={}
    )
    project.put_everywhere(
        "instances",
        {f"zones/{ZONE}": [instance("a", labels=of), instance("off", labels=of, status="TERMINATED"), general]},
    )
    hyperdisk = disk("h", labels=of, type=f"{URL}/diskTypes/hyperdisk-balanced", users=["x"])
    project.put_everywhere("disks", {f"zones/{ZONE}": [disk("d", labels=of), hyperdisk]})
    addresses = [
        {"name": "idle", "labels": of, "address": "203.0.113.9"},
        {"name": "used", "labels": of, "users": ["x"]},
    ]
    inside = {"name": "inside", "network": f"{URL}/global/networks/gpuctl-demo", "addressType": "INTERNAL"}
    project.put_everywhere("addresses", {f"regions/{REGION}": [*addresses, inside]})
    project.put_everywhere("routers", {f"regions/{REGION}": [nat]})
    found = scan([REGION], "demo").found
    usd = [(one.id, one.usd_per_hour and round(one.usd_per_hour, 4)) for one in found]
    assert usd[:3] == [("h", None), ("t4", None), ("r", None)]  # not known
    assert usd[3:] == [
        ("a", 15.4242),
        ("d", 0.0274),
        ("idle", 0.01),
        ("used", 0.005),
        ("inside", 0.0),
        ("off", 0.0),
    ]
    about = {one.id: one.about for one in found}
    assert about["a"] == f"{MACHINE}, running, spot, {ZONE}"
    assert about["d"] == f"200 GB pd-balanced, used by none, {ZONE}"
    assert about["h"] == f"200 GB hyperdisk-balanced, {ZONE}"
    assert about["r"] == "NAT out"


def test_a_general_machine_costs_what_it_does_with_the_gpus_that_hang_on_it(
    project: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def general(name: str, gpu: str, spot: str = "SPOT") -> dict[str, Any]:
        return instance(
            name,
            labels=labels("demo"),
            machineType=f"{URL}/machineTypes/n1-standard-8",
            scheduling={"provisioningModel": spot},
            guestAccelerators=[{"acceleratorType": f"{URL}/acceleratorTypes/{gpu}", "acceleratorCount": 1}],
        )

    machines = [general("t4", "nvidia-tesla-t4"), general("v100", "nvidia-tesla-v100")]
    machines += [general("p4", "nvidia-tesla-p4"), general("dear", "nvidia-tesla-t4", "STANDARD")]
    project.put_everywhere("instances", {f"zones/{ZONE}": machines})
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    spot = {"n1-standard-8+t4x1": 0.2, "n1-standard-8+v100x1": 0.9}
    keep_spot_prices([Price(type=name, region=REGION, spot=usd) for name, usd in spot.items()], "2026-11-21")
    try:
        found = {one.id: one.usd_per_hour for one in scan([]).found}
    finally:
        catalog.cache_clear()
    assert found == {"t4": 0.2, "v100": 0.9, "p4": None, "dear": None}


def test_what_may_not_be_looked_at_is_said_and_all_else_is_found(project: Google) -> None:
    mess = Mess(project, "demo")
    message = f"Required 'compute.disks.list' permission for 'projects/{PROJECT}'"
    project.put("aggregated/disks", refusal(403, message))
    off = "IAM API has not been used in project 1 before or it is disabled."
    disabled = typed_refusal(403, off, "SERVICE_DISABLED", service="iam.googleapis.com")
    project.put(f"/v1/projects/{PROJECT}/roles", disabled)
    seen = scan([], "demo")
    assert seen.unseen == (f"disks: these Google Cloud credentials may not do this: {message}", f"roles: {off}")
    assert pieces(seen.found) == {piece for piece in mess.made["demo"] if piece[0] not in ("disk", "role")}


def test_a_zone_that_does_not_answer_is_said_and_what_the_others_told_is_found(project: Google) -> None:
    warning = {"warning": {"code": "UNREACHABLE", "message": "down"}}
    there = {"instances": [instance("a", labels=labels("demo"))]}
    page = {"items": {f"zones/{ZONE}": there, "zones/us-central1-b": warning}, "unreachables": ["zones/us-central1-c"]}
    project.put("aggregated/instances", page)
    seen = scan([], "demo")
    assert pieces(seen.found) == {("instance", "a")}
    assert seen.unseen == ("instances: no answer from us-central1-c, us-central1-b",)


@pytest.mark.slow
def test_all_that_the_program_makes_is_looked_for() -> None:
    """But for the bucket: that is kept."""
    words = {
        "Account": "service account",
        "Bucket IAMMember": "bucket binding",
        "Firewall": "firewall rule",
        "IAMCustom Role": "role",
        "IAMMember": "role binding",
        "Instance Group Manager": "instance group",
        "Resource Policy": "placement policy",
        "Subnetwork": "subnet",
    }
    resources = [one for one in planned(asked("gcp")).resources if one.type.startswith("gcp:")]
    made = {one.type.rpartition(":")[2] for one in resources if not one.type.endswith(":Bucket")}
    kinds = {re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) for name in made}
    looked_for = {kind.what for kind in KINDS} | {"service account", "role", "role binding", "tag key", "tag value"}
    looked_for.add("bucket binding")
    assert {kind for kind in kinds if words.get(kind, kind.lower()) not in looked_for} == set()
    assert "Instance Template" in kinds


def test_who_may_use_a_bucket_of_ours_is_found(project: Google) -> None:
    buckets = Buckets(project)
    mine, given = buckets.add("gpuctl-demo-1", labels=labels("demo")), buckets.add("theirs")
    for bucket in (mine, given):
        bucket.bind("roles/storage.objectUser", f"deleted:serviceAccount:gpuctl-demo@{PROJECT}.iam?uid=1")
        bucket.bind("roles/storage.admin", "user:me@example.com")
        bucket.bind("roles/storage.objectUser", f"serviceAccount:gpuctl-next@{PROJECT}.iam")
    (found,) = scan([], "demo").found
    assert (found.kind, found.about) == ("bucket binding", "gpuctl-demo-1")
    assert found.id == f"storage.objectUser of deleted:serviceAccount:gpuctl-demo@{PROJECT}.iam?uid=1"
    assert scan([], "next").found == ()


def test_who_may_use_a_bucket_that_is_older_than_the_cluster_is_the_clusters(project: Google) -> None:
    """As after ``down`` and another ``up``: the bucket was kept, the identity is a new one."""
    email = f"gpuctl-demo@{PROJECT}.iam.gserviceaccount.com"
    words = "nodes of the gpuctl cluster demo (id 2222222222)"
    project.put(f"/v1/projects/{PROJECT}/serviceAccounts", {"accounts": [{"email": email, "displayName": words}]})
    bucket = Buckets(project).add("gpuctl-demo-1", labels={**labels("demo"), "gpuctl-id": "1111111111"})
    bucket.bind("roles/storage.objectUser", f"serviceAccount:{email}")
    bucket.bind("roles/storage.objectUser", f"deleted:serviceAccount:{email}?uid=1")
    found = {one.id: one.cluster_id for one in scan([], "demo").found if one.kind == "bucket binding"}
    assert found == {
        f"storage.objectUser of serviceAccount:{email}": "2222222222",
        f"storage.objectUser of deleted:serviceAccount:{email}?uid=1": "1111111111",
    }


def test_a_long_clusters_account_is_known_by_its_buckets_mark(project: Google) -> None:
    planned = Planned(asked("gcp", cluster="a-cluster-of-thirty-characters"))
    account = planned.one("serviceaccount/account:Account")["accountId"]
    bucket = planned.one("storage/bucket:Bucket")
    made = Buckets(project).add(bucket["name"], labels=bucket["labels"])
    made.bind("roles/storage.objectUser", f"serviceAccount:{account}@{PROJECT}.iam.gserviceaccount.com")
    assert [one.kind for one in scan([]).found] == ["bucket binding"]


def test_what_tells_whose_it_is_is_read(project: Google) -> None:
    own = {**labels("demo"), "gpuctl-id": "0a1b2c3d4e", "gpuctl-owner": "me", "gpuctl-created": "2026-11-21"}
    project.put_everywhere("instances", {f"zones/{ZONE}": [instance("a", labels=own)]})
    words = "network of the gpuctl cluster demo (id 0a1b2c3d4e, owner me, created 2026-11-21)"
    other = "network of the gpuctl cluster next (id 9999999999)"
    networks = [{"name": "gpuctl-demo", "description": words}, {"name": "gpuctl-other", "description": other}]
    project.put("global/networks", {"items": [*networks, {"name": "gpuctl-old", "description": "gpuctl cluster old"}]})
    found = {one.id: one for one in scan([]).found}
    for one in (found["a"], found["gpuctl-demo"]):
        assert (one.cluster, one.cluster_id, one.owner, one.created) == ("demo", "0a1b2c3d4e", "me", "2026-11-21")
    assert found["a"].ref == f"projects/{PROJECT}/zones/{ZONE}/instances/a"
    assert found["gpuctl-demo"].ref == f"projects/{PROJECT}/global/networks/gpuctl-demo"
    assert (found["gpuctl-other"].cluster, found["gpuctl-other"].cluster_id) == ("other", "")
    assert found["gpuctl-old"].cluster == "old"


def test_names_and_words_that_the_program_gives_are_those_that_are_looked_for() -> None:
    long = "a-cluster-of-thirty-characters"
    of = Planned(asked("gcp", cluster=long))
    named = ("compute/network:Network", "compute/resourcePolicy:ResourcePolicy")
    for kind in (*named, "compute/instanceGroupManager:InstanceGroupManager"):
        assert matches(NAMED, of.one(kind)["name"]) == long
    assert matches(SERVICE_ACCOUNT, of.one("serviceaccount/account:Account")["displayName"]) == long
    assert matches(TAG_KEY, of.one("tags/tagKey:TagKey")["description"]) == long
    role = of.one("projects/iAMCustomRole:IAMCustomRole")
    assert matches(ROLE, role["title"]) == long
    assert matches(ROLE_ID, f"projects/p/roles/{role['roleId']}").replace("_", "-") == long
    for where in (of.one("compute/instanceTemplate:InstanceTemplate"), of.one("storage/bucket:Bucket")):
        assert where["labels"]["gpuctl-cluster"] == long


def test_a_region_that_is_none_is_named_since_nothing_would_be_found_there() -> None:
    with pytest.raises(
        BadInput, match="unknown region 'us-centrall1' of Google Cloud; use all, or some of: europe-west4, "
    ):
        scan(["us-centrall1"])


def test_credentials_that_have_expired_are_one_line(project: Google) -> None:
    revoked = {"error": "invalid_grant", "error_description": "Token has been expired or revoked."}
    project.answers["POST /token"] = (400, revoked)
    with pytest.raises(CredentialsRefused, match="the Google Cloud credentials have expired, or were revoked; log in"):
        scan([])
    bad = {"error": "invalid_grant", "error_description": "Invalid JWT Signature."}
    project.answers["POST /token"] = (400, bad)
    with pytest.raises(CredentialsRefused, match=r"Google rejects these credentials: .*Invalid JWT Signature"):
        scan([])


def test_credentials_that_compute_engine_refuses_are_one_line(project: Google) -> None:
    project.put("regions", refusal(401, "Request had invalid authentication credentials.", "authError"))
    with pytest.raises(CredentialsRefused, match="rejects these credentials, or they have expired; log in"):
        scan([])


@pytest.mark.parametrize(
    "answer",
    [
        refusal(404, "The resource 'projects/nope' was not found", "notFound"),
        typed_refusal(403, "Permission denied on resource project nope.", "CONSUMER_INVALID", consumer="projects/nope"),
    ],
)
def test_a_project_that_nobody_knows_is_one_line(
    project: Google, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, Any]
) -> None:
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "nope")
    project.put(f"{COMPUTE.replace(PROJECT, 'nope')}/regions", answer)
    with pytest.raises(NotFound, match=r"there is no such Google Cloud project, or it is not yours: .*nope"):
        scan([])


def test_an_api_that_is_not_enabled_is_told_with_the_page(project: Google) -> None:
    said = "Compute Engine API has not been used in project 1 before or it is disabled."
    project.put("regions", refusal(403, said, "accessNotConfigured"))
    with pytest.raises(GpuctlError, match=r"disabled.; enable it at https://.*/apis/library/compute.googleapis.com"):
        scan([])


def test_a_server_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", "http://127.0.0.1:9/compute/v1/")
    with pytest.raises(GpuctlError, match=r"Google Cloud does not respond: .*check the network"):
        scan([])


def test_a_page_for_people_in_place_of_an_answer_is_one_line(project: Google) -> None:
    project.put("/v3/tagKeys", "a proxy's page")
    assert scan([]).unseen == ("tags: the response is not from Google's API",)


def leaks(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "leaks", "--provider", "gcp", *args],
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.slow
def test_the_verb_lists_what_is_there_and_fails(project: Google) -> None:
    mess = Mess(project, "demo")
    done = leaks("-c", "demo")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["CLUSTER", "KIND", "ID", "ABOUT", "REGION", "$/H"]
    assert lines[1].split()[:3] == ["demo", "instance", "gpuctl-demo-x1z9"]
    assert len(lines) == 1 + len(mess.made["demo"])
    looked = "looked in gcp: us-central1 (the default)\n"
    things = f"error: {len(mess.made['demo'])} things there, $15.49/h; {REMOVES}\n"
    assert (done.returncode, done.stderr) == (1, looked + things)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "regions", "why"),
    [((), ["us-central1"], "the default"), (("--all-regions",), ["europe-west4", "us-central1"], "all regions")],
)
def test_the_verb_says_that_nothing_is_there(args: tuple[str, ...], regions: list[str], why: str) -> None:
    done = leaks("-o", "json", *args)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["found"], told["unseen"], told["regions"]) == ([], [], regions)
    assert told["looked_in"] == [{"provider": "gcp", "region": region, "why": why} for region in regions]


LOG_IN = "log in (gcloud auth application-default login), or set GOOGLE_APPLICATION_CREDENTIALS"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "no Google Cloud credentials found"),
        ("/nowhere.json", "the Google Cloud credentials cannot be read: File /nowhere.json was not found."),
    ],
)
def test_no_credentials_are_one_line(monkeypatch: pytest.MonkeyPatch, path: str, said: str) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
    done = leaks()
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}; {LOG_IN}\n")


def test_no_project_is_one_line() -> None:
    path = Path(os.environ["GOOGLE_APPLICATION_CREDENTIALS"])
    told = json.loads(path.read_text())
    del told["project_id"]
    path.write_text(json.dumps(told))
    with pytest.raises(BadInput, match="no Google Cloud project is set; set GOOGLE_CLOUD_PROJECT"):
        scan([])


def test_the_project_of_the_environment_goes_before_the_credentials_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entering().project == PROJECT
    monkeypatch.setenv("CLOUDSDK_CORE_PROJECT", "mine")
    assert entering().project == "mine"
    monkeypatch.setenv("GOOGLE_PROJECT", "of-pulumi")
    assert entering().project == "of-pulumi"
    assert entering("named").project == "named"


def test_what_a_person_asks_counts_against_the_project(project: Google) -> None:
    """Else Google says that the API is not enabled, in a project of its own."""
    credentials: Any = import_module("google.oauth2.credentials").Credentials
    GcpAccount(credentials(token="t"), PROJECT).ask("iam", f"v1/projects/{PROJECT}/roles")
    GcpAccount(credentials(token="t", quota_project_id="paying"), PROJECT).ask("iam", f"v1/projects/{PROJECT}/roles")
    entering().ask("iam", f"v1/projects/{PROJECT}/roles")
    paid = [one.headers.get("x-goog-user-project", "") for one in project.requests("/roles")]
    assert paid == [PROJECT, "paying", ""]


def test_a_client_that_is_too_old_is_one_line() -> None:
    with pytest.raises(
        GpuctlError, match=r"the installed google-cloud-compute has no Instances.teleport; pip install --upgrade"
    ):
        entering().compute("Instances", "teleport")
    with pytest.raises(GpuctlError, match=r"the installed google-cloud-compute has no Starships.list; "):
        entering().compute("Starships", "list")


def test_packages_that_are_missing_are_one_line() -> None:
    code = (
        "import sys; sys.modules['google.cloud.compute_v1'] = None\n"
        "sys.argv = ['gpuctl', 'leaks', '--provider', 'gcp']\n"
        "from gpuctl.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    said = "error: gcp needs google.cloud.compute_v1, which is not installed; pip install 'gpuctl-spot[gcp]'\n"
    assert (done.returncode, done.stderr) == (2, said)
