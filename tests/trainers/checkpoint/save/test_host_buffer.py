"""What a save copies to host memory: the bytes of this rank's share, and no more memory than that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from gpuctl.trainers.checkpoint.save.host_buffer import BufferLayout, HostBuffer, layout_of
from gpuctl.trainers.checkpoint.save.partition import partition_of
from gpuctl.trainers.checkpoint.state.state_tensors import StateTensors
from gpuctl.trainers.checkpoint.tensor_bytes import flat_bytes


def transposed() -> Tensor:
    return torch.arange(768 * 1024, dtype=torch.float32).reshape(768, 1024).t()


def channels_last() -> Tensor:
    images = torch.arange(64 * 48 * 16 * 16, dtype=torch.float32).reshape(64, 48, 16, 16)
    return images.to(memory_format=torch.channels_last)


def laid_of(contents: StateTensors, rank: int, world: int) -> BufferLayout:
    return layout_of(partition_of(contents, rank, world), contents.values)


@pytest.mark.parametrize("tensor", [transposed(), channels_last()], ids=["transposed", "channels last"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_share_of_any_layout_is_copied_without_a_second_tensor(tensor: Tensor, world: int) -> None:
    assert not tensor.is_contiguous()
    contents = StateTensors({"odd": tensor}, {"odd"}, set(), {})
    shares = []
    for rank in range(world):
        layout, staging = laid_of(contents, rank, world), HostBuffer()
        staging.fill(layout, contents)
        with profile(profile_memory=True) as profiled:
            data = staging.fill(layout, contents)
        taken = max((event.cpu_memory_usage for event in profiled.function_events or ()), default=0)
        assert taken < tensor.nbytes // 100, "no copy in between"
        ((part, at),) = layout.slices
        shares.append(bytes(data[at : at + part.high - part.low]))
    whole = flat_bytes(tensor.clone(memory_format=torch.contiguous_format)).numpy().tobytes()
    assert b"".join(shares) == whole


def test_several_threads_copy_a_large_share_and_each_byte_lies_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    numbers = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {
        "large": numbers[: 33 << 20].view(torch.float32),
        "small": numbers[:1001],
        "turned": numbers[33 << 20 :].view(torch.int64).reshape(-1, 1024).t(),
    }
    contents = StateTensors(tensors, set(tensors), set(), {})
    for world in (1, 2):
        for rank in range(world):
            layout, staging = laid_of(contents, rank, world), HostBuffer()
            data = staging.fill(layout, contents)
            for part, at in layout.slices:
                whole = flat_bytes(tensors[part.name].contiguous()).numpy().tobytes()
                assert data[at : at + part.high - part.low] == whole[part.low : part.high], (part, rank)


def test_a_buffer_that_is_being_prepared_is_filled_once_it_is_there() -> None:
    """Else what is uploaded is the one that the other has replaced: zeros, with valid digests."""
    contents = StateTensors({"some": torch.arange(1, 1001)}, {"some"}, set(), {})
    layout = laid_of(contents, 0, 1)
    staging = HostBuffer()
    staging.prepare(300 << 20)
    data = staging.fill(layout, contents)
    ((part, at),) = layout.slices
    assert bytes(data[at : at + part.high - part.low]) == flat_bytes(contents.tensors["some"]).numpy().tobytes()
    assert staging.bytes >= 300 << 20


def test_between_what_is_saved_there_is_nothing_of_the_save_before() -> None:
    before = StateTensors({"all": torch.full((4096,), 255, dtype=torch.uint8)}, {"all"}, set(), {"value": b"\xff" * 99})
    after = StateTensors(
        {name: torch.ones(3, dtype=torch.uint8) for name in "ab"}, {"a", "b"}, set(), {"value": b"\x01"}
    )
    staging = HostBuffer()
    staging.fill(laid_of(before, 0, 1), before)
    data = staging.fill(laid_of(after, 0, 1), after)
    assert sorted(bytes(data)) == [0] * (len(data) - 7) + [1] * 7
    assert len(data) > 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("tensor", [transposed(), channels_last()], ids=["transposed", "channels last"])
def test_a_share_on_a_gpu_of_any_layout_is_there_when_it_is_filled(tensor: Tensor) -> None:
    contents = StateTensors({"odd": tensor.cuda(), "plain": tensor.contiguous().cuda()}, {"odd", "plain"}, set(), {})
    layout = laid_of(contents, 0, 1)
    data = HostBuffer().fill(layout, contents)
    whole = flat_bytes(tensor.clone(memory_format=torch.contiguous_format)).numpy().tobytes()
    assert [bytes(data[at : at + part.high - part.low]) for part, at in layout.slices] == [whole, whole]
