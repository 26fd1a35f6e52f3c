"""Which version of an image Azure's machines get, asked of a server with Azure's shapes (``azure_api``)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulumi
import pytest
from pulumi.runtime.stack import run_pulumi_func

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.azure.images import Image, image, newest
from gpuctl.stacks.program import declare
from tests.fakes.azure.api import SUBSCRIPTION, Api, environment, recorded, serving
from tests.fakes.requests import asked

HPC = Image("microsoft-dsvm", "ubuntu-hpc", "2404", "latest")
VERSIONS = (
    "providers/microsoft.compute/locations/eastus/publishers/microsoft-dsvm/artifacttypes/vmimage/offers/ubuntu-hpc"
    "/skus/2404/versions"
)
SCALE_SET = "resourcegroups/gpuctl-demo/providers/microsoft.compute/virtualmachinescalesets/gpuctl-demo"


@pytest.fixture
def api() -> Iterator[Api]:
    versions = [{"name": name, "location": "eastus"} for name in ("24.04.9", "24.04.2026010101", "24.04.10")]
    with serving(recorded("subscription") | {VERSIONS: [200, versions]}) as served:
        yield served


def test_the_newest_is_the_one_with_the_greatest_number(api: Api) -> None:
    assert newest(HPC, "eastus", SUBSCRIPTION, api.account()) == "24.04.2026010101"
    api.answers[VERSIONS] = [
        200,
        [{"name": "24.04.9", "location": "eastus"}, {"name": "24.04.10", "location": "eastus"}],
    ]
    assert newest(HPC, "eastus", SUBSCRIPTION, api.account()) == "24.04.10"


def test_a_region_without_the_image_is_one_line(api: Api) -> None:
    api.answers[VERSIONS] = [200, []]
    with pytest.raises(BadInput, match="Azure has no image microsoft-dsvm:ubuntu-hpc:2404 in eastus; take another"):
        newest(HPC, "eastus", SUBSCRIPTION, api.account())


@pytest.mark.parametrize("name", ["ubuntu-hpc", "a:b:c", "a::c:d"])
def test_an_image_must_have_four_parts(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name!r} is not an Azure image; for example microsoft-dsvm:ubuntu-hpc:2404"):
        image(name)


class LoggedIn(pulumi.runtime.Mocks):
    """Pulumi's engine, of a user with a subscription."""

    def __init__(self) -> None:
        self.sets: list[Any] = []

    def new_resource(self, args: pulumi.runtime.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        if args.typ.endswith(":VirtualMachineScaleSet"):
            self.sets.append(args.inputs)
        return args.name, {"name": args.name, "principalId": "p"}

    def call(self, args: pulumi.runtime.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        return {**args.args, "subscriptionId": SUBSCRIPTION, "objectId": "me"}, []


def test_a_scale_set_is_told_a_version_and_the_number_of_machines_that_it_has(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.answers[SCALE_SET] = [200, {"name": "gpuctl-demo", "sku": {"name": "Standard_ND96asr_v4", "capacity": 3}}]
    for name, value in environment(tmp_path, api).items():
        monkeypatch.setenv(name, value)
    engine = LoggedIn()

    async def run() -> None:
        pulumi.runtime.settings.set_root_resource(None)  # type: ignore[arg-type]
        pulumi.runtime.set_mocks(engine, project="gpuctl", stack="demo", preview=True)
        await run_pulumi_func(lambda: declare(asked("azure")))

    asyncio.run(run())
    (told,) = engine.sets
    assert told["sku"]["capacity"] == 3
    assert told["virtualMachineProfile"]["storageProfile"]["imageReference"] == {
        "publisher": "microsoft-dsvm",
        "offer": "ubuntu-hpc",
        "sku": "2404",
        "version": "24.04.2026010101",
    }
