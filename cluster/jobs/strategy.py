"""What ``--strategy`` names: what ``gpuctl.Trainer`` exchanges, such as ``topk:ratio=0.01`` or ``diloco:every=500``.

Here is how such a text is read, and what values an option may have. The classes of ``trainers.strategies`` call the
same checks, so that a wrong ratio is refused in the same words on the command line and in a script. Without torch or
NumPy, which the command line does not import.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any

from gpuctl.cluster.errors import BadInput

Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy by name, with the options that were given. For all others the strategy has defaults of its own."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """As ``parse`` reads it.

        >>> str(StrategyChoice("dgc", {"ratio": 0.001, "clip": None}))
        'dgc:ratio=0.001,clip=none'
        """
        given = ",".join(f"{option}={_written(value)}" for option, value in self.options.items())
        return f"{self.name}:{given}" if given else self.name


def parse(text: str) -> StrategyChoice:
    """Read ``NAME[:option=value,…]``. Raises ``BadInput`` that tells what is allowed.

    >>> parse("topk: ratio=0.01, chunk=512").options
    {'ratio': 0.01, 'chunk': 512}
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    if name not in OPTIONS:
        raise BadInput(f"there is no strategy {name!r}", _instead(name, OPTIONS))
    given: dict[str, Value] = {}
    for part in rest.split(",") if colon else ():
        option, _, value = (word.strip() for word in part.partition("="))
        if not option or not value:
            raise BadInput(f"{part.strip()!r} is not of the form option=value", _for_example(name))
        if option not in OPTIONS[name]:
            raise BadInput(f"{name} has no option {option!r}", _instead(option, OPTIONS[name]))
        if option in given:
            raise BadInput(f"{option} is given twice", "give it once")
        try:
            given[option] = OPTIONS[name][option](_read(value), option)
        except BadInput as error:
            raise BadInput(error.message, _for_example(name, option)) from error
    for option in REQUIRED.get(name, ()):
        if option not in given:
            raise BadInput(f"{name} needs {'an' if option[0] in 'aeiou' else 'a'} {option}", _for_example(name))
    return StrategyChoice(name, given)


def ratio(value: object, name: str = "ratio") -> float:
    """The share of a gradient that is sent. Raises ``BadInput`` unless 0 < value ≤ 1."""
    return _real(value, name, "a number above 0 and at most 1", lambda number: 0 < number <= 1)


def fraction(value: object, name: str = "momentum") -> float:
    """A factor by which something decays. Raises ``BadInput`` unless 0 ≤ value < 1."""
    return _real(value, name, "a number of at least 0 and below 1", lambda number: 0 <= number < 1)


def positive(value: object, name: str) -> float:
    """Raises ``BadInput`` unless 0 < value < ∞."""
    return _real(value, name, "a number above 0", lambda number: 0 < number < math.inf)


def positive_or_none(value: object, name: str) -> float | None:
    """As ``positive``, for what can be switched off."""
    if value is None:
        return None
    return _real(value, name, "a number above 0, or none", lambda number: 0 < number < math.inf)


def whole(value: object, name: str, least: int = 1, most: int | None = None) -> int:
    """Raises ``BadInput`` unless ``value`` is a whole number with least ≤ value ≤ most."""
    number = int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise BadInput(f"{name} must be a whole number {bounds}, not {value!r}")
    return number


def topk_chunk(value: object, name: str = "chunk") -> int:
    """Elements among which the largest are chosen. Raises ``BadInput`` if an index in it has more than 16 bits."""
    return whole(value, name, 2, 1 << 16)


def bucket_size(value: object, name: str = "bucket_mb") -> float:
    """MiB of gradients that travel together. Raises ``BadInput`` unless 0 < value ≤ 1,000,000."""
    return _real(value, name, "a number above 0 and at most 1000000", lambda number: 0 < number <= 1e6)


def one_of(value: object, name: str, words: Sequence[str]) -> Any:
    """Raises ``BadInput`` unless ``value`` is one of ``words``."""
    if value not in words:
        raise BadInput(f"{name} must be {', '.join(words[:-1])} or {words[-1]}, not {value!r}")
    return value


CODECS = ("fp32", "bf16", "fp16", "int8")
"""In what width the weights' differences travel."""
BALANCES = ("equal", "speed")
"""How many steps each worker makes: as many as the others, or as many as it can in the same time."""
KEPT = ("first", "each")
"""Whose inner optimizers a checkpoint keeps."""

_steps = partial(whole, least=0)
_LOCAL_STEPS: Mapping[str, Callable[[object, str], Value]] = {
    "every": whole,
    "warmup_steps": _steps,
    "codec": partial(one_of, words=CODECS),
    "balance": partial(one_of, words=BALANCES),
    "inner": partial(one_of, words=KEPT),
}

OPTIONS: Mapping[str, Mapping[str, Callable[[object, str], Value]]] = {
    "exact": {"bucket_mb": bucket_size},
    "bf16": {"bucket_mb": bucket_size},
    "fp16": {"bucket_mb": bucket_size},
    "int8": {"chunk": whole, "bucket_mb": bucket_size},
    "topk": {"ratio": ratio, "chunk": topk_chunk, "warmup_steps": _steps, "bucket_mb": bucket_size},
    "dgc": {
        "ratio": ratio,
        "momentum": fraction,
        "clip": positive_or_none,
        "warmup_steps": _steps,
        "bucket_mb": bucket_size,
    },
    "powersgd": {"rank": whole, "bucket_mb": bucket_size},
    "localsgd": _LOCAL_STEPS,
    "diloco": {**_LOCAL_STEPS, "rate": positive, "momentum": fraction},
}
"""Every strategy, with the check of each of its options."""

REQUIRED: Mapping[str, tuple[str, ...]] = {"topk": ("ratio",), "localsgd": ("every",)}
"""Options without a default."""

_EXAMPLES = {
    "ratio": "0.01",
    "chunk": "512",
    "warmup_steps": "100",
    "bucket_mb": "25",
    "momentum": "0.9",
    "clip": "1",
    "rank": "4",
    "every": "500",
    "codec": "int8",
    "balance": "speed",
    "inner": "each",
    "rate": "0.7",
}


def _real(value: object, name: str, what: str, is_allowed: Callable[[float], bool]) -> float:
    # NaN passes no comparison.
    if isinstance(value, bool) or not isinstance(value, Real) or not is_allowed(float(value)):
        raise BadInput(f"{name} must be {what}, not {value!r}")
    return float(value)


def _read(text: str) -> int | float | str | None:
    """A number, or ``none``. What is neither stays as it is, and no check lets it pass."""
    if text == "none":
        return None
    if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII):
        return float(text)
    return text


def _written(value: Value) -> str:
    if value is None or isinstance(value, str):
        return value or "none"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _instead(word: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(word.lower(), known, n=1)
    there = ", ".join(known)
    return f"did you mean {near[0]}? (there are: {there})" if near else f"use one of: {there}"


def _for_example(name: str, option: str = "") -> str:
    """A choice of ``name`` that has ``option``, for a hint."""
    options = dict.fromkeys([*REQUIRED.get(name, ()), *([option] if option else [next(iter(OPTIONS[name]))])])
    return f"for example, --strategy {name}:" + ",".join(f"{one}={_EXAMPLES[one]}" for one in options)
