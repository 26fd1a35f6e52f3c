"""What is written into the bucket comes back as it was, and says where it does not."""

from __future__ import annotations

import json
import pkgutil
import typing
from importlib import import_module
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.cluster import records
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import NodeRecord, PreemptionNotice, Rank0, TrainingProgress
from gpuctl.cluster.records.rounds import Member, Round

_MODULES = [import_module(f"{records.__name__}.{module.name}") for module in pkgutil.iter_modules(records.__path__)]
_KINDS = [
    kind
    for module in _MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
]


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of type ``kind`` may hold; floats are finite, as JSON knows no others."""
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {name: _values(hint) for name, hint in typing.get_type_hints(kind).items()}
        return st.fixed_dictionaries(fields).map(lambda values: kind(**values))
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case None:
            return st.from_type(kind)
        case typing.Literal:
            return st.sampled_from(arguments)
        case origin if origin is tuple:
            return st.lists(_values(arguments[0]), max_size=3).map(tuple)
        case origin if origin is dict:
            keys = st.text(max_size=5) if arguments[0] is str else _values(arguments[0])
            return st.dictionaries(keys, _values(arguments[1]), max_size=3)
        case _:  # a union
            return st.one_of([_values(argument) for argument in arguments])


def test_every_record_is_looked_at() -> None:
    assert {NodeRecord, Round} < {*_KINDS} and len(_KINDS) > 20


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_record_comes_back_as_it_was(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    record = data.draw(_values(kind))
    assert decode(encode(record), kind, "key") == record


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_a_record_is_frozen_and_no_larger_than_what_it_says(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.omit_defaults


def test_fields_of_a_newer_version_are_passed_over() -> None:
    record = {"node": "n", "incarnation": "i", "address": "a", "port": 1, "invented_later": {"x": [1]}}
    assert decode(json.dumps(record).encode(), Rank0, "rank0/1") == Rank0(
        node="n", incarnation="i", address="a", port=1
    )


def test_fields_that_an_older_version_did_not_write_have_their_defaults() -> None:
    data = b'{"node":"n","incarnation":"i","beat":1,"address":"a","port":2}'
    record = decode(data, NodeRecord, "nodes/n.json")
    assert (record.slots, record.health, record.notice, record.rounds) == (1, "ok", None, {})


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b'{"node":"n","incarnation":"i","beat":"x","address":"a","port":2}', r"\$\.beat"),
        (b'{"node":"n","incarnation":"i","beat":1,"address":"a"}', "`port`"),
        (
            b'{"node":"n","incarnation":"i","beat":1,"address":"a","port":2,"notice":{"lead_s":"soon","at":1}}',
            r"\$\.notice\.lead_s",
        ),
        (
            b'{"node":"n","incarnation":"i","beat":1,"address":"a","port":2,"spare_ports":[1,null]}',
            r"\$\.spare_ports\[1\]",
        ),
    ],
)
def test_a_corrupt_record_is_named_with_its_field(data: bytes, where: str) -> None:
    with pytest.raises(CorruptRecord, match=rf"nodes/n\.json is not a NodeRecord: .*{where}") as caught:
        decode(data, NodeRecord, "nodes/n.json")
    assert caught.value.hint


@given(st.binary(max_size=40))
def test_no_bytes_at_all_make_anything_but_a_record_or_a_named_error(data: bytes) -> None:
    try:
        decode(data, PreemptionNotice, "key")
    except CorruptRecord as error:
        assert error.message.startswith("key is not a PreemptionNotice: ")


@pytest.mark.parametrize("data", [b'{"node":"\xff"}', b"[" * 100_000, b"\x80\x04K\x01.", b'{"port":1e999}'])
def test_what_is_not_json_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptRecord, match="rank0/1 is not a Rank0"):
        decode(data, Rank0, "rank0/1")


def test_a_kind_without_a_name_is_named_too() -> None:
    kind: Any = dict[str, int] | None
    with pytest.raises(CorruptRecord, match="key is not a dict"):
        decode(b"[1]", kind, "key")


def test_a_loss_that_is_not_a_number_is_no_loss() -> None:
    progress = TrainingProgress(job="j", round=1, step=2, loss=float("nan"))
    assert decode(encode(progress), TrainingProgress, "key").loss is None


def test_a_rank_belongs_to_one_life_of_a_node() -> None:
    members = tuple(Member(node=node, incarnation="1", address="a", nproc=1) for node in ("n2", "n0"))
    world = Round(job="j", number=1, phase="run", epoch=1, members=members)
    assert world.rank_of("n2", "1") == 0
    assert world.rank_of("n0", "1") == 1
    assert world.rank_of("n0", "2") is None
    assert world.rank_of("n1", "1") is None
