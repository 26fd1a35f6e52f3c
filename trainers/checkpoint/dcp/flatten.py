"""A nested state as torch.distributed.checkpoint names what is in it, and as our skeletons do (see ``treespec``).

DCP descends into dicts, and into lists that hold a tensor or a dict; everything else is one value, a tuple of tensors
too. A leaf's name is the path to it, joined by dots. That is how ``treespec.flatten_state`` names tensors as well, so
what one has saved the other can read. DCP's paths have no keys but strings, and nothing is left of an empty dict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from gpuctl.cluster.checkpoints.manifest import Manifest
from gpuctl.cluster.checkpoints.treespec import tensor_names
from gpuctl.cluster.errors import BadInput, Damaged
from gpuctl.trainers.checkpoint.state.treespec import unflatten_state

_PLAIN = "@plain."
_VALUES = "@values"
"""Where DCP has saved: the paths of what it took for values. It may have been told not to descend into anything."""

Path = tuple[str | int, ...]
"""Keys of dicts and places in lists."""


class _Branch(dict[str | int, Any]):
    """A node of the tree that is not a leaf: a leaf may be a dict itself."""


def documents_of(metadata: Metadata, values: Mapping[str, Any]) -> dict[str, bytes]:
    """The values that a checkpoint keeps of a state that DCP has saved: the skeleton of each item, and where DCP's
    values are in them. ``values`` has the skeletons of those, by name.

    Raises ``BadInput`` if the ranks' states do not go together.
    """
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    order = {name: number for number, name in enumerate(paths)}
    found: dict[Path, Any] = {}
    ends: list[Path] = []
    for name in sorted(metadata.state_dict_metadata, key=lambda name: order.get(name, len(order))):
        path = paths.get(name, (name,))
        found[path] = {"kind": "tensor", "of": name}
        if isinstance(metadata.state_dict_metadata[name], BytesStorageMetadata):
            found[path] = values[name]
            ends.append(path)
    documents = {_PLAIN + item: treespec for item, treespec in nested(found).items()}
    return {name: json.dumps(document).encode() for name, document in {**documents, _VALUES: ends}.items()}


def leaves_of(manifest: Manifest, at: str, value: Callable[[str], bytes | None]) -> Iterator[tuple[Path, Any]]:
    """What DCP takes for the leaves of the state that the checkpoint ``at`` holds: their paths and skeletons.
    ``value`` reads one of its values. Raises ``Damaged`` if they make no sense."""
    try:
        told = value(_VALUES)
        ends = None if told is None else {tuple(path) for path in json.loads(told)}
        for name in manifest.values:
            if not name.startswith(_PLAIN):
                continue
            for path, leaf in leaves(json.loads(value(name) or b""), (name.removeprefix(_PLAIN),), ends):
                if missing := set(tensor_names(leaf)) - manifest.tensors.keys():
                    raise Damaged(f"checkpoint {at} has no tensor {min(missing)!r}, which it refers to")
                yield path, leaf
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Damaged(f"checkpoint {at} has an invalid record of its state: {error!r}") from error


def leaves(treespec: Any, path: Path, ends: Collection[Path] | None = None) -> Iterator[tuple[Path, Any]]:
    """The paths and skeletons of what DCP takes for the leaves of the state at ``path``: all tensors, and the values at
    ``ends`` (``None``: where it descends no further by its own rule)."""
    if (path in ends) if ends is not None else not _is_open(treespec):
        yield path, treespec
    elif isinstance(treespec, list):
        for place, item in enumerate(treespec):
            yield from leaves(item, (*path, place), ends)
    elif is_tensor(treespec):
        yield path, treespec
    else:
        for key, item in treespec["of"]:
            yield from leaves(item, (*path, str(unflatten_state(key, {}))), ends)


def nested(found: Mapping[Path, Any]) -> dict[str, Any]:
    """The skeleton of each item of a state whose leaves have these paths and skeletons.

    Raises ``BadInput`` if a path leads on from a leaf: the ranks have different things there.
    """
    root = _Branch()
    for path, leaf in found.items():
        level = root
        for key in path[:-1]:
            level = level.setdefault(key, _Branch())
            if not isinstance(level, _Branch):
                raise _differs(path)
        if path[-1] in level or any(type(key) is not type(path[-1]) for key in level):
            raise _differs(path)
        level[path[-1]] = leaf
    return {str(item): _treespec(node) for item, node in root.items()}


def _differs(path: Path) -> BadInput:
    name = ".".join(map(str, path))
    return BadInput(f"{name!r} of the state to save differs between ranks", "give different things different names")


def _treespec(node: Any) -> Any:
    if not isinstance(node, _Branch):
        return node
    if all(isinstance(key, int) for key in node):
        return [_treespec(node.get(place)) for place in range(max(map(int, node)) + 1)]
    return {"kind": "dict", "of": [[key, _treespec(item)] for key, item in node.items()]}


def _is_open(treespec: Any) -> bool:
    """Whether DCP looks for leaves within it."""
    if isinstance(treespec, list):
        return any(_is_open(item) or is_tensor(item) for item in treespec)
    return isinstance(treespec, dict) and treespec["kind"] in ("dict", "counter")


def is_tensor(treespec: Any) -> bool:
    return isinstance(treespec, dict) and treespec["kind"] == "tensor"
