"""``up``, ``repair``, ``down`` and ``leaks`` of a cluster on Google Cloud by the real command line: the real engine and
program, with a program that stands in for Pulumi's CLI (``pulumi_cli``), a project on loopback that holds what is made
in it (``google_held``), and our own server for its bucket. The test plays the machines.

What the project cannot do: change what no `up` of these tests changes, and wait for anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket
from tests.fakes.gcp.api import PROJECT, URL, Asked, Google, refusal
from tests.fakes.gcp.buckets import Stored
from tests.fakes.gcp.held import OF_ALL, Held
from tests.fakes.stores import gcs
from tests.fakes.user import User
from tests.stacks.rented import interruptions, losses, two_users

TYPE = "a2-highgpu-1g"
REGION, FIRST, SECOND = "us-central1", "us-central1-a", "us-central1-b"


class Owner(User):
    """Of a project that sells the type in two zones of a region, and has a quota of GPUs there."""

    up_flags = ("--provider", "gcp", "--type", TYPE)

    def __init__(self, folder: Path, google: Google, storage: str) -> None:
        """``storage``: where what is in buckets is."""
        super().__init__(folder, {})
        self.gpus = 8.0
        """The quota of A100s as spot."""
        self.google = google
        self.held = Held(google)
        self.storage = storage
        self.buckets = Stored(google, storage)
        sold = [{"name": TYPE}, {"name": "a2-highgpu-2g"}]
        google.put_everywhere("machineTypes", {f"zones/{FIRST}": sold, f"zones/{SECOND}": sold})
        google.put_everywhere("acceleratorTypes", {})
        google.put(f"/compute/v1/{OF_ALL}", {"name": PROJECT, "quotas": []})
        google.put(f"regions/{REGION}", self._region)

    def machines(self) -> list[str]:
        return [str(one["name"]) for one in self.held.of("instances")]

    def delete_bucket(self) -> None:
        name = self.known().bucket.split("/")[2]
        for key in gcs.generations(self.storage, name):
            gcs.delete(self.storage, name, key)
        gcs.delete(self.storage, name)
        del self.buckets.things[name]

    def group(self) -> str:
        (group,) = [id_ for id_ in self.held.things if "/instanceGroupManagers/" in id_]
        return group

    def zone(self) -> str:
        return self.group().split("/")[3]

    def _region(self, _: Any) -> dict[str, Any]:
        quota = {"limit": self.gpus, "usage": float(len(self.machines()))}
        quotas = [{"metric": f"{kind}NVIDIA_A100_GPUS", **quota} for kind in ("", "PREEMPTIBLE_")]
        zones = [f"{URL}/zones/{zone}" for zone in (FIRST, SECOND)]
        return {"name": REGION, "status": "UP", "zones": zones, "quotas": quotas}


@pytest.fixture
def owner(project: Google, gcs_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("GOOGLE_BASE_URL", gcs_endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "test")
    with Owner(tmp_path, project, gcs_endpoint) as owner:
        yield owner


@pytest.mark.slow
def test_up_makes_machines_that_find_gpuctl_in_the_bucket_and_down_leaves_the_bucket_alone(owner: Owner) -> None:
    owner.boot_machines()
    done = owner.up()
    assert f"cluster {owner.cluster} is up: 2 nodes (gcp)" in done.stdout
    assert (owner.zone(), len(owner.machines())) == (FIRST, 2)
    assert all(f"{name} is live" in done.stderr for name in owner.machines())
    assert owner.run("status").stdout.count(" live ") == 2
    bucket, spec = owner.bucket(), owner.spec()
    assert (spec.name, spec.provider, spec.nodes_max, spec.slots) == (owner.cluster, "gcp", 2, 1)
    (wheel,) = [entry.key for entry in bucket.list(layout.BOOT) if entry.key.endswith(".whl")]
    assert wheel in owner.last_up()["user_data"], "the machines are told of another wheel than the one that is there"
    there = owner.run("leaks", code=1).stdout  # where the cluster is known to be
    assert all(f" {kind} " in there for kind in ("instance", "disk", "network", "role binding", "tag value"))

    bucket.put("jobs/a-1/checkpoints/part", b"kept")
    assert owner.run("down", "-y").stdout.splitlines()[0] == f"cluster {owner.cluster} is down"
    for flags, looked in (([], f"{REGION} (used before, last used)"), (["--all-regions"], f"europe-west4, {REGION}")):
        done = owner.run("leaks", "--provider", "gcp", *flags)
        assert (done.stdout, done.stderr) == ("", f"looked in gcp: {looked}\nnothing is left\n")
    assert [one for one in owner.held.things.values() if not one.get("deleted")] == []
    assert owner.held.policy["bindings"] == []
    assert [entry.key for entry in bucket.list("")] == ["jobs/a-1/checkpoints/part", "past.json"]
    assert owner.run("status", code=2).stderr.startswith(f"error: no cluster named '{owner.cluster}'")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("way", "goes_on"), interruptions.every_way("gcp"))
def test_up_that_broke_off_at_any_resource_leaves_nothing(
    owner: Owner, way: interruptions.Way | None, goes_on: bool
) -> None:
    owner.boot_machines()
    interruptions.at_every_resource(owner, way, goes_on=goes_on)


@pytest.mark.slow
@pytest.mark.parametrize("lose", losses.ALL)
def test_machines_go_whatever_else_is_gone(owner: Owner, lose: Callable[[User], None]) -> None:
    losses.machines_go_all_the_same(owner, lose)


@pytest.mark.parametrize("way", interruptions.A_FEW)
def test_up_that_broke_off_at_its_service_account_leaves_nothing(
    owner: Owner, way: Callable[[User, str], None]
) -> None:
    interruptions.at_one(owner, way, f"create gcp:serviceaccount/account:Account {owner.cluster}")


@pytest.mark.slow
def test_it_grows_shrinks_is_repaired_and_comes_back_with_the_bucket_that_down_has_left(owner: Owner) -> None:
    owner.boot_machines()
    owner.gpus = 3.0
    owner.up(nodes="1")
    (first,) = owner.machines()
    token = owner.spec().token
    (template,) = owner.held.of("instanceTemplates")
    owner.up("--idle-minutes", "60", "--ssh-from", "203.0.113.7/32", nodes="1:3")
    assert len(owner.machines()) == 3 and first in owner.machines()
    old, new = owner.held.of("instanceTemplates")
    assert old == template, "the first machine is still of it, and is made of it again"
    (version,) = owner.held.things[owner.group()]["versions"]
    assert version["instanceTemplate"] == new["selfLink"]
    assert owner.declared("InstanceGroupManager")["versions"] == [version]
    (rule,) = [one for one in owner.held.of("firewalls") if one["name"].endswith("-ssh")]
    assert rule["sourceRanges"] == ["203.0.113.7/32"]
    assert owner.spec().token == token

    owner.held.resize(owner.group(), 1)
    assert owner.run("repair", "-y").stdout == f"cluster {owner.cluster} is complete\n"
    assert len(owner.machines()) == 3
    owner.up(nodes="2")
    assert len(owner.machines()) == 2

    owner.held.delete(owner.group())
    assert owner.run("repair", "-y").stdout == f"cluster {owner.cluster} is complete\n"
    assert (owner.zone(), len(owner.machines())) == (FIRST, 2)
    assert list(owner.held.of("instanceTemplates")) == [new]

    url = owner.known().bucket
    owner.run("down", "-y")
    owner.up(nodes="1")
    assert owner.known().bucket == url
    owner.run("down", "-y", "--delete-checkpoints", owner.cluster)
    with pytest.raises(GpuctlError):  # it is gone, though its tag has the first one's identity
        open_bucket(url, patience_s=0.0).list("")


@pytest.mark.slow
def test_a_zone_without_machines_is_cleared_and_the_next_one_is_tried(owner: Owner) -> None:
    owner.boot_machines()
    owner.held.without.append(FIRST)
    said = owner.up("--wait", "0.01").stderr
    assert f"zones to try: {FIRST}, {SECOND}" in said
    assert f"{FIRST}: 0 of 2 machines started within 0.01 minutes: no capacity for {TYPE} in {FIRST}" in said
    assert f"giving up {FIRST}, next is {SECOND}" in said and f"{FIRST} is cleaned up" in said
    assert (owner.zone(), len(owner.machines())) == (SECOND, 2)
    owner.run("down", "-y")

    owner.held.without.append(SECOND)
    again = owner.up("--wait", "0.01", code=1).stderr
    assert "another cluster" not in again, "of the bucket that the first one has left"
    assert again.splitlines()[-1] == (
        f"error: 0 of 2 machines started within 0.01 minutes: no capacity for {TYPE} in {SECOND}; "
        "wait longer (--wait), use another --region or --type, or --on-demand "
        "(remaining: 2 bucket bindings, 1 firewall rule, 1 instance group and 9 more, $0.00/h; "
        f"`gpuctl down --cluster {owner.cluster}` removes it)"
    )
    assert owner.held.things[owner.group()]["targetSize"] == 0, "a machine may come, though nobody waits for it"
    owner.run("down", "-y")
    assert owner.run("leaks", "--provider", "gcp").stdout == ""


@pytest.mark.slow
def test_machines_that_a_cloud_does_not_tell_of_for_a_moment_are_not_made_elsewhere(owner: Owner) -> None:
    owner.boot_machines()
    owner.up("--zone", SECOND, nodes="1")

    before = owner.google.held

    def out_of_order(one: Asked) -> Any:
        if one.path.endswith(f"/{owner.group()}"):
            return refusal(500, "Internal error. Please try again.", "backendError")
        return before(one)

    owner.google.held = out_of_order
    done = owner.run("up", "-y", "--nodes", "2", code=1)
    assert done.stderr.splitlines()[-1].startswith("error: Google Cloud answered 500: ")
    assert "zones to try" not in done.stderr
    owner.google.held = before
    owner.run("up", "-y", "--nodes", "2")
    assert (owner.zone(), len(owner.machines())) == (SECOND, 2)


@pytest.mark.slow
def test_what_pulumi_does_not_know_of_is_found_by_its_label_and_fails_down(owner: Owner) -> None:
    owner.boot_machines()
    owner.up(nodes="1")
    disk = f"{OF_ALL}/zones/{SECOND}/disks/scratch"
    labels = {"gpuctl-cluster": owner.cluster}
    owner.held.add(disk, {"sizeGb": "730", "type": f"{URL}/zones/{SECOND}/diskTypes/pd-balanced", "labels": labels})
    done = owner.run("down", "-y", code=1)
    assert done.stdout == "left: disk scratch in us-central1, $0.1/h\n"
    assert done.stderr.splitlines()[-1] == (
        f"error: 1 thing could not be removed; run `gpuctl down --cluster {owner.cluster}` again,"
        " or remove whatever has its name: "
        f"gpuctl down --by-tag {owner.cluster} --provider gcp --region {REGION}"
    )
    del owner.held.things[disk]
    again = owner.run("down", "-y")
    assert f"there is no stack of {owner.cluster}" in again.stderr
    assert again.stdout.splitlines()[0] == f"cluster {owner.cluster} is down"


@pytest.mark.slow
def test_what_the_project_may_not_have_is_not_begun(owner: Owner) -> None:
    owner.gpus = 0.0
    done = owner.up(code=2)
    assert re.search(r"^error: quota: NVIDIA_A100_GPUS in us-central1 is 0; see https://", done.stderr, re.M)
    assert done.stderr.splitlines()[-1].startswith("error: gcp would refuse these machines; ")
    assert not owner.held.things
    assert not (owner.folder / "state" / "pulumi").exists()


@pytest.mark.slow
def test_what_is_not_said_again_stays_as_it_was(owner: Owner) -> None:
    owner.boot_machines()
    owner.up("--zone", SECOND, "--on-demand", "--idle-minutes", "60", nodes="1:2")
    two = set(owner.machines())
    again = owner.run("up", "-y", "--nodes", "1:3")
    assert again.stdout.startswith("nodes: 1:2 -> 1:3\ntotal: $"), "what changes, and not the whole plan again"
    assert "zones to try" not in again.stderr
    assert (owner.zone(), len(owner.machines())) == (SECOND, 3) and two < set(owner.machines())
    assert (owner.spec().idle_minutes, owner.spec().nodes_min, owner.spec().nodes_max) == (60, 1, 3)

    refused = owner.run("up", "-y", "--zone", FIRST, code=2).stderr.splitlines()[-1]
    hint = f"run `gpuctl down --cluster {owner.cluster}` first, or choose another name with --cluster"
    assert refused == f"error: {owner.cluster} has machines in zone {SECOND}, not {FIRST}; {hint}"
    assert len(owner.machines()) == 3


@pytest.mark.slow
def test_a_second_user_changes_nothing_of_what_the_first_has_left(owner: Owner) -> None:
    two_users.a_second_user_changes_nothing(owner)


@pytest.mark.slow
def test_it_comes_back_after_a_colleague_has_removed_it(owner: Owner) -> None:
    two_users.it_comes_back_after_a_colleague_has_removed_it(owner)


@pytest.mark.slow
def test_a_stale_note_makes_nothing_beside_a_namesake(owner: Owner) -> None:
    two_users.a_stale_note_makes_nothing_beside_a_namesake(owner)
