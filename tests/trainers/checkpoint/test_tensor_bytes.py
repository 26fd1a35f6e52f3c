"""The bytes of tensors of any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpuctl import Checkpointer
from gpuctl.trainers.checkpoint.tensor_bytes import copy_bytes, flat_bytes
from tests.trainers.rank_scripts.checkpointing import kept, same

Change = Callable[[Tensor], Tensor]


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of any kind: strided, transposed, expanded, conjugated, negated."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]))
    count = torch.Size(shape).numel()
    tensor = torch.arange(count).to(dtype).mul(1 + 1j if dtype.is_complex else 1).reshape(shape)
    for kind in draw(
        st.lists(st.sampled_from(["transpose", "narrow", "stride", "expand", "conj", "imag"]), max_size=3)
    ):
        tensor = changed(draw, kind, tensor)
    return tensor


def changed(draw: st.DrawFn, kind: str, tensor: Tensor) -> Tensor:
    if kind in ("conj", "imag"):
        turned = tensor.conj() if tensor.is_complex() else tensor
        return turned.imag if kind == "imag" and tensor.is_complex() else turned
    if not tensor.dim():
        return tensor
    dim = draw(st.integers(0, tensor.dim() - 1))
    if kind == "transpose":
        return tensor.transpose(dim, 0)
    if kind == "stride":
        return tensor[(slice(None),) * dim + (slice(None, None, 2),)]
    if kind == "expand":
        return tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 3, *tensor.shape[dim:])
    first = draw(st.integers(0, tensor.shape[dim]))
    return tensor.narrow(dim, first, draw(st.integers(0, tensor.shape[dim] - first)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(views(), st.data())
def test_any_stretch_of_any_view_is_that_of_its_elements_in_order(tensor: Tensor, data: st.DataObject) -> None:
    raw = flat_bytes(tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))
    low = data.draw(st.integers(0, tensor.numel())) * tensor.element_size()
    high = data.draw(st.integers(low // tensor.element_size(), tensor.numel())) * tensor.element_size()
    out = torch.full((high - low,), 7, dtype=torch.uint8)
    copy_bytes(tensor, low, high, out)
    assert torch.equal(out, raw[low:high])


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.arange(2.0)[::2],
        lambda: torch.arange(6.0).reshape(3, 2)[:1, 1],
        lambda: torch.full((2, 2), 1 + 2j).conj(),
        lambda: torch.full((2, 2), 1 + 2j).conj().imag,
    ],
    ids=["one of every second", "one of a column", "conjugated", "negated"],
)
def test_a_buffer_that_is_a_view_is_saved_and_restored_in_place(file_url: str, odd: Callable[[], Tensor]) -> None:
    def made() -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer("odd", odd())
        return module

    kept(Checkpointer(file_url), 1, {"model": made()})
    other = made()
    assert isinstance(other.odd, Tensor)
    place = other.odd
    place.zero_()
    assert Checkpointer(file_url).restore({"model": other}) == 1
    assert other.odd is place
    assert same(place, odd())
