"""Where the bucket that a user gives is, on Azure."""

from __future__ import annotations

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.azure.storage_accounts import bucket_group
from tests.fakes.azure.api import SUBSCRIPTION, serving
from tests.fakes.azure.cloud import Subscription
from tests.fakes.requests import asked


def test_the_resource_group_of_a_bucket_that_is_there_is_found() -> None:
    there = Subscription()
    for group, name in (("Others", "labs"), ("Labs-Data", "lab")):
        there.put(f"resourceGroups/{group}/providers/Microsoft.Storage/storageAccounts/{name}")
    with serving({}, there.live) as api:
        assert bucket_group(asked("azure", bucket="az://box/runs?account_name=lab"), api.account()) == "Labs-Data"
        with pytest.raises(
            BadInput, match=rf"no storage account la in subscription {SUBSCRIPTION}; .*own subscription"
        ):
            bucket_group(asked("azure", bucket="az://box/runs?account_name=la"), api.account())
