"""What each rank tells rank 0 of its share of a save, and the manifest that rank 0 puts together from all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import msgspec

from gpuctl.cluster.checkpoints.manifest import Chunk, Manifest, Part, Piece, TensorIndex
from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.save.host_buffer import BufferLayout
from gpuctl.trainers.checkpoint.save.partition import Box, RankPartition


class SliceReport(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of box ``box`` of a tensor, from its byte ``low`` on, in this rank's parts."""

    name: str
    low: int
    pieces: tuple[Piece, ...]


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report of a save. Either ``error`` says why it failed, or the rest is all in the bucket."""

    step: int
    parts: tuple[Part, ...] = ()
    boxes: dict[str, Box] = {}
    """Of the tensors that have slices here, and of those without any bytes."""
    slices: tuple[SliceReport, ...] = ()
    values: dict[str, tuple[Piece, ...]] = {}
    aliases: dict[str, str] = {}
    error: str = ""
    cancelled: bool = False


def report_of(step: int, share: RankPartition, layout: BufferLayout, parts: Sequence[Part]) -> RankReport:
    named = {part.name for part, _ in layout.slices}
    return RankReport(
        step=step,
        parts=tuple(parts),
        boxes={name: box for name, box in share.boxes.items() if name in named or box.bytes == 0},
        slices=tuple(SliceReport(p.name, p.low, layout.pieces(at, p.high - p.low)) for p, at in layout.slices),
        values={name: layout.pieces(at, size) for name, at, size in layout.values},
        aliases=share.aliases,
    )


def manifest_of(reports: Sequence[RankReport]) -> Manifest:
    """The manifest from all ranks' reports, in rank order.

    Raises ``BadInput`` if they do not add up to whole tensors: then the ranks do not hold what they should.
    """
    parts: list[Part] = []
    numbers: dict[str, int] = {}
    tensors: dict[str, dict[Box, list[tuple[int, tuple[Piece, ...]]]]] = {}
    values: dict[str, tuple[Piece, ...]] = {}
    aliases: dict[str, str] = {}
    for report in reports:
        for part in report.parts:
            if numbers.setdefault(part.key, len(parts)) == len(parts):
                parts.append(part)
        place = [numbers[part.key] for part in report.parts]
        for name, box in report.boxes.items():
            tensors.setdefault(name, {}).setdefault(box, [])
        for found in report.slices:
            tensors[found.name][report.boxes[found.name]].append((found.low, _placed(found.pieces, place)))
        values |= {name: _placed(pieces, place) for name, pieces in report.values.items()}
        aliases |= report.aliases
    index = {name: _index(name, boxes) for name, boxes in tensors.items()}
    index |= {name: index[of] for name, of in aliases.items()}
    return Manifest(step=reports[0].step, parts=tuple(parts), tensors=index, values=values)


def _placed(pieces: Iterable[Piece], place: Sequence[int]) -> tuple[Piece, ...]:
    return tuple(Piece(place[piece.part], piece.at, piece.size) for piece in pieces)


def _index(name: str, boxes: dict[Box, list[tuple[int, tuple[Piece, ...]]]]) -> TensorIndex:
    first = next(iter(boxes))
    if any((box.dtype, box.shape) != (first.dtype, first.shape) for box in boxes):
        raise BadInput(f"the ranks hold different tensors under the name {name!r}", "give them different names")
    chunks = []
    for box, slices in boxes.items():
        slices.sort(key=lambda found: found[0])
        pieces = tuple(piece for _, found in slices for piece in found)
        if sum(piece.size for piece in pieces) != box.bytes or not _is_seamless(slices):
            raise BadInput(f"the ranks do not hold all of {name!r}", "give every rank the same state, or other names")
        chunks.append(Chunk(box.offsets, box.sizes, pieces))
    if sum(prod(box.sizes) for box in boxes) != prod(first.shape):
        raise BadInput(f"the ranks hold only shards of {name!r}", "give every rank its part of the state")
    return TensorIndex(first.dtype, first.shape, tuple(chunks))


def _is_seamless(slices: Sequence[tuple[int, tuple[Piece, ...]]]) -> bool:
    end = 0
    for low, pieces in slices:
        if low != end:
            return False
        end += sum(piece.size for piece in pieces)
    return True
