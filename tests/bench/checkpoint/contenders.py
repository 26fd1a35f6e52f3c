"""Ways to get the same bytes into a bucket, and back: ours and the references, behind one protocol.

Each holds the model that it saves. What it needs again it keeps, and keeps touched: buffers, clients, connections.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import obstore
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from gpuctl import Checkpointer
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints import commit_log
from gpuctl.cluster.checkpoints.manifest import blocks_of, digest
from gpuctl.cluster.storage.bucket import open_bucket
from tests.bench.checkpoint.storage import Place
from tests.bench.checkpoint.weights import Weights

PART_BYTES = 16 << 20
"""Of ours, and so of the raw reference that ours is held against."""


class Contender(Protocol):
    """``begin``, ``finish``, then ``begin`` again; later ``read`` and ``restore``. A thread may call ``finish``."""

    model: Weights

    def begin(self, step: int) -> None:
        """Returns when the training may go on."""

    def finish(self) -> None:
        """Returns when all is in the bucket, for good."""

    def read(self) -> None:
        """What is measured of a restore."""

    def restore(self) -> None:
        """What was saved last, into ``model``."""

    def delete_unneeded(self) -> None:
        """Delete all that was saved."""


class Ours:
    """``Checkpointer``. It keeps all, as deletions are not what the others are asked for; the bench tidies up."""

    def __init__(self, model: Weights, place: Place) -> None:
        self.model = model
        self._place = place
        self._checkpointer = self._made()

    def begin(self, step: int) -> None:
        self._checkpointer.save(step, {"model": self.model})

    def finish(self) -> None:
        self._checkpointer.wait()

    def read(self) -> None:
        self.restore()

    def restore(self) -> None:
        """As a process that was just started: all that is known comes from the bucket."""
        self._checkpointer = self._made()
        if self._checkpointer.restore({"model": self.model}) is None:
            raise RuntimeError("there is no checkpoint to restore")

    def delete_unneeded(self) -> None:
        store = open_bucket(self._place.url)
        log = ledgers.checkpoints_in(store).read().value
        if log is not None:
            commit_log.remove(store, {entry.path for entry in log.entries})

    def _made(self) -> Checkpointer:
        return Checkpointer(self._place.url, keep=None)


class Raw:
    """The bytes alone: no copy, nothing that says where they belong. Parts by ``threads`` threads, one request each
    unless ``multipart``. What it reads it hashes as ours does, and drops; it reads as a process that was just started,
    by a client without connections."""

    def __init__(self, model: Weights, place: Place, part_bytes: int, threads: int, *, multipart: bool = False) -> None:
        self.model = model
        self._store = place.store()
        self._multipart = multipart
        self._pool = ThreadPoolExecutor(threads)
        memory = memoryview(model.flat.numpy()).cast("B")  # type: ignore[arg-type]  # numpy's stubs lag behind PEP 688
        self._parts = [memory[at : at + part_bytes] for at in range(0, len(memory), part_bytes)]
        self._step = 0
        self._place = place

    def begin(self, step: int) -> None:
        self._step = step

    def finish(self) -> None:
        self._each(lambda n: obstore.put(self._store, self._key(n), self._parts[n], use_multipart=self._multipart))

    def read(self) -> None:
        self._store = self._place.store()
        self._each(self._hash)

    def restore(self) -> None:
        self._each(self._copy)

    def delete_unneeded(self) -> None:
        self._place.clear()

    def _hash(self, number: int) -> None:
        data = memoryview(obstore.get(self._store, self._key(number)).bytes())
        for low, high in blocks_of(len(data)):
            digest(data[low:high])

    def _copy(self, number: int) -> None:
        self._parts[number][:] = memoryview(obstore.get(self._store, self._key(number)).bytes())

    def _key(self, number: int) -> str:
        return f"{self._step}/{number}"

    def _each(self, call: Callable[[int], object]) -> None:
        list(self._pool.map(call, range(len(self._parts))))


class Fsspec:
    """torch's own distributed checkpoint (DCP) through ``FsspecWriter`` and s3fs, both as they come: saved on the spot,
    or by ``async_save`` in a process group of its own, whose copy of the state stays in memory from save to save."""

    def __init__(self, model: Weights, place: Place, *, in_background: bool) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.model = model
        self._place = place
        self._writer, self._reader = FsspecWriter, FsspecReader
        self._group = dist.new_group(backend="gloo")
        self._stager = self._staged() if in_background else None
        self._saving: Future[Any] | None = None
        self._name = ""

    def begin(self, step: int) -> None:
        self._name = str(step)
        if self._stager is not None:
            self._saving = dcp.async_save(  # type: ignore[assignment]  # this stager's is a plain future
                self._state(),
                storage_writer=self._made(self._writer),
                async_stager=self._stager,
                process_group=self._group,
            )

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()
        else:
            dcp.save(self._state(), storage_writer=self._made(self._writer), process_group=self._group)

    def read(self) -> None:
        self.restore()

    def restore(self) -> None:
        state = self._state()
        dcp.load(state, storage_reader=self._made(self._reader), process_group=self._group)
        self.model.load_state_dict(state["model"])

    def delete_unneeded(self) -> None:
        self._place.clear()

    def _staged(self) -> BlockingAsyncStager:
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        # By itself it makes its copy in pinned memory, which a machine without a GPU does not have.
        copies = {name: torch.zeros_like(tensor) for name, tensor in self.model.state_dict().items()}
        stager.state_dict_cache = {"model": copies}
        return stager

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def _made(self, kind: Any) -> Any:
        return kind(self._place.fsspec_path(self._name), **self._place.fsspec_options())


class Boto:
    """``torch.save`` into a buffer in memory, and boto3's ``upload_fileobj``."""

    def __init__(self, model: Weights, place: Place) -> None:
        import boto3

        self.model = model
        self._place = place
        self._client = boto3.client("s3", **place.boto3_options())
        self._buffer = io.BytesIO()
        self._key = f"{place.prefix}/state.pt"

    def begin(self, step: int) -> None: ...

    def finish(self) -> None:
        self._buffer.seek(0)
        torch.save({"model": self.model.state_dict()}, self._buffer)
        self._buffer.truncate()
        self._buffer.seek(0)
        # boto3 closes what it is given.
        self._client.upload_fileobj(_Open(self._buffer), self._place.bucket, self._key)

    def read(self) -> None:
        self.restore()

    def restore(self) -> None:
        self._buffer.seek(0)
        self._client.download_fileobj(self._place.bucket, self._key, self._buffer)
        self._buffer.seek(0)
        self.model.load_state_dict(torch.load(self._buffer)["model"])

    def delete_unneeded(self) -> None:
        self._place.clear()


class HostCopy:
    """No checkpoint at all: the least that must happen before training goes on. Into memory that is there and touched,
    or, if ``cloned``, by ``torch.clone`` into new memory."""

    def __init__(self, model: Weights, *, cloned: bool) -> None:
        self.model = model
        self._cloned = cloned
        self._copies: Sequence[torch.Tensor] = []
        if not cloned:
            self._copies = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def begin(self, step: int) -> None:
        del step
        with torch.no_grad():
            if self._cloned:
                self._copies = [parameter.clone() for parameter in self.model.parameters()]
                return
            for copy, parameter in zip(self._copies, self.model.parameters(), strict=True):
                copy.copy_(parameter)

    def finish(self) -> None: ...

    def read(self) -> None:
        self.restore()

    def restore(self) -> None:
        with torch.no_grad():
            for copy, parameter in zip(self._copies, self.model.parameters(), strict=True):
                parameter.copy_(copy)

    def delete_unneeded(self) -> None: ...


class _Open:
    """``BytesIO`` that outlives its upload. It has what boto3 asks for: reading, and seeking."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self.read = buffer.read
        self.seek = buffer.seek
        self.tell = buffer.tell


OURS = "gpuctl"
RAW = f"raw {PART_BYTES >> 20} MiB x 8"
RAW_LARGE = "raw quarters x 4"
RAW_MULTIPART = "raw multipart"
DCP = "DCP s3fs"
DCP_ASYNC = "DCP async_save"
BOTO = "torch.save boto3"
COPY = "host copy"
CLONE = "torch.clone"

MAKERS: dict[str, Callable[[int, Place], Contender]] = {
    OURS: lambda size, place: Ours(Weights(size), place),
    RAW: lambda size, place: Raw(Weights(size, together=True), place, PART_BYTES, 8),
    RAW_LARGE: lambda size, place: Raw(Weights(size, together=True), place, size // 4, 4),
    RAW_MULTIPART: lambda size, place: Raw(Weights(size, together=True), place, size, 1, multipart=True),
    DCP: lambda size, place: Fsspec(Weights(size), place, in_background=False),
    DCP_ASYNC: lambda size, place: Fsspec(Weights(size), place, in_background=True),
    BOTO: lambda size, place: Boto(Weights(size), place),
    COPY: lambda size, _: HostCopy(Weights(size), cloned=False),
    CLONE: lambda size, _: HostCopy(Weights(size), cloned=True),
}
