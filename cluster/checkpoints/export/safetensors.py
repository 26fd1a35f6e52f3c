"""The safetensors format, written without any library: a length, a JSON header, and the tensors one after another.

So a pull needs no torch, and holds a few blocks in memory however large the model is. The format is described at
https://github.com/huggingface/safetensors; the tests read what is written here with that package.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path

from gpuctl.cluster.checkpoints.export.pull import OnBytes, OpenCheckpoint, file_name, write_json
from gpuctl.cluster.checkpoints.export.reassembly import byte_size
from gpuctl.cluster.checkpoints.manifest import TensorIndex
from gpuctl.cluster.checkpoints.treespec import for_people
from gpuctl.cluster.errors import BadInput

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


def write_safetensors(opened: OpenCheckpoint, folder: Path, on_bytes: OnBytes) -> None:
    """``<item>.safetensors`` for each item of the state that has tensors, by their names within the item, so that
    ``model.load_state_dict(safetensors.torch.load_file("model.safetensors"))`` works; and ``values.json`` with all the
    rest, nested as in the state.

    Raises ``BadInput`` for a dtype that the format does not have.
    """
    reassembly = opened.reassembly()
    files: list[int] = []
    values = {}
    try:
        for item, treespec in opened.treespecs.items():
            tensors = opened.tensors(item)
            named = {name: _within(item, name) for name in tensors}
            values[item] = for_people(treespec, named)
            if not tensors:
                continue
            header, places = _header(tensors, named, {"format": "pt", "step": str(opened.entry.step)})
            files.append(
                os.open(folder / f"{file_name(item)}.safetensors", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            )
            os.pwrite(files[-1], header, 0)
            for name, at in places.items():
                reassembly.add_tensor(name, files[-1], len(header) + at)
        reassembly.fetch(on_bytes)
    finally:
        for file in files:
            os.close(file)
    write_json(folder / "values.json", values)


def _header(
    tensors: dict[str, TensorIndex], named: dict[str, str], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and where each tensor begins after them: without a gap, the widest dtypes first, so
    that each is aligned."""
    places: dict[str, int] = {}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name in sorted(tensors, key=lambda name: (-_width(tensors[name]), name)):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise BadInput(f"safetensors has no {tensor.dtype}, the dtype of {name}", "use --format torch")
        places[name] = end
        end += byte_size(tensor)
        header[named[name]] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (places[name], end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _width(tensor: TensorIndex) -> int:
    """Bytes of an element; 0 if there is none."""
    return byte_size(tensor) // max(1, prod(tensor.shape))


def _within(item: str, name: str) -> str:
    """The dotted name of a tensor without that of its item; of an item that is a tensor, the item's."""
    return name.removeprefix(f"{item}.")
