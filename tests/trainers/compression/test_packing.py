from __future__ import annotations

import pytest
import torch

from gpuctl.trainers.compression.packing import pack12, packed_size, unpack12


@pytest.mark.parametrize("count", [0, 1, 2, 3, 40, 41])
def test_numbers_of_twelve_bits_come_back(count: int) -> None:
    numbers = torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(count))
    data = pack12(numbers)
    assert data.dtype == torch.uint8 and data.numel() == packed_size(count)
    assert torch.equal(unpack12(data, count), numbers)


def test_the_smallest_and_the_largest_come_back_side_by_side() -> None:
    numbers = torch.tensor([4095, 0, 0, 4095, 2048, 15, 16])
    assert unpack12(pack12(numbers), 7).tolist() == numbers.tolist()
    assert packed_size(7) == 11  # 84 bits
