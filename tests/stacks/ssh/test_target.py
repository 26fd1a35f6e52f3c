"""How a person names a machine."""

from __future__ import annotations

import doctest

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.ssh import target as module
from gpuctl.stacks.ssh.target import parse_target


@pytest.mark.parametrize(
    ("text", "node", "words"),
    [
        ("lab-7", "lab-7", ("lab-7",)),
        ("ada@10.0.0.7:2222", "10.0.0.7", ("-p", "2222", "ada@10.0.0.7")),
        ("[2001:db8::7]:2222", "2001-db8--7", ("-p", "2222", "2001:db8::7")),
    ],
)
def test_target_is_named_as_for_ssh(text: str, node: str, words: tuple[str, ...]) -> None:
    target = parse_target(text)
    assert (target.node, target.words) == (node, words)


@pytest.mark.parametrize("text", ["-oProxyCommand=touch /tmp/x", "a b", "a:port", "a;b", "@a", ""])
def test_invalid_target_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"invalid host .*; for example lab-7"):
        parse_target(text)


def test_docstring_example_is_right() -> None:
    assert doctest.testmod(module) == (0, 1)
