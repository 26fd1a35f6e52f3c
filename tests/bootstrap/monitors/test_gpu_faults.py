"""What the driver's words mean, by value."""

from __future__ import annotations

import pytest

from gpuctl.bootstrap.monitors.gpu_faults import THROTTLED_S, Reading, is_throttled, of_reading, of_xid

IS_ILL = (46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158)


@pytest.mark.parametrize("code", IS_ILL)
def test_an_error_of_the_card_makes_it_ill_unless_the_driver_knows_better(code: int) -> None:
    fault = of_xid(3, code, None)
    assert fault is not None and fault.is_ill
    assert fault.words.startswith("GPU 3: ") and fault.words.endswith(f"(Xid {code})")
    needs_nothing, needs_a_reset = of_xid(3, code, 0), of_xid(3, code, 1)
    assert needs_nothing is not None and not needs_nothing.is_ill
    assert needs_a_reset is not None and needs_a_reset.is_ill


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109])
def test_an_error_of_the_application_is_no_fault_of_the_card(code: int) -> None:
    assert of_xid(0, code, None) is None and of_xid(0, code, 1) is None


@pytest.mark.parametrize("code", [63, 92, 94, 999])
def test_other_errors_are_told_and_the_card_is_used_on(code: int) -> None:
    fault = of_xid(0, code, None)
    assert fault is not None and not fault.is_ill and f"Xid {code}" in fault.words
    serious = of_xid(0, code, 2)
    assert serious is not None and serious.is_ill, "the driver says that it must be reset"


@pytest.mark.parametrize(
    ("reading", "words", "is_ill"),
    [
        (Reading(lost=True, uncorrected=1), "GPU 1: it has fallen off the bus", True),
        (Reading(uncorrected=2), "GPU 1: 2 uncorrected memory errors", True),
        (Reading(remap_failed=True, remap_pending=True), "GPU 1: a row of its memory cannot be remapped", True),
        (Reading(remap_pending=True), "GPU 1: a row of its memory is to be remapped at the next reset", False),
        (Reading(throttled=0x40, celsius=91), "GPU 1 is throttled: hardware thermal slowdown, 91 C", False),
        (Reading(throttled=0xA4), "GPU 1 is throttled: software thermal slowdown, power brake", False),
    ],
    ids=["lost", "memory", "remap failed", "remap pending", "hot", "brake"],
)
def test_a_reading_is_judged(reading: Reading, words: str, is_ill: bool) -> None:
    assert of_reading(1, reading, THROTTLED_S) == [(words, is_ill)]


def test_a_gpu_that_is_well_or_hot_for_a_moment_or_at_its_power_cap_has_no_fault() -> None:
    assert of_reading(0, Reading(uncorrected=0, throttled=0x4, celsius=70), 0.0) == []
    assert of_reading(0, Reading(throttled=0x40), THROTTLED_S - 1) == []
    assert is_throttled(Reading(throttled=0x20)) and not is_throttled(Reading(throttled=0x4 | 0x1))
