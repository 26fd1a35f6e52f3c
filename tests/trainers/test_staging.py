"""What a save copies to host memory: the bytes of this rank's share, and no more memory than that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from gpuctl.trainers.raw import flat_bytes
from gpuctl.trainers.shares import share_of
from gpuctl.trainers.staging import Laid, Staging, lay
from gpuctl.trainers.state import Contents


def transposed() -> Tensor:
    return torch.arange(768 * 1024, dtype=torch.float32).reshape(768, 1024).t()


def channels_last() -> Tensor:
    images = torch.arange(64 * 48 * 16 * 16, dtype=torch.float32).reshape(64, 48, 16, 16)
    return images.to(memory_format=torch.channels_last)


def laid_of(contents: Contents, rank: int, world: int) -> Laid:
    return lay(share_of(contents, rank, world), contents.values)


@pytest.mark.parametrize("tensor", [transposed(), channels_last()], ids=["transposed", "channels last"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_share_of_any_layout_is_copied_without_a_second_tensor(tensor: Tensor, world: int) -> None:
    assert not tensor.is_contiguous()
    contents = Contents({"odd": tensor}, {"odd"}, set(), {})
    shares = []
    for rank in range(world):
        laid, staging = laid_of(contents, rank, world), Staging()
        staging.fill(laid, contents)
        with profile(profile_memory=True) as profiled:
            data = staging.fill(laid, contents)
        taken = max((event.cpu_memory_usage for event in profiled.function_events or ()), default=0)
        assert taken < tensor.nbytes // 100, "no copy in between"
        ((part, at),) = laid.slices
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
    contents = Contents(tensors, set(tensors), set(), {})
    for world in (1, 2):
        for rank in range(world):
            laid, staging = laid_of(contents, rank, world), Staging()
            data = staging.fill(laid, contents)
            for part, at in laid.slices:
                whole = flat_bytes(tensors[part.name].contiguous()).numpy().tobytes()
                assert data[at : at + part.high - part.low] == whole[part.low : part.high], (part, rank)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("tensor", [transposed(), channels_last()], ids=["transposed", "channels last"])
def test_a_share_on_a_gpu_of_any_layout_is_there_when_it_is_filled(tensor: Tensor) -> None:
    contents = Contents({"odd": tensor.cuda(), "plain": tensor.contiguous().cuda()}, {"odd", "plain"}, set(), {})
    laid = laid_of(contents, 0, 1)
    data = Staging().fill(laid, contents)
    whole = flat_bytes(tensor.clone(memory_format=torch.contiguous_format)).numpy().tobytes()
    assert [bytes(data[at : at + part.high - part.low]) for part, at in laid.slices] == [whole, whole]
