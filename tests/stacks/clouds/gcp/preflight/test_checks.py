"""``check`` on Google Cloud, with a project on loopback that answers as Google does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds.answers import PreflightCheck
from gpuctl.stacks.clouds.gcp.preflight.checks import checks, quotas
from tests.fakes.gcp.api import EMAIL, PROJECT, URL, Google, refusal, typed_refusal
from tests.fakes.gcp.buckets import Buckets
from tests.fakes.requests import asked

REGION, ZONE = "us-central1", "us-central1-a"
RIGHTS = f"POST /v1/projects/{PROJECT}:testIamPermissions"
QUOTA_PAGE = f"https://console.cloud.google.com/iam-admin/quotas?project={PROJECT}"
SPOT_A100 = "PREEMPTIBLE_NVIDIA_A100_GPUS"


def limits(**limits: float | tuple[float, float]) -> list[dict[str, Any]]:
    """Limits, or limits with what is used of them."""
    pairs = {name: value if isinstance(value, tuple) else (value, 0.0) for name, value in limits.items()}
    return [{"metric": name, "limit": limit, "usage": usage} for name, (limit, usage) in pairs.items()]


def grant(project: Google, *, everywhere: float | None = 32, **regional: float | tuple[float, float]) -> None:
    whole = {} if everywhere is None else {"GPUS_ALL_REGIONS": everywhere}
    project.put(f"/compute/v1/projects/{PROJECT}", {"name": PROJECT, "quotas": limits(**whole)})
    zones = [f"{URL}/zones/{REGION}-{letter}" for letter in "ab"]
    project.put(f"regions/{REGION}", {"name": REGION, "status": "UP", "zones": zones, "quotas": limits(**regional)})


@pytest.fixture(autouse=True)
def generous(project: Google) -> Google:
    """Enough for four a2-highgpu-8g: 32 GPUs and 384 vCPUs, in two zones."""
    grant(project, A2_CPUS=384, SSD_TOTAL_GB=800, IN_USE_ADDRESSES=4, **{SPOT_A100: 32})
    sold = {"name": "a2-highgpu-8g"}
    project.put_everywhere("machineTypes", {f"zones/{ZONE}": [sold], "zones/europe-west4-a": [sold]})
    project.put_everywhere("acceleratorTypes", {})
    project.put(RIGHTS, _all_that_are_asked_for)
    return project


def _all_that_are_asked_for(body: Any) -> Any:
    return body


def checked(**changes: Any) -> dict[str, PreflightCheck]:
    """Of four a2-highgpu-8g as spot in us-central1-a."""
    request = asked("gcp", **changes)
    return {one.name: one for one in checks(request, catalog().type(request.type))}


@pytest.mark.slow
def test_all_is_well_where_the_cloud_says_so(generous: Google) -> None:
    found = checked()
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(
        ("credentials", "project", "services", "region", "machines", "permissions", "quota"), "ok"
    )
    assert found["credentials"].message == EMAIL
    said = f"{SPOT_A100} in us-central1: 32, 0 in use, 32 more needed, and 4 others are enough"
    assert found["quota"].message == said
    assert {one.query.get("filter") for one in generous.requests("/machineTypes")} == {"name=a2-highgpu-8g"}


@pytest.mark.parametrize(
    ("granted", "said"),
    [
        ({SPOT_A100: 31}, f"{SPOT_A100} in us-central1: 31, 0 in use, 32 more needed"),
        ({SPOT_A100: (40, 9)}, f"{SPOT_A100} in us-central1: 40, 9 in use, 32 more needed"),
        ({SPOT_A100: 0, "NVIDIA_A100_GPUS": 0}, "NVIDIA_A100_GPUS in us-central1 is 0"),
        ({SPOT_A100: 32, "everywhere": 0}, "GPUS_ALL_REGIONS is 0"),
        ({SPOT_A100: 32, "A2_CPUS": 96}, "A2_CPUS in us-central1: 96, 0 in use, 384 more needed"),
        ({SPOT_A100: 32, "SSD_TOTAL_GB": 500}, "SSD_TOTAL_GB in us-central1: 500, 0 in use, 800 more needed"),
        (
            {SPOT_A100: 31, "IN_USE_ADDRESSES": (8, 5)},
            f"{SPOT_A100} in us-central1: 31, 0 in use, 32 more needed; "
            "IN_USE_ADDRESSES in us-central1: 8, 5 in use, 4 more needed",
        ),
    ],
)
def test_a_quota_that_is_too_small_fails_with_the_page_to_raise_it(
    project: Google, granted: dict[str, Any], said: str
) -> None:
    grant(project, **granted)
    found = checked()["quota"]
    assert (found.status, found.message, found.page) == ("fail", said, QUOTA_PAGE)


def test_spot_machines_share_the_usual_quota_where_they_were_granted_none_of_their_own(project: Google) -> None:
    grant(project, NVIDIA_A100_GPUS=32, **{SPOT_A100: 0})
    assert checked()["quota"].status == "ok"
    grant(project, NVIDIA_A100_GPUS=32, **{SPOT_A100: 8})
    assert checked()["quota"].message == f"{SPOT_A100} in us-central1: 8, 0 in use, 32 more needed"


def test_machines_on_demand_do_not_count_against_the_quota_of_spot(project: Google) -> None:
    grant(project, NVIDIA_A100_GPUS=8, **{SPOT_A100: 64})
    assert checked(spot=False)["quota"].message == "NVIDIA_A100_GPUS in us-central1: 8, 0 in use, 32 more needed"


def test_a_project_whose_gpus_were_never_limited_has_no_such_quota(project: Google) -> None:
    grant(project, everywhere=None, **{SPOT_A100: 32})
    assert "ALL_REGIONS" not in checked()["quota"].message
    assert checked()["quota"].status == "ok"


def test_the_clusters_own_machines_are_not_asked_for_twice(project: Google) -> None:
    mine = [{"name": f"gpuctl-demo-{number}", "labels": {"gpuctl-cluster": "demo"}} for number in range(3)]
    elsewhere = [{"name": "gpuctl-demo-x", "labels": {"gpuctl-cluster": "demo"}}]
    project.put_everywhere("instances", {f"zones/{ZONE}": mine, "zones/europe-west4-a": elsewhere})
    grant(project, everywhere=None, **{SPOT_A100: (32, 24)})
    found = checked()["quota"]
    assert (found.status, found.message) == ("ok", f"{SPOT_A100} in us-central1: 32, 24 in use, 8 more needed")


def test_a_quota_that_compute_engine_does_not_tell_is_unknown(project: Google) -> None:
    grant(project, everywhere=None, PREEMPTIBLE_NVIDIA_H100_GPUS=64)
    assert checked(type="a3-highgpu-8g")["quota"].status == "ok"
    found = checked(type="a3-highgpu-8g", spot=False)["quota"]
    assert (found.status, found.page) == ("unknown", QUOTA_PAGE)
    assert found.message == "Compute Engine does not report the quota of H100-80GB in us-central1"


def test_every_machine_that_is_known_goes_by_some_quota() -> None:
    names = {name for one in catalog().types if one.provider == "gcp" for name, _ in quotas(asked("gcp"), one)}
    assert names == {
        *(
            "NVIDIA_A100_GPUS",
            "NVIDIA_A100_80GB_GPUS",
            "NVIDIA_H100_GPUS",
            "NVIDIA_H100_MEGA_GPUS",
            "NVIDIA_L4_GPUS",
            "NVIDIA_T4_GPUS",
        ),
        *("NVIDIA_V100_GPUS", "A2_CPUS", "CPUS", "SSD_TOTAL_GB", "IN_USE_ADDRESSES"),
    }


def test_limits_of_networks_and_rules_are_met_before_anything_is_made(project: Google) -> None:
    whole = limits(NETWORKS=(5, 5), SUBNETWORKS=(100, 3), FIREWALLS=(100, 99))
    project.put(f"/compute/v1/projects/{PROJECT}", {"name": PROJECT, "quotas": whole})
    found = checked()["quota"]
    said = "NETWORKS: 5, 5 in use, 1 more needed; FIREWALLS: 100, 99 in use, 2 more needed"
    assert (found.status, found.message, found.page) == ("fail", said, QUOTA_PAGE)
    assert checked(ssh_from="")["quota"].message == "NETWORKS: 5, 5 in use, 1 more needed"


def test_the_clusters_own_network_is_not_asked_for_twice(project: Google) -> None:
    whole = limits(NETWORKS=(5, 5), SUBNETWORKS=(5, 5), FIREWALLS=(5, 5))
    project.put(f"/compute/v1/projects/{PROJECT}", {"name": PROJECT, "quotas": whole})
    project.put("global/networks/gpuctl-demo", {"name": "gpuctl-demo"})
    project.put(f"regions/{REGION}/subnetworks/gpuctl-demo", {"name": "gpuctl-demo"})
    project.put("global/firewalls/gpuctl-demo-nodes", {"name": "gpuctl-demo-nodes"})
    assert checked()["quota"].message == "FIREWALLS: 5, 5 in use, 1 more needed"
    project.put("global/firewalls/gpuctl-demo-ssh", {"name": "gpuctl-demo-ssh"})
    assert checked()["quota"].status == "ok"


@pytest.mark.parametrize("missing", ["google.cloud.compute_v1", "google.auth", "google.api_core.exceptions"])
def test_packages_that_are_missing_are_no_failed_check(missing: str) -> None:
    code = (
        f"import sys; sys.modules['{missing}'] = None\n"
        "sys.argv = ['gpuctl', 'check', '--provider', 'gcp', '--type', 'a2-highgpu-8g']\n"
        "from gpuctl.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "region: us-central1 (the default)\n"
        f"error: gcp needs {missing}, which is not installed; pip install 'gpuctl-spot[gcp]'\n"
    )


def test_rights_that_are_missing_are_named(project: Google) -> None:
    missing = ("compute.networks.create", "iam.serviceAccounts.actAs")
    project.put(RIGHTS, lambda body: {"permissions": [one for one in body["permissions"] if one not in missing]})
    found = checked()["permissions"]
    assert (found.status, found.page) == ("fail", f"https://console.cloud.google.com/iam-admin/iam?project={PROJECT}")
    assert found.message == "these credentials lack compute.networks.create, iam.serviceAccounts.actAs"
    project.put(RIGHTS, {})
    assert checked()["permissions"].message.endswith("more")


def test_rights_are_those_to_what_the_request_makes(project: Google) -> None:
    def denied(right: str, **changes: Any) -> bool:
        project.put(RIGHTS, lambda body: {"permissions": [one for one in body["permissions"] if one != right]})
        return checked(**changes)["permissions"].status == "fail"

    Buckets(project).add("mine")
    assert denied("storage.buckets.create") and denied("storage.buckets.setIamPolicy")
    assert not denied("storage.buckets.create", bucket="gs://mine/runs")
    assert denied("compute.resourcePolicies.create")
    assert not denied("compute.resourcePolicies.create", placement=False)
    assert not denied("compute.resourcePolicies.delete", type="n1-standard-8+t4x1")


def test_whoever_gives_a_bucket_must_be_able_to_let_nodes_in(project: Google) -> None:
    bucket = Buckets(project).add("mine")
    found = checked(bucket="gs://mine/runs")["permissions"]
    assert (found.status, found.message.startswith("all ")) == ("ok", True)
    bucket.granted.clear()
    found = checked(bucket="gs://mine/runs")["permissions"]
    assert found.message == "these credentials lack storage.buckets.setIamPolicy on mine"
    found = checked(bucket="gs://other")["permissions"]
    assert (found.status, found.message) == ("fail", "there is no bucket other")


@pytest.mark.parametrize(
    "right",
    [
        *("resourcemanager.tagKeys.create", "resourcemanager.tagValues.create"),
        *("resourcemanager.tagKeys.delete", "resourcemanager.tagValues.delete"),
        *("resourcemanager.tagValueBindings.create", "compute.instanceGroupManagers.createTagBinding"),
    ],
)
def test_who_may_not_make_the_groups_tag_is_told_before_up_is(project: Google, right: str) -> None:
    project.put(RIGHTS, lambda body: {"permissions": [one for one in body["permissions"] if one != right]})
    assert checked()["permissions"].message == f"these credentials lack {right}"


def disabled(service: str) -> tuple[int, Any]:
    said = f"{service} has not been used in project 1 before or it is disabled."
    return typed_refusal(403, said, "SERVICE_DISABLED", service=service)


def test_services_that_the_project_has_not_enabled_fail_with_the_command_that_does(project: Google) -> None:
    project.put(f"/v1/projects/{PROJECT}/roles", disabled("iam.googleapis.com"))
    project.put("/v3/tagKeys", disabled("cloudresourcemanager.googleapis.com"))
    found = checked()["services"]
    both = "iam.googleapis.com, cloudresourcemanager.googleapis.com"
    how = f"gcloud services enable {both.replace(',', '')} --project {PROJECT}"
    assert (found.status, found.message) == ("fail", f"the project has not enabled {both}; {how}")
    assert found.page == f"https://console.cloud.google.com/apis/library?project={PROJECT}"
    assert {one.query.get("pageSize") for one in project.requests("/roles")} == {"1"}


def test_a_fresh_project_is_told_of_all_its_services_at_once(project: Google) -> None:
    project.put(f"/compute/v1/projects/{PROJECT}", refusal(403, "Compute Engine API is off", "accessNotConfigured"))
    project.put(f"/v1/projects/{PROJECT}/roles", disabled("iam.googleapis.com"))
    project.put("/storage/v1/b", refusal(403, "Cloud Storage is off", "accessNotConfigured"))
    found = checked()
    assert list(found) == ["credentials", "services"]
    services = "compute.googleapis.com iam.googleapis.com storage.googleapis.com"
    assert found["services"].message.endswith(f"; gcloud services enable {services} --project {PROJECT}")


def test_a_service_that_may_not_be_listed_is_there_and_one_that_cannot_answer_is_told(project: Google) -> None:
    project.put("/v3/tagKeys", typed_refusal(403, "no", "IAM_PERMISSION_DENIED"))
    assert checked()["services"].status == "ok"
    project.put("/v3/tagKeys", refusal(500, "later", "backendError"))
    assert checked()["services"].message == "Google Cloud answered 500: later; try again later"


def test_what_may_not_be_asked_is_unknown_and_the_rest_is_told(project: Google) -> None:
    off = "Cloud Resource Manager API has not been used in project 1 before or it is disabled."
    service = "cloudresourcemanager.googleapis.com"
    project.put(RIGHTS, typed_refusal(403, off, "SERVICE_DISABLED", service=service))
    found = checked()
    assert (found["permissions"].status, found["quota"].status) == ("unknown", "ok")
    assert found["permissions"].message.endswith("/apis/library/cloudresourcemanager.googleapis.com")


def test_a_zone_or_a_region_without_the_machine_fails(generous: Google) -> None:
    elsewhere = checked(zones=("us-central1-b",))["machines"]
    said = "there is no a2-highgpu-8g in us-central1-b; --zone us-central1-a has it"
    assert (elsewhere.status, elsewhere.message) == ("fail", said)
    generous.put_everywhere("machineTypes", {"zones/europe-west4-a": [{"name": "a2-highgpu-8g"}]})
    nowhere = checked()["machines"]
    assert nowhere.message == "there is no a2-highgpu-8g in us-central1; use another --region or --type"


def test_a_zone_has_to_have_the_gpus_that_are_hung_on_too(project: Google) -> None:
    project.put_everywhere("machineTypes", {f"zones/{REGION}-{zone}": [{"name": "n1-standard-8"}] for zone in "ab"})
    project.put_everywhere("acceleratorTypes", {"zones/us-central1-b": [{"name": "nvidia-tesla-t4"}]})
    found = checked(type="n1-standard-8+t4x1")["machines"]
    assert found.message == "there is no n1-standard-8+t4x1 in us-central1-a; --zone us-central1-b has it"


def test_a_region_that_is_none_and_a_zone_of_another_fail() -> None:
    nowhere = checked(region="us-centrall1", zones=("us-centrall1-a",))["region"]
    said = "unknown region 'us-centrall1' of Google Cloud; there are: europe-west4, us-central1"
    assert (nowhere.status, nowhere.message) == ("fail", said)
    foreign = checked(zones=("europe-west4-a",))["region"]
    said = "europe-west4-a is not a zone of us-central1; --zone us-central1-a or us-central1-b is"
    assert (foreign.status, foreign.message) == ("fail", said)


def test_a_region_that_is_down_fails(project: Google) -> None:
    project.put(f"regions/{REGION}", {"name": REGION, "status": "DOWN", "zones": [f"{URL}/zones/{ZONE}"]})
    assert checked()["region"].message == "us-central1 is down"


def test_expired_credentials_are_all_that_can_be_told(project: Google) -> None:
    project.answers["POST /token"] = (400, {"error": "invalid_grant", "error_description": "Token has been expired."})
    found = checked()
    assert list(found) == ["credentials"]
    said = "the Google Cloud credentials have expired, or were revoked; log in"
    assert found["credentials"].status == "fail"
    assert found["credentials"].message.startswith(said)


def test_a_project_that_nobody_knows_is_the_last_that_can_be_told() -> None:
    found = checked(account="nope")
    assert list(found) == ["credentials", "project"]
    assert found["project"].status == "fail"
    assert found["project"].message.startswith("there is no such Google Cloud project, or it is not yours: ")


def check(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "check", "--provider", "gcp", "--type", "a2-highgpu-8g", *args],
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("pulumi_on_path")
def test_the_verb_prints_a_line_for_each_check(project: Google) -> None:
    grant(project, everywhere=None, **{SPOT_A100: 0})
    done = check("--nodes", "4")
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    of_google = ["credentials", "project", "services", "region", "machines", "permissions", "quota"]
    assert list(lines) == [*of_google, "pulumi", "plug-in"]
    assert lines["quota"] == f"fail     quota        {SPOT_A100} in us-central1 is 0; see {QUOTA_PAGE}"
    assert (done.returncode, done.stderr) == (1, "region: us-central1 (the default)\nerror: 1 check failed: quota\n")


@pytest.mark.slow
@pytest.mark.usefixtures("pulumi_on_path")
def test_the_verb_tells_of_missing_credentials_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    done = check("-o", "json")
    (only, *here) = json.loads(done.stdout)["checks"]
    assert [one["name"] for one in here] == ["pulumi", "plug-in"]
    assert (only["name"], only["status"]) == ("credentials", "fail")
    assert only["message"].startswith("no Google Cloud credentials found; log in")
    assert (done.returncode, done.stderr) == (
        1,
        "region: us-central1 (the default)\nerror: 1 check failed: credentials\n",
    )
