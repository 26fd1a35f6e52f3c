"""The table of providers, and what each can do."""

from __future__ import annotations

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.provider_names import PROVIDERS
from gpuctl.stacks.providers.interface import CanPreempt, Dialog, RentsMachines, UsesMachines, provider


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_that_is_named_is_there(name: str) -> None:
    assert provider(name, Dialog()).name == name


@pytest.mark.parametrize(
    ("can", "names"),
    [
        (UsesMachines, {"local", "ssh"}),
        (RentsMachines, {"aws", "gcp", "azure"}),
        (CanPreempt, {"local"}),
    ],
)
def test_a_provider_is_asked_what_it_can_do(can: type, names: set[str]) -> None:
    assert {name for name in PROVIDERS if isinstance(provider(name, Dialog()), can)} == names


def test_an_unknown_provider_is_answered_with_all_names() -> None:
    with pytest.raises(BadInput) as refused:
        provider("awss", Dialog())
    assert all(name in str(refused.value) for name in PROVIDERS)
