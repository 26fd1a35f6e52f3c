"""``leaks`` on Azure: a mess on a server with Azure's shapes (``azure_api``) is found to the last piece."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.catalog.instance_types import Price, catalog, keep_spot_prices
from gpuctl.stacks.clouds.answers import CredentialsRefused
from gpuctl.stacks.clouds.azure import kept_group, whose, whose_id
from gpuctl.stacks.clouds.azure.cleanup.leak_kinds import KINDS
from gpuctl.stacks.clouds.azure.cleanup.leaks import scan
from tests.fakes.azure.api import (
    SUBSCRIPTION,
    TOKEN,
    Api,
    Static,
    environment,
    forbidden,
    gpuctl,
    recorded,
    refusal,
    serving,
)
from tests.fakes.requests import Planned, asked, planned

PLANTED = {
    ("resource group", "gpuctl-demo"),
    ("scale set", "gpuctl-demo/gpuctl-demo"),
    ("instance", "gpuctl-demo/gpuctl-demo/0"),
    ("instance", "gpuctl-demo/gpuctl-demo/1"),
    ("instance", "gpuctl-demo/gpuctl-demo/2"),
    ("network interface", "gpuctl-demo/gpuctl-demo/0/card"),
    ("network interface", "gpuctl-demo/loose"),
    ("public address", "gpuctl-demo/gpuctl-demo/0/card/address/public"),
    ("public address", "gpuctl-demo/way-out"),
    ("disk", "gpuctl-demo/gpuctl-demo_0_OsDisk"),
    ("disk", "theirs/tagged"),
    ("snapshot", "gpuctl-demo/before"),
    ("NAT gateway", "gpuctl-demo/way-out"),
    ("security group", "gpuctl-demo/gpuctl-demo"),
    ("virtual network", "gpuctl-demo/gpuctl-demo"),
    ("identity", "gpuctl-demo/gpuctl-demo"),
    ("Microsoft.Network/bastionHosts", "gpuctl-demo/by-hand"),
    ("Microsoft.Storage/storageAccounts", "theirs/tagged"),
    ("role", "role-1"),
    ("role assignment", "given-1"),
    ("role assignment", "given-2"),
}
"""Of the cluster ``demo``: with its tag, in its group, part of one of these, or by the words of a role."""
REMOVES = (
    "gpuctl down --cluster NAME; if it was made elsewhere: gpuctl down --by-tag NAME --provider azure --region REGION"
)
NEXT = {("resource group", "gpuctl-next"), ("virtual network", "gpuctl-next/gpuctl-next")}


@pytest.fixture
def api() -> Iterator[Api]:
    with serving(recorded("subscription") | recorded("leaks")) as served:
        yield served


def pieces(api: Api, regions: list[str] | None = None, cluster: str | None = None) -> set[tuple[str, str]]:
    return {(one.kind, one.id) for one in scan(regions or [], cluster, api.account()).found}


@pytest.mark.slow
def test_every_piece_of_a_mess_is_found_and_nothing_of_a_strangers(api: Api) -> None:
    seen = scan([], "demo", api.account())
    assert (seen.regions, seen.unseen) == (("all regions",), ())
    assert {(one.kind, one.id) for one in seen.found} == PLANTED
    assert len(seen.found) == len(PLANTED)
    assert pieces(api) == PLANTED | NEXT
    assert pieces(api, cluster="next") == NEXT


def test_azure_is_not_asked_to_filter_for_it_would_leave_the_tags_out(api: Api) -> None:
    scan([], "demo", api.account())
    assert [
        query for path in ("resources", "resourcegroups") for query in api.queries(path) if "$filter" in query
    ] == []


@pytest.mark.slow
def test_all_that_the_program_makes_is_looked_for() -> None:
    """What has tags and is deleted on ``down``: each has a word of ours, so none is only found by luck."""
    made = {
        resource.type.rpartition(":")[2]
        for resource in planned(asked("azure")).resources
        if "tags" in resource.inputs and not resource.kept
    }
    words = {"VirtualMachineScaleSet": "scale set", "NetworkSecurityGroup": "security group"}
    words |= {"UserAssignedIdentity": "identity"}
    kinds = {words.get(name) or re.sub(r"\B(?=[A-Z])", " ", name).lower() for name in made}
    assert "virtual network" in kinds
    assert kinds <= {kind.what for kind in KINDS} | {"resource group", "identity"}


def test_roles_and_what_nodes_are_given_say_whose_they_are_and_what_is_kept_does_not() -> None:
    of = Planned(asked("azure"))
    (role,) = of.all("authorization:RoleDefinition")
    assert whose(role.inputs["roleName"]) == "demo"
    said = {one.name: whose(one.inputs.get("description", "")) for one in of.all("authorization:RoleAssignment")}
    assert said == {"demo-objects": "demo", "demo-leave": "demo", "demo-reader": ""}


def test_each_piece_tells_its_cluster_its_maker_and_its_id(api: Api) -> None:
    """What has no tags has its group's, and what takes none its words and its group's."""
    found = {(one.kind, one.id): one for one in scan([], "demo", api.account()).found}
    told = {place: (one.cluster_id, one.owner, one.created) for place, one in found.items()}
    whole = ("0123456789", "me@laptop", "2026-11-21")
    untagged = [("disk", "gpuctl-demo/gpuctl-demo_0_OsDisk"), ("network interface", "gpuctl-demo/gpuctl-demo/0/card")]
    worded = [("role", "role-1"), ("role assignment", "given-1"), ("role assignment", "given-2")]
    for place in [("resource group", "gpuctl-demo"), *untagged, *worded]:
        assert told[place] == whole, place
    assert told["disk", "theirs/tagged"] == ("", "", ""), "its own tags do not tell"
    assert {found[place].ref.partition("/providers/")[0].lower() for place in untagged} == {
        f"/subscriptions/{SUBSCRIPTION}/resourcegroups/gpuctl-demo"
    }
    assert found["role", "role-1"].ref.endswith("/providers/Microsoft.Authorization/roleDefinitions/role-1")
    assert all(one.ref for one in found.values())


def test_words_tell_the_identity_where_there_is_one() -> None:
    role = Planned(asked("azure", id="00ff00ff00")).one("authorization:RoleDefinition")["roleName"]
    assert (whose(role), whose_id(role)) == ("demo", "00ff00ff00")
    nameless = Planned(asked("azure")).one("authorization:RoleDefinition")["roleName"]
    assert (whose(nameless), whose_id(nameless)) == ("demo", "")


def test_the_group_that_down_keeps_is_known_by_its_name() -> None:
    groups = [one for one in Planned(asked("azure")).all("resources:ResourceGroup") if one.kept]
    assert [one.inputs["resourceGroupName"] for one in groups] == [kept_group("demo", "eastus")]


def test_a_group_of_that_name_that_another_cluster_has_made_is_no_kept_one(api: Api) -> None:
    api.answers["resourcegroups"][1]["tags"]["gpuctl:cluster"] = "demo-kept"
    found = pieces(api, cluster="demo-kept")
    assert {
        ("resource group", "gpuctl-demo-eastus-kept"),
        ("Microsoft.KeyVault/vaults", "gpuctl-demo-eastus-kept/somebodys"),
    } <= found


def test_what_costs_something_is_told_its_price_and_comes_first(api: Api) -> None:
    found = scan([], "demo", api.account()).found
    usd = [(one.kind, one.usd_per_hour and round(one.usd_per_hour, 4)) for one in found if one.usd_per_hour != 0.0]
    assert usd == [
        ("Microsoft.Network/bastionHosts", None),
        ("Microsoft.Storage/storageAccounts", None),
        ("disk", None),
        ("instance", None),
        ("snapshot", None),
        ("instance", 27.197),
        ("disk", round(38.01 / 730, 4)),
        ("NAT gateway", 0.045),
        ("public address", 0.005),
        ("public address", 0.005),
    ]
    about = {one.id: one.about for one in found if one.kind == "instance"}
    assert about["gpuctl-demo/gpuctl-demo/0"] == "Standard_ND96asr_v4, running, spot"
    assert about["gpuctl-demo/gpuctl-demo/1"] == "Standard_ND96asr_v4, deallocated, spot"


def test_a_spot_instance_costs_its_spot_price_where_that_is_known(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path))
    catalog.cache_clear()
    keep_spot_prices([Price(type="Standard_ND96asr_v4", region="eastus", spot=7.5)], "2026-11-21")
    priced = {one.usd_per_hour for one in scan([], "demo", api.account()).found if one.kind == "instance"}
    profile = api.answers["providers/microsoft.compute/virtualmachinescalesets"][0]["properties"]
    profile["virtualMachineProfile"] = {"priority": "Regular"}
    on_demand = {one.usd_per_hour for one in scan([], "demo", api.account()).found if one.kind == "instance"}
    catalog.cache_clear()
    assert (priced, on_demand) == ({7.5, 0.0, None}, {27.197, 0.0, None})


def test_the_providers_word_goes_before_that_of_a_list_that_lags(api: Api) -> None:
    gone = ("disk", "gpuctl-demo/deleted-a-minute-ago")
    assert gone not in pieces(api)
    api.answers["providers/microsoft.compute/disks"] = forbidden("Microsoft.Compute/disks/read")
    seen = scan([], "demo", api.account())
    assert seen.unseen == ("disks: these Azure credentials may not call Microsoft.Compute/disks/read",)
    assert gone in {(one.kind, one.id) for one in seen.found}
    assert {one.usd_per_hour for one in seen.found if one.kind == "disk"} == {None}


def test_what_was_in_a_group_that_has_ended_is_not_there_though_azure_still_lists_it(api: Api) -> None:
    api.answers["resourcegroups"] = [one for one in api.answers["resourcegroups"] if one["name"] != "gpuctl-demo"]
    left = {piece for piece in pieces(api, cluster="demo") if piece[1].startswith("gpuctl-demo/")}
    assert {kind for kind, _ in left} & {"identity", "Microsoft.Network/bastionHosts"} == set()
    api.answers["resourcegroups"] = forbidden("Microsoft.Resources/subscriptions/resourceGroups/read")
    assert ("identity", "gpuctl-demo/gpuctl-demo") in pieces(api, cluster="demo"), "nobody knows that it has ended"


@pytest.mark.parametrize(
    ("path", "what", "lost"),
    [
        ("resourcegroups", "resource groups", "resource group"),
        ("resources", "resources", "identity"),
        ("providers/microsoft.authorization/roledefinitions", "roles", "role"),
        (
            "resourcegroups/gpuctl-demo/providers/microsoft.compute/virtualmachinescalesets/gpuctl-demo/virtualmachines",
            "instances of gpuctl-demo/gpuctl-demo",
            "instance",
        ),
    ],
)
def test_what_may_not_be_looked_at_is_said_and_the_rest_is_found(api: Api, path: str, what: str, lost: str) -> None:
    api.answers[path] = forbidden("x/read")
    seen = scan([], "demo", api.account())
    assert seen.unseen == (f"{what}: these Azure credentials may not call x/read",)
    kinds = {one.kind for one in seen.found}
    assert lost not in kinds
    assert [one for one in seen.found if one.id.startswith("gpuctl-demo-eastus-kept/")] == []
    assert {"scale set", "virtual network"} <= kinds


def test_lists_that_show_only_what_one_may_read_prove_nothing(api: Api) -> None:
    """Azure refuses nothing to those with a role on one group: it shows them that group."""
    api.answers["providers/microsoft.authorization/permissions"] = [{"actions": [], "notActions": []}]
    assert scan([], "demo", api.account()).unseen == (
        "resources made by others: these Azure credentials may read only parts of the subscription",
    )


def test_a_part_of_azure_that_was_never_used_holds_nothing(api: Api) -> None:
    never = refusal("MissingSubscriptionRegistration", "is not registered to use namespace 'Microsoft.Network'", 409)
    paths = [kind.type.split("/") for kind in KINDS if kind.type.startswith("microsoft.network")]
    api.answers.update({f"providers/{'/'.join(path)}": never for path in paths})
    seen = scan([], "demo", api.account())
    assert seen.unseen == ()
    assert {method for method, _, _ in api.asked} == {"GET"}  # Azure's client would register it, which is no look
    assert ("NAT gateway", "gpuctl-demo/way-out") not in {(one.kind, one.id) for one in seen.found}


def test_a_scale_set_that_ends_meanwhile_is_no_complaint(api: Api) -> None:
    whole = "resourcegroups/gpuctl-demo/providers/microsoft.compute/virtualmachinescalesets/gpuctl-demo"
    for path in [path for path in api.answers if path.startswith(whole)]:
        api.answers[path] = refusal("ResourceNotFound", "was not found", 404)
    seen = scan([], "demo", api.account())
    assert seen.unseen == ()
    assert ("scale set", "gpuctl-demo/gpuctl-demo") in {(one.kind, one.id) for one in seen.found}


def test_the_regions_that_are_named_are_looked_into_and_what_is_in_none(api: Api) -> None:
    assert pieces(api, ["westeurope"]) == NEXT | {
        ("disk", "theirs/tagged"),
        ("role", "role-1"),
        ("role assignment", "given-1"),
        ("role assignment", "given-2"),
    }
    assert scan(["westeurope", "eastus"], None, api.account()).regions == ("westeurope", "eastus")
    assert pieces(api, ["all"]) == PLANTED | NEXT


def test_nothing_is_ever_left_in_a_region_that_is_spelled_wrong(api: Api) -> None:
    with pytest.raises(BadInput, match="unknown region 'esatus' on Azure; did you mean eastus"):
        scan(["esatus"], None, api.account())


# -- who asks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            refusal("ExpiredAuthenticationToken", "The access token expiry UTC time", 401),
            "the Azure login has expired",
        ),
        (
            refusal("InvalidAuthenticationTokenTenant", "wrong issuer", 401),
            "Azure rejects these credentials here",
        ),
        (
            refusal("SubscriptionNotFound", "could not be found", 404),
            "these Azure credentials see no such subscription",
        ),
        (refusal("InvalidSubscriptionId", "malformed", 400), "these Azure credentials see no such subscription"),
        ("<html>a proxy</html>", "the response is not from Azure's API; is there a proxy in between?"),
        (refusal("Odd", "Some\nthing", 400), "Azure refused: Odd: Some thing"),
    ],
)
def test_what_azure_refuses_is_one_line(api: Api, answer: Any, said: str) -> None:
    api.answers[""] = answer
    with pytest.raises(GpuctlError) as refused:
        scan([], None, api.account())
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_token_that_azure_does_not_know_is_one_line(api: Api) -> None:
    with pytest.raises(
        CredentialsRefused, match=r"rejects these credentials here \(InvalidAuthenticationToken\); log in"
    ):
        scan([], None, api.account("another"))


def test_without_a_name_it_is_the_only_subscription(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuctl.stacks.clouds.azure.client import connecting

    for name in ("ARM_SUBSCRIPTION_ID", "AZURE_SUBSCRIPTION_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_CONFIG_DIR", str(tmp_path))
    api.answers["/subscriptions"] = [{"subscriptionId": SUBSCRIPTION}]
    token = Static(TOKEN)
    assert connecting("", token, api.url).subscription == SUBSCRIPTION
    api.answers["/subscriptions"] = [{"subscriptionId": SUBSCRIPTION}, {"subscriptionId": "b"}, {"subscriptionId": "c"}]
    with pytest.raises(BadInput, match="see 3 subscriptions; az account set"):
        connecting("", token, api.url)
    api.answers["/subscriptions"] = []
    with pytest.raises(GpuctlError, match="see no subscription; ask the tenant's administrator"):
        connecting("", token, api.url)
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", "named")
    assert connecting("", token, api.url).subscription == "named"


# -- the verb ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_verb_lists_what_is_there_and_fails(api: Api, tmp_path: Path) -> None:
    env = environment(tmp_path, api)
    done = gpuctl(env, "leaks", "--provider", "azure", "-c", "demo", "--all-regions")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["CLUSTER", "KIND", "ID", "ABOUT", "REGION", "$/H"]
    assert len(lines) == 1 + len(PLANTED)
    assert done.stderr == (f"looked in azure: all regions\nerror: {len(PLANTED)} things there, $27.30/h; {REMOVES}\n")
    told = json.loads(gpuctl(env, "leaks", "--provider", "azure", "-c", "demo", "-o", "json").stdout)
    elsewhere = {("disk", "theirs/tagged")}
    assert {(one["kind"], one["id"]) for one in told["found"]} == PLANTED - elsewhere
    assert told["looked_in"] == [{"provider": "azure", "region": "eastus", "why": "the default"}]


@pytest.mark.slow
def test_the_verb_is_content_where_nothing_is_left(api: Api, tmp_path: Path) -> None:
    done = gpuctl(environment(tmp_path, api), "leaks", "--provider", "azure", "-c", "gone")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "",
        "looked in azure: eastus (the default)\nnothing is left\n",
    )


@pytest.mark.parametrize(
    ("az", "said"),
    [("logged out", "no Azure credentials found"), ("expired", "the Azure login has expired")],
)
def test_without_credentials_that_is_the_line(api: Api, tmp_path: Path, az: str, said: str) -> None:
    done = gpuctl(environment(tmp_path, api, az), "leaks", "--provider", "azure")
    hint = "log in (az login), or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}; {hint}\n")


@pytest.mark.slow
def test_an_azure_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    done = gpuctl(environment(tmp_path), "leaks", "--provider", "azure")
    assert done.returncode == 1
    assert re.fullmatch(r"error: Azure does not respond: .*; check the network\n", done.stderr)


@pytest.mark.parametrize("package", ["azure.identity", "azure.mgmt.compute"])
def test_a_package_that_is_missing_is_named(api: Api, tmp_path: Path, package: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{package!r}] = None\n")
    env = {**environment(tmp_path, api), "PYTHONPATH": str(tmp_path)}
    done = gpuctl(env, "leaks", "--provider", "azure")
    assert (done.returncode, done.stderr) == (
        2,
        f"error: azure needs {package}, which is not installed; pip install 'gpuctl-spot[azure]'\n",
    )
