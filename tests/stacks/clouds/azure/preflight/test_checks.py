"""``check`` on Azure, against a server with Azure's shapes (``azure_api``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds.answers import PreflightCheck
from gpuctl.stacks.clouds.azure.preflight.checks import checks
from tests.fakes.azure.api import SUBSCRIPTION, Api, environment, forbidden, gpuctl, recorded, refusal, serving
from tests.fakes.azure.cloud import Subscription
from tests.fakes.pulumi import cli
from tests.fakes.requests import asked

SIZE = "Standard_ND96asr_v4"
SKUS = "providers/microsoft.compute/skus"
USAGES = "providers/microsoft.compute/locations/eastus/usages"
PERMISSIONS = "providers/microsoft.authorization/permissions"
OWN = "resourcegroups/gpuctl-demo/providers/microsoft.compute/virtualmachinescalesets/gpuctl-demo"
QUOTAS = "https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade/~/myQuotas"
NETWORK = "providers/microsoft.network/locations/eastus/usages"
NAMES = (
    *("credentials", "account", "region", "machines", "providers", "permissions", "quota"),
    *("addresses", "networks", "groups"),
)


@pytest.fixture
def api() -> Iterator[Api]:
    groups = {"resourcegroups": [{"name": "theirs"}]}
    nothing = Subscription().live  # as if nothing were there
    with serving(recorded("subscription") | recorded("checks") | groups, nothing) as served:
        yield served


def checked(api: Api, **changes: Any) -> dict[str, PreflightCheck]:
    """Of four ND96asr_v4, 96 vCPUs each, as spot in eastus."""
    request = asked("azure", **changes)
    return {one.name: one for one in checks(request, catalog().type(request.type), api.account())}


def sku(api: Api) -> dict[str, Any]:
    (found,) = [one for one in api.answers[SKUS] if one["name"] == SIZE]
    return dict(found)


def with_sku(api: Api, **changes: Any) -> None:
    api.answers[SKUS] = [{**sku(api), **changes}]


def limit(api: Api, quota: str, limit: int, used: int = 0) -> None:
    for usage in api.answers[USAGES]:
        if usage["name"]["value"] == quota:
            usage |= {"limit": limit, "currentValue": used}


@pytest.mark.slow
def test_all_is_well_where_the_cloud_says_so(api: Api) -> None:
    found = checked(api, zones=("2",))
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(NAMES, "ok")
    assert found["account"].message == f"subscription Research ({SUBSCRIPTION})"
    assert found["machines"].message == f"{SIZE} is sold in 2"
    assert found["quota"].message == f"Total Regional Spot vCPUs: 384 vCPUs, 0 in use, 384 for 4 x {SIZE}"
    assert {method for method, _, _ in api.asked} == {"GET"}


def test_the_long_list_of_sizes_is_asked_for_once_and_of_one_region(api: Api) -> None:
    api.answers[SKUS] = [sku(api)]
    checked(api)
    assert [query["$filter"] for query in api.queries(SKUS)] == ["location eq 'eastus'"]


# -- quota ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [383, 0])
def test_a_quota_that_is_too_small_fails_with_the_page_to_raise_it(api: Api, value: int) -> None:
    limit(api, "lowPriorityCores", value)
    found = checked(api)["quota"]
    assert (found.status, found.page) == ("fail", QUOTAS)
    if value == 0:
        assert found.message == f"Total Regional Spot vCPUs is 0: this subscription may not start any {SIZE} (spot)"


@pytest.mark.parametrize(
    ("quota", "called"),
    [("standardNDASv4_A100Family", "Standard NDASv4_A100 Family vCPUs"), ("cores", "Total Regional vCPUs")],
)
def test_on_demand_counts_against_the_family_and_the_region(api: Api, quota: str, called: str) -> None:
    limit(api, "lowPriorityCores", 0)
    assert checked(api, spot=False)["quota"].message.startswith("Standard NDASv4_A100 Family vCPUs: 384 vCPUs, 0 in")
    limit(api, quota, 400, 100)
    found = checked(api, spot=False)["quota"]
    assert (found.status, found.message) == ("fail", f"{called}: 400 vCPUs, 100 in use, 384 for 4 x {SIZE}")


@pytest.mark.slow
def test_what_the_cluster_has_already_is_not_counted_twice(api: Api) -> None:
    limit(api, "lowPriorityCores", 384, 192)
    assert checked(api)["quota"].status == "fail"
    profile = {"properties": {"virtualMachineProfile": {"priority": "Spot"}}}
    api.answers[OWN] = {"name": "gpuctl-demo", "sku": {"name": SIZE, "capacity": 2}, **profile}
    api.answers[f"{OWN}/virtualmachines"] = [{"name": "gpuctl-demo_0"}, {"name": "gpuctl-demo_1"}]
    found = checked(api)["quota"]
    assert (found.status, found.message) == (
        "ok",
        f"Total Regional Spot vCPUs: 384 vCPUs, 0 in use, 384 for 4 x {SIZE}",
    )
    limit(api, "standardNDASv4_A100Family", 384, 192)
    assert checked(api, spot=False)["quota"].status == "fail", "those that it has as spot are of another quota"


def test_a_quota_that_azure_does_not_tell_is_unknown(api: Api) -> None:
    with_sku(api, family="standardNewFamily")
    found = checked(api, spot=False)["quota"]
    assert (found.status, found.message) == ("unknown", "Azure reports no quota 'standardNewFamily' in eastus")


# -- machines ---------------------------------------------------------------------------------------------------------


def test_a_zone_or_a_region_without_the_size_fails(api: Api) -> None:
    assert checked(api, zones=("3",))["machines"].message == (
        f"there is no {SIZE} in zone 3 of eastus; --zone 1 or 2 has it"
    )
    with_sku(api, locationInfo=[{"location": "eastus", "zones": []}])
    assert checked(api, zones=("3",))["machines"].message == (
        f"there is no {SIZE} in zone 3 of eastus; leave --zone out"
    )
    api.answers[SKUS] = []
    assert checked(api)["machines"].message == f"there is no {SIZE} in eastus; use another --region or --type"


def closed(kind: str, **info: Any) -> dict[str, Any]:
    where = {"locations": ["eastus"], **info}
    return {"type": kind, "reasonCode": "NotAvailableForSubscription", "values": ["eastus"], "restrictionInfo": where}


def test_a_size_that_is_closed_to_the_subscription_fails(api: Api) -> None:
    with_sku(api, restrictions=[closed("Location")])
    found = checked(api)["machines"]
    assert (found.status, found.message) == ("fail", f"this subscription may not use {SIZE} in eastus")
    assert "NewSupportRequest" in found.page


@pytest.mark.slow
def test_a_zone_that_is_closed_to_the_subscription_fails_if_it_is_named(api: Api) -> None:
    with_sku(api, restrictions=[closed("Zone", zones=["1"])])
    assert checked(api, zones=("1",))["machines"].message == (
        f"this subscription may not use {SIZE} in zone 1 of eastus; leave --zone out"
    )
    assert [checked(api, zones=zones)["machines"].status for zones in (("2",), ())] == ["ok", "ok"]


def test_a_size_that_is_not_sold_as_spot_fails(api: Api) -> None:
    with_sku(api, capabilities=[{"name": "LowPriorityCapable", "value": "False"}])
    assert checked(api)["machines"].message == f"{SIZE} is not sold as spot; add --on-demand"
    assert checked(api, spot=False)["machines"].status == "ok"


# -- the subscription -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("region", "near"), [("estus", "eastus"), ("East US", "eastus"), ("westeurop", "westeurope")])
def test_a_region_that_is_spelled_wrong_fails_with_one_that_is_like_it(api: Api, region: str, near: str) -> None:
    found = checked(api, region=region)
    assert set(found) == {"account", "region"}, "nothing else is asked of a region that is none"
    assert (found["region"].status, found["region"].message) == (
        "fail",
        f"unknown region {region!r} on Azure; did you mean {near}?",
    )


def test_a_name_for_several_regions_is_none(api: Api) -> None:
    api.answers["locations"].append({"name": "unitedstates", "metadata": {"regionType": "Logical"}})
    assert checked(api, region="unitedstates")["region"].status == "fail"


def test_parts_of_azure_that_are_not_registered_are_named_with_the_command(api: Api) -> None:
    for one in api.answers["providers"]:
        if one["namespace"] == "Microsoft.Compute":
            one["registrationState"] = "Unregistered"
    found = checked(api)["providers"]
    assert (found.status, found.message) == (
        "fail",
        "the subscription is not registered for Microsoft.Compute; az provider register --namespace Microsoft.Compute",
    )
    assert found.page.endswith(f"{SUBSCRIPTION}/resourceproviders")


def test_what_one_role_takes_out_another_may_give(api: Api) -> None:
    """As it is recorded: a contributor, who is an administrator of roles besides."""
    assert checked(api)["permissions"].status == "ok"
    api.answers[PERMISSIONS] = api.answers[PERMISSIONS][:1]
    found = checked(api)["permissions"]
    assert (found.status, found.message) == (
        "fail",
        "these credentials may not call Microsoft.Authorization/roleAssignments/write, "
        "Microsoft.Authorization/roleAssignments/delete, Microsoft.Authorization/roleDefinitions/write, "
        "Microsoft.Authorization/roleDefinitions/delete",
    )


def test_rights_are_those_to_what_the_request_makes(api: Api) -> None:
    (every,) = api.answers[PERMISSIONS][:1]
    other = {"actions": ["Microsoft.Authorization/*"], "notActions": []}
    api.answers[PERMISSIONS] = [every | {"notActions": ["Microsoft.Storage/*"]}, other]
    found = checked(api)["permissions"]
    assert found.status == "fail" and "Microsoft.Storage/storageAccounts/write" in found.message
    assert checked(api, bucket="az://mine/runs?account_name=theirs")["permissions"].status == "ok"


def test_rights_to_the_clusters_group_alone_are_enough_for_what_is_in_it(api: Api) -> None:
    here = api.answers[PERMISSIONS]
    group = {"actions": ["Microsoft.Resources/subscriptions/resourceGroups/*"], "notActions": []}
    api.answers[PERMISSIONS] = [group]
    found = checked(api)["permissions"]
    assert found.message.startswith("these credentials may not call Microsoft.Compute/virtualMachineScaleSets/write, ")
    api.answers[f"resourcegroups/gpuctl-demo/{PERMISSIONS}"] = here
    assert checked(api)["permissions"].status == "ok"


def test_what_may_not_be_asked_is_unknown_and_the_rest_is_told(api: Api) -> None:
    api.answers[PERMISSIONS] = forbidden("Microsoft.Authorization/permissions/read")
    found = checked(api)
    assert found["permissions"] == PreflightCheck(
        name="permissions",
        status="unknown",
        message="these Azure credentials may not call Microsoft.Authorization/permissions/read; "
        "ask the subscription's administrator",
    )
    assert (found["machines"].status, found["quota"].status) == ("ok", "ok")


def test_a_subscription_that_is_disabled_fails(api: Api) -> None:
    api.answers[""]["state"] = "Disabled"
    found = checked(api)["account"]
    assert (found.status, found.message) == ("fail", f"subscription Research ({SUBSCRIPTION}) is disabled")


@pytest.mark.parametrize(
    ("answer", "name", "said"),
    [
        (refusal("ExpiredAuthenticationToken", status=401), "credentials", "the Azure login has expired; log in"),
        (refusal("SubscriptionNotFound", status=404), "account", "these Azure credentials see no such subscription"),
    ],
)
def test_without_credentials_or_a_subscription_that_is_all_that_can_be_told(
    api: Api, answer: Any, name: str, said: str
) -> None:
    api.answers[""] = answer
    found = checked(api)
    assert list(found) == [name]
    assert found[name].message.startswith(said)
    assert found[name].page.startswith("https://")


# -- what runs out besides --------------------------------------------------------------------------------------------


def used(api: Api, what: str, value: int) -> None:
    for usage in api.answers[NETWORK]:
        if usage["name"]["value"] == what:
            usage["currentValue"] = value


@pytest.mark.slow
def test_each_machine_takes_an_address(api: Api) -> None:
    used(api, "StandardSkuPublicIpAddresses", 16)
    assert checked(api)["addresses"].status == "ok"
    used(api, "StandardSkuPublicIpAddresses", 17)
    found = checked(api)["addresses"]
    assert (found.status, found.page) == ("fail", QUOTAS)
    assert found.message == "Public IPv4 Addresses - Standard: 20, 17 in use, 4 needed"
    api.answers[f"{OWN}/publicipaddresses"] = [{"name": "public"}]
    assert checked(api)["addresses"].status == "ok", "one of them is the cluster's own"


@pytest.mark.slow
def test_a_cluster_takes_a_network(api: Api) -> None:
    used(api, "VirtualNetworks", 1000)
    assert checked(api)["networks"].message == "Virtual Networks: 1000, 1000 in use, 1 needed"
    assert checked(api)["networks"].status == "fail"
    own = "resourcegroups/gpuctl-demo/providers/microsoft.network/virtualnetworks/gpuctl-demo"
    api.answers[own] = {"name": "gpuctl-demo"}
    assert checked(api)["networks"].status == "ok"


def test_a_cluster_takes_two_resource_groups(api: Api) -> None:
    api.answers["resourcegroups"] = [200, {"value": [{"name": f"theirs-{number}"} for number in range(979)]}]
    found = checked(api)["groups"]
    assert (found.status, found.message) == ("fail", "resource groups: 980, 979 in use, 2 needed; delete some")
    assert checked(api, bucket="az://mine?account_name=theirs")["groups"].status == "ok"


def test_a_limit_that_azure_does_not_tell_is_unknown(api: Api) -> None:
    api.answers[NETWORK] = []
    assert (checked(api)["addresses"].status, checked(api)["networks"].status) == ("unknown", "unknown")


# -- the verb ---------------------------------------------------------------------------------------------------------

ARGS = ("check", "--provider", "azure", "--type", SIZE, "--nodes", "4", "-c", "demo")


@pytest.mark.slow
def test_the_verb_prints_a_line_for_each_check(api: Api, tmp_path: Path) -> None:
    limit(api, "lowPriorityCores", 96)
    env = environment(tmp_path, api)
    done = gpuctl({**env, "PATH": f"{cli.install(tmp_path / 'pulumi')}:{env['PATH']}"}, *ARGS)
    lines = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}
    assert lines == {**dict.fromkeys((*NAMES, "pulumi", "plug-in"), "ok"), "quota": "fail"}
    assert f"; see {QUOTAS}\n" in done.stdout
    assert (done.returncode, done.stderr) == (1, "region: eastus (the default)\nerror: 1 check failed: quota\n")


@pytest.mark.slow
def test_the_verb_tells_of_missing_credentials_in_json(api: Api, tmp_path: Path) -> None:
    done = gpuctl(environment(tmp_path, api, "logged out"), *ARGS, "-o", "json")
    (only, *here) = json.loads(done.stdout)["checks"]
    assert [one["name"] for one in here] == ["pulumi", "plug-in"]
    assert (only["name"], only["status"]) == ("credentials", "fail")
    assert only["message"].startswith("no Azure credentials found; log in (az login)")
    assert done.returncode == 1


@pytest.mark.parametrize("package", ["azure.identity", "azure.mgmt.compute", "azure.mgmt.network"])
def test_a_missing_package_is_no_failed_check(api: Api, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as Python has it: to import it fails
    request = asked("azure")
    with pytest.raises(BadInput) as refused:
        checks(request, catalog().type(request.type), None if package == "azure.identity" else api.account())
    assert str(refused.value) == f"azure needs {package}, which is not installed; pip install 'gpuctl-spot[azure]'"
