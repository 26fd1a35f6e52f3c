"""What ``--strategy`` may say, and what an option may be."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import (
    OPTIONS,
    REQUIRED,
    StrategyChoice,
    Value,
    fraction,
    parse,
    positive,
    positive_or_none,
    ratio,
    topk_chunk,
    whole,
)

POSITIVE = st.floats(0, exclude_min=True, allow_infinity=False)
MIB = st.floats(0, 1e6, exclude_min=True)
SHARE = st.floats(0, 1, exclude_min=True)
COUNT, FROM_ONE = st.integers(0, 10**18 - 1), st.integers(1, 10**18 - 1)
LOCAL_STEPS: Mapping[str, st.SearchStrategy[Value]] = {
    "every": FROM_ONE,
    "warmup_steps": COUNT,
    "codec": st.sampled_from(["fp32", "bf16", "fp16", "int8"]),
    "balance": st.sampled_from(["equal", "speed"]),
    "inner": st.sampled_from(["first", "each"]),
}
ALLOWED: Mapping[str, Mapping[str, st.SearchStrategy[Value]]] = {
    "exact": {"bucket_mb": MIB},
    "bf16": {"bucket_mb": MIB},
    "fp16": {"bucket_mb": MIB},
    "int8": {"chunk": FROM_ONE, "bucket_mb": MIB},
    "topk": {"ratio": SHARE, "chunk": st.integers(2, 65536), "warmup_steps": COUNT, "bucket_mb": MIB},
    "dgc": {
        "ratio": SHARE,
        "momentum": st.floats(0, 1, exclude_max=True),
        "clip": st.none() | POSITIVE,
        "warmup_steps": COUNT,
        "bucket_mb": MIB,
    },
    "powersgd": {"rank": FROM_ONE, "bucket_mb": MIB},
    "localsgd": LOCAL_STEPS,
    "diloco": {**LOCAL_STEPS, "rate": POSITIVE, "momentum": st.floats(0, 1, exclude_max=True)},
}


def choices_of(name: str) -> st.SearchStrategy[StrategyChoice]:
    needed = {option: ALLOWED[name][option] for option in REQUIRED.get(name, ())}
    others = {option: value for option, value in ALLOWED[name].items() if option not in needed}
    return st.fixed_dictionaries(needed, optional=others).map(lambda options: StrategyChoice(name, options))


@given(st.sampled_from(sorted(ALLOWED)).flatmap(choices_of))
def test_what_is_written_is_read_again(choice: StrategyChoice) -> None:
    assert parse(str(choice)) == choice


def test_the_strategies_and_their_options_are_these() -> None:
    assert {name: set(options) for name, options in OPTIONS.items()} == {
        name: set(options) for name, options in ALLOWED.items()
    }


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("exact", "exact", {}),
        ("topk:ratio=0.01", "topk", {"ratio": 0.01}),
        ("  topk :  chunk = 512 ,ratio = 1 ", "topk", {"ratio": 1.0, "chunk": 512}),
        ("topk:ratio=1e-3,warmup_steps=0", "topk", {"ratio": 0.001, "warmup_steps": 0}),
        ("topk:ratio=.5,chunk=65536", "topk", {"ratio": 0.5, "chunk": 65536}),
        ("dgc", "dgc", {}),
        ("dgc:momentum=0,clip=none", "dgc", {"momentum": 0.0, "clip": None}),
        ("dgc:clip=2.5", "dgc", {"clip": 2.5}),
        ("powersgd:rank=+4", "powersgd", {"rank": 4}),
        ("bf16:bucket_mb=0.5", "bf16", {"bucket_mb": 0.5}),
        ("localsgd:every=8", "localsgd", {"every": 8}),
        ("diloco", "diloco", {}),
        (
            "diloco: every = 50, codec = int8, balance=speed",
            "diloco",
            {"every": 50, "codec": "int8", "balance": "speed"},
        ),
        ("diloco:rate=1,momentum=0,inner=each", "diloco", {"rate": 1.0, "momentum": 0.0, "inner": "each"}),
    ],
)
def test_a_choice_is_a_name_and_the_options_that_were_given(text: str, name: str, options: dict[str, Value]) -> None:
    choice = parse(text)
    assert choice == StrategyChoice(name, options)
    assert [type(value) for value in choice.options.values()] == [type(options[option]) for option in choice.options]


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (StrategyChoice("exact"), "exact"),
        (StrategyChoice("topk", {"ratio": 0.01, "chunk": 512}), "topk:ratio=0.01,chunk=512"),
        (StrategyChoice("fp16", {"bucket_mb": 25.0}), "fp16:bucket_mb=25"),
        (StrategyChoice("dgc", {"clip": None}), "dgc:clip=none"),
    ],
)
def test_a_choice_is_written_as_one_would(choice: StrategyChoice, text: str) -> None:
    assert str(choice) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no strategy ''; use one of: exact, bf16, fp16, int8, topk, dgc, powersgd, localsgd, diloco"),
        ("TopK", "there is no strategy 'TopK'; did you mean topk? (there are: exact, bf16, fp16, int8, topk, dgc,"),
        ("topk\n", "topk needs a ratio; for example, --strategy topk:ratio=0.01"),
        ("topk:chunk=2", "topk needs a ratio; for example, --strategy topk:ratio=0.01"),
        ("dgc:", "'' is not of the form option=value; for example, --strategy dgc:ratio=0.01"),
        ("dgc:ratio=0.1,", "'' is not of the form option=value"),
        ("dgc:=0.1", "'=0.1' is not of the form option=value"),
        ("dgc:ratio= ", "'ratio=' is not of the form option=value"),
        ("dgc:lr=1", "dgc has no option 'lr'; use one of: ratio, momentum, clip, warmup_steps, bucket_mb"),
        ("powersgd:Rank=4", "powersgd has no option 'Rank'; did you mean rank? (there are: rank, bucket_mb)"),
        ("dgc:clip=1,clip=none", "clip is given twice"),
        ("dgc:ratio=1%", "ratio must be a number above 0 and at most 1, not '1%'; for example, --strategy dgc:ratio=0"),
        ("dgc:ratio=1=1", "ratio must be a number above 0 and at most 1, not '1=1'"),
        ("dgc:ratio=٠.١", "ratio must be a number above 0 and at most 1, not '٠.١'"),
        ("dgc:ratio=1e-999", "ratio must be a number above 0 and at most 1, not 0.0"),
        ("dgc:momentum=none", "momentum must be a number of at least 0 and below 1, not None"),
        ("dgc:warmup_steps=-1", "warmup_steps must be a whole number of at least 0, not -1"),
        ("localsgd", "localsgd needs an every; for example, --strategy localsgd:every=500"),
        (
            "diloco:every=0",
            "every must be a whole number of at least 1, not 0; for example, --strategy diloco:every=500",
        ),
        ("diloco:rate=fast", "rate must be a number above 0, not 'fast'; for example, --strategy diloco:rate=0.7"),
        ("diloco:codec=topk", "codec must be fp32, bf16, fp16 or int8, not 'topk'"),
        ("diloco:balance=none", "balance must be equal or speed, not None"),
        ("int8:chunk=0", "chunk must be a whole number of at least 1, not 0"),
        (
            "topk:ratio=1,chunk=65537",
            "chunk must be a whole number from 2 to 65536, not 65537; for example, --strategy",
        ),
        ("powersgd:rank=2.0", "rank must be a whole number of at least 1, not 2.0"),
        (f"powersgd:rank={'9' * 5000}", "rank must be a whole number of at least 1, not inf"),
        ("exact:bucket_mb=1e999", "bucket_mb must be a number above 0 and at most 1000000, not inf"),
    ],
)
def test_anything_else_is_refused_in_one_line_that_tells_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=f"^{re.escape(said)}") as refused:
        parse(text)
    assert "\n" not in str(refused.value)


def test_the_examples_in_refusals_are_allowed() -> None:
    for name, options in OPTIONS.items():
        for option in options:
            with pytest.raises(BadInput) as refused:
                parse(f"{name}:{option}=-1")
            example = parse(refused.value.hint.removeprefix("for example, --strategy "))
            assert (example.name, option in example.options) == (name, True)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (ratio, [1, 1.0, 5e-324, 0.5, np.float32(0.25)], [0, -0.1, 1.0001, 2, math.nan, math.inf]),
        (fraction, [0, 0.0, 0.9, np.float64(0.5)], [-1e-9, 1, 1.5, math.nan]),
        (lambda value: positive(value, "x"), [1, 1e-9, 1e300], [0, -1, math.inf, math.nan, None]),
        (lambda value: positive_or_none(value, "x"), [None, 1.5], [0, -1, math.inf, math.nan]),
        (lambda value: whole(value, "x"), [1, 2, 10**30, np.int64(3)], [0, -1, 1.0, 1.5, math.nan]),
        (lambda value: whole(value, "x", 0), [0, 1], [-1]),
        (topk_chunk, [2, 4096, 65536], [0, 1, 65537, 4096.0]),
    ],
    ids=["ratio", "fraction", "positive", "positive or none", "whole", "whole from 0", "chunk"],
)
def test_a_script_is_held_to_the_same_bounds(
    check: Callable[[object], object], good: list[object], bad: list[object]
) -> None:
    for value in good:
        assert check(value) == value
        assert type(check(value)) in (int, float, type(None)), "not NumPy's"
    for value in [*bad, True, False, np.True_, "1", "a lot", "", b"1", [1], object()]:
        with pytest.raises(BadInput, match=r" must be a "):
            check(value)


def test_the_name_in_a_refusal_is_the_option_s() -> None:
    with pytest.raises(BadInput, match=r"^ratio must be a number above 0 and at most 1, not 1\.5$"):
        ratio(1.5)
    with pytest.raises(BadInput, match=r"^final_ratio must be a number above 0 and at most 1, not 0$"):
        ratio(0, "final_ratio")


def test_it_imports_no_torch_and_no_numpy() -> None:
    code = "import sys, gpuctl.cluster.jobs.strategy as s; sys.exit(bool({'torch', 'numpy', 'typer'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
