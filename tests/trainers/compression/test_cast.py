from __future__ import annotations

import pytest

from gpuctl import Cast
from gpuctl.cluster.errors import BadInput


def test_a_type_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match=r"Cast\('fp8'\) is not a type to cast to"):
        Cast("fp8")  # type: ignore[arg-type]


def test_a_value_takes_two_bytes() -> None:
    assert Cast("bf16").wire_bytes(10) == Cast("fp16").wire_bytes(10) == 20
