"""What ``leaks`` found on Google Cloud is deleted without Pulumi, in a project that refuses and takes its time as
Google does, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gpuctl.stacks.clouds.answers import Leftover
from gpuctl.stacks.clouds.gcp.cleanup.leaks import scan
from gpuctl.stacks.clouds.gcp.cleanup.removal import remove
from tests.fakes.gcp.api import PROJECT, URL, Asked, Google, refusal
from tests.fakes.gcp.buckets import Buckets
from tests.fakes.gcp.held import OF_ALL, Held

REGION, ZONE = "us-central1", "us-central1-a"
BASE = URL.removesuffix(OF_ALL)


class Clock:
    """Time passes by pauses alone."""

    def __init__(self) -> None:
        self.s = 0.0

    def pause(self, s: float) -> None:
        self.s += s

    def now(self) -> float:
        return self.s


class Project:
    """With whole clusters in it."""

    def __init__(self, google: Google) -> None:
        self.google = google
        self.held = Held(google)
        self.buckets = Buckets(google)
        self.clock = Clock()
        self.said: list[str] = []

    def add(self, cluster: str) -> None:
        """All that a program makes, two machines, and what somebody has hung on the network."""
        own = {"gpuctl-cluster": cluster, "gpuctl-id": "0a1b2c3d4e"}
        name, words = f"gpuctl-{cluster}", f"gpuctl cluster {cluster} (id 0a1b2c3d4e)"
        network = f"{OF_ALL}/global/networks/{name}"
        in_region, in_zone = f"{OF_ALL}/regions/{REGION}", f"{OF_ALL}/zones/{ZONE}"
        add, inside = self.held.add, {"network": f"{BASE}{network}"}
        add(network, {"description": f"network of the {words}"})
        add(f"{in_region}/subnetworks/{name}", inside)
        add(f"{in_region}/routers/by-hand-in-{cluster}", inside)
        add(f"{OF_ALL}/global/firewalls/{name}-nodes", inside)
        add(f"{in_region}/resourcePolicies/{name}", {})
        email = f"{name}@{PROJECT}.iam.gserviceaccount.com"
        add(f"{OF_ALL}/serviceAccounts/{email}", {"email": email, "displayName": f"nodes of the {words}"})
        role = f"{OF_ALL}/roles/gpuctl_{cluster}_2026_11_21"
        add(role, {"name": role, "title": f"leave the group of the {words}"})
        member = f"serviceAccount:{email}"
        condition = {"title": "own group", "description": f"leave the group of the {words}"}
        self.held.policy["bindings"].append({"role": role, "members": [member], "condition": condition})
        key, value = f"tagKeys/{cluster}", f"tagValues/{cluster}"
        marks = {"description": f"marks what belongs to the {words}", "parent": OF_ALL}
        add(key, {"name": key, "shortName": name, **marks})
        add(value, {"name": value, "parent": key, "shortName": "yes"})
        template = f"{OF_ALL}/global/instanceTemplates/{name}-1"
        properties = {"labels": own, "machineType": "a2-highgpu-1g", "network": f"{BASE}{network}"}
        add(template, {"properties": properties})
        group = f"{in_zone}/instanceGroupManagers/{name}"
        tagged = {"resourceManagerTags": {key: value}}
        versions = [{"instanceTemplate": f"{BASE}{template}"}]
        placed = {"resourcePolicies": {"workloadPolicy": f"{BASE}{in_region}/resourcePolicies/{name}"}}
        add(group, {"baseInstanceName": name, "targetSize": 0, "versions": versions, "params": tagged, **placed})
        self.held.resize(group, 2)
        rule = f"{in_region}/forwardingRules/{name}"
        add(rule, {"labels": own})
        add(f"{in_region}/addresses/{name}", {"labels": own, "users": [f"{BASE}{rule}"]})
        bucket = self.buckets.add(f"{name}-1", labels=own)
        bucket.bind("roles/storage.objectUser", member)
        bucket.bind("roles/storage.admin", "user:me@example.com")

    def found(self, cluster: str | None = "demo") -> tuple[Leftover, ...]:
        seen = scan(["all"], cluster)
        assert seen.unseen == ()
        return seen.found

    def remove(self, leftovers: Sequence[Leftover]) -> None:
        remove(leftovers, self.said.append, pause=self.clock.pause, now=self.clock.now)

    def refused(self) -> list[str]:
        return [one for one in self.said if not one.startswith("deleted ")]

    def deletions(self) -> list[str]:
        return [one.path.split("/")[-2] for one in self.google.asked if one.method == "DELETE"]


@pytest.fixture
def there(project: Google) -> Iterator[Project]:
    made = Project(project)
    made.add("demo")
    made.held.add(f"{OF_ALL}/global/networks/default", {})
    yield made


@pytest.mark.slow
def test_everything_of_a_cluster_goes_and_nothing_else(there: Project) -> None:
    there.add("next")
    theirs = there.found("next")
    strangers = {"role": "roles/owner", "members": ["user:me@example.com"]}
    there.held.policy["bindings"].insert(0, strangers)
    there.held.policy["auditConfigs"] = [{"service": "allServices"}]
    mine = there.found()
    assert len({one.kind for one in mine}) == 17, "one of each kind"
    there.remove(mine)
    assert there.refused() == []
    assert there.found() == ()
    assert there.found("next") == theirs
    assert f"{OF_ALL}/global/networks/default" in there.held.things
    policy = there.held.policy
    assert policy["bindings"][0] == strangers and len(policy["bindings"]) == 2
    assert policy["auditConfigs"] == [{"service": "allServices"}]
    kept = there.buckets.things["gpuctl-demo-1"]
    assert [one["role"] for one in kept.policy["bindings"]] == ["roles/storage.admin"]


def test_it_waits_until_google_is_done(there: Project) -> None:
    there.held.operations.looks = 5
    there.remove(there.found())
    assert there.refused() == [] and there.found() == ()
    assert there.clock.s > 5 * 2.0
    assert there.said[0] == "deleted instance group gpuctl-demo"
    assert there.said[-1] == "deleted tag key tagKeys/demo"


def test_the_group_goes_before_the_machines_that_it_would_replace(there: Project) -> None:
    there.remove(there.found())
    order = list(dict.fromkeys(there.deletions()))
    assert order.index("instanceGroupManagers") < order.index("instances")
    assert order.index("subnetworks") < order.index("networks")
    assert list(there.held.of("instances")) == []


def test_what_is_gone_already_is_no_failure(there: Project) -> None:
    found = there.found()
    there.remove(found)
    there.said.clear()
    there.remove(found)
    assert there.said == []
    assert there.clock.s == 0


def test_what_is_in_use_for_a_while_is_tried_again(there: Project) -> None:
    """A tag's value stays bound to its group for some time after that is gone."""
    there.held.ghosts = 4
    there.remove(there.found())
    assert there.refused() == [] and there.found() == ()
    assert there.clock.s >= 4 * 10.0


@pytest.mark.slow
def test_what_stays_in_use_is_told_with_the_reason(there: Project) -> None:
    lasting = f"{OF_ALL}/regions/{REGION}/vpnGateways/theirs"
    there.held.add(lasting, {"network": f"{BASE}{OF_ALL}/global/networks/gpuctl-demo"})
    there.remove(there.found())
    (said,) = there.refused()
    assert said.startswith("network gpuctl-demo cannot be deleted: Google Cloud refused: The networks resource ")
    assert said.endswith(f"is already being used by '{lasting}'")
    assert [one.kind for one in there.found()] == ["network"]
    assert 600 <= there.clock.s < 700, "the deadline"


@pytest.mark.slow
def test_what_google_refuses_for_good_is_not_waited_for(there: Project) -> None:
    held = there.held.answer

    def forbidden(one: Asked) -> Any:
        if one.method == "DELETE" and "/instanceGroupManagers/" in one.path:
            return refusal(403, "Required 'compute.instanceGroupManagers.delete' permission for 'x'")
        return held(one)

    there.google.held = forbidden
    Buckets(there.google, there.buckets.things)
    there.remove(there.found())
    why = "these Google Cloud credentials may not do this: Required 'compute.instanceGroupManagers.delete'"
    assert there.refused()[0].startswith(f"instance group gpuctl-demo cannot be deleted: {why}")
    assert there.clock.s == 0
    assert {"instance group", "instance", "network", "tag key"} <= {one.kind for one in there.found()}
    assert "forwarding rule" not in {one.kind for one in there.found()}, "it stands in nobody's way"


def test_an_operation_that_failed_is_told_with_its_reason(there: Project) -> None:
    held = there.held.answer
    failed = {"errors": [{"code": "RESOURCE_PROTECTED", "message": "it is protected\nagainst deletion"}]}
    operation = f"{OF_ALL}/global/operations/operation-x"

    def protected(one: Asked) -> Any:
        if one.method == "DELETE" and "/firewalls/" in one.path:
            return 200, {"selfLink": f"{BASE}{operation}", "status": "RUNNING"}
        if one.path.endswith(operation):
            return 200, {"selfLink": f"{BASE}{operation}", "status": "DONE", "error": failed}
        return held(one)

    there.google.held = protected
    Buckets(there.google, there.buckets.things)
    there.remove(there.found())
    said = "firewall rule gpuctl-demo-nodes cannot be deleted: Google Cloud refused: it is protected against deletion"
    assert there.refused()[0] == said
    assert {one.kind for one in there.found()} == {"firewall rule", "network"}


def test_a_policy_that_somebody_changes_meanwhile_is_read_again(there: Project) -> None:
    held, times = there.held.answer, iter(range(2))

    def busy(one: Asked) -> Any:
        if one.path.endswith(":setIamPolicy") and next(times, None) is not None:
            there.held.policy["etag"] = str(int(there.held.policy["etag"]) + 1)
        return held(one)

    there.google.held = busy
    Buckets(there.google, there.buckets.things)
    there.remove(there.found())
    assert there.refused() == [] and there.held.policy["bindings"] == []


@pytest.mark.slow
def test_a_template_that_a_group_uses_and_a_key_with_values_stay(there: Project) -> None:
    """Only what is given is touched, even if it cannot be deleted alone."""
    some = [one for one in there.found() if one.kind in ("instance template", "tag key")]
    before = set(there.held.things)
    there.remove(some)
    assert set(there.held.things) == before
    assert len(there.refused()) == 2
    assert set(there.deletions()) == {"instanceTemplates", "tagKeys"}


def test_identity_owner_and_day_of_a_leftover_are_told(there: Project) -> None:
    silent = {"tag value", "subnet", "router", "firewall rule", "placement policy", "instance group"}
    for one in there.found():
        assert one.cluster_id == "0a1b2c3d4e" or one.kind in silent - {"tag value"}, one
        assert one.ref
