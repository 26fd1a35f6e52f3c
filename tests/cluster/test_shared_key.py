"""The codes of what two ends of a connection say."""

from __future__ import annotations

import pytest

from gpuctl.cluster.shared_key import Session, new_nonce


def test_both_ends_make_the_same_code_and_nobody_else_does() -> None:
    code = Session("key", "a", "b").code("caller", 1, "poke")
    assert Session("key", "a", "b").fits(code, "caller", 1, "poke")
    for other in (Session("kez", "a", "b"), Session("key", "b", "a"), Session("key", "a", "c")):
        assert not other.fits(code, "caller", 1, "poke")


@pytest.mark.parametrize(
    "words", [("listener", 1, "poke"), ("caller", 2, "poke"), ("caller", 1, "."), ("caller1", "poke"), ("caller", 1)]
)
def test_a_code_is_of_these_words_and_no_others(words: tuple[str | int, ...]) -> None:
    session = Session("key", "a", "b")
    assert not session.fits(session.code("caller", 1, "poke"), *words)


@pytest.mark.parametrize("code", [None, 1, [], "", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_what_is_no_code_fits_nothing(code: object) -> None:
    assert not Session("key", "a", "b").fits(code, "poke")


def test_no_nonce_comes_twice() -> None:
    assert len({new_nonce() for _ in range(1000)}) == 1000
