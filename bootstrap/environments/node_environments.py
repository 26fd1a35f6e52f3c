"""The environments of one node: what a job gets, and from where.

Of the nodes that want one, one builds it. It is ready there as soon as it is installed; what the others need is made
behind its back: an archive, which they can fetch from that node at once, and from the bucket once it is there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpuctl.bootstrap.environments import prefix
from gpuctl.bootstrap.environments.claim import BuildClaim
from gpuctl.bootstrap.environments.disk import EnvironmentDisk, NodeEnvironment
from gpuctl.bootstrap.environments.facts import NodeFacts
from gpuctl.bootstrap.environments.fetch import ArchiveSource, BucketArchives, PeerArchives, fetch, peers_of
from gpuctl.bootstrap.environments.install import build
from gpuctl.bootstrap.environments.install.uv import Uv
from gpuctl.bootstrap.environments.installer import Installer
from gpuctl.bootstrap.environments.publish import Publisher
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.environments import registry
from gpuctl.cluster.errors import Damaged, Fenced, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.records.environments import Environment, EnvironmentBuild, EnvironmentSource
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.rounds import Member
from gpuctl.cluster.storage.bucket import Bucket

_LOOK_S = 0.5
_SPARE = 1.3
"""Times what is about to be written, which must be free."""

OF_JOB = "environment"
"""In a job's folder: the digest of its environment."""
IsOver = Callable[[], bool]


class NodeEnvironments:
    """Prepares environments on one node. Thread-safe: one is made at a time.

    Args:
        folder: holds them, their archives, and uv's cache.
        store: the cluster's bucket, with the patience that large files need.
        own: what this node claims a build with: its name, incarnation, and the place of its replica server.
        token: the cluster's, for other nodes' replica servers.
        env: variables of uv; a job's own come on top.
        say: prints a line to the agent's log.
        on_change: is called when ``doing`` has changed.
    """

    def __init__(
        self,
        folder: Path,
        store: Bucket,
        own: EnvironmentBuild,
        token: str,
        env: Mapping[str, str],
        clock: Clock,
        say: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.doing = ""
        """What takes long just now, for people: such as "building the environment of requirements.txt"."""
        self._disk = EnvironmentDisk(folder, say)
        self._store = store
        self._own = own
        self._token = token
        self._env = dict(env)
        self._clock = clock
        self._say = say
        self._on_change = on_change
        self._lock = threading.Lock()
        self._facts: NodeFacts | None = None
        self._ready: dict[str, NodeEnvironment] = {}
        """By request."""
        self._requests: dict[str, str] = {}
        """By job, as long as it is not over."""
        self._publishing: set[str] = set()
        """Requests whose environment is ready here, and not yet in the bucket."""
        self._stopped = threading.Event()
        self._installer = Installer(self._disk, store, own.node, clock, self._need, self._do, self._stopped.wait)
        self._publisher = Publisher(store, self._disk, self._stopped, say)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="environment-publish")
        """One after the other: what was installed is published before its bytecode is."""
        self._uncompiled: dict[str, NodeEnvironment] = {}
        """Built here, by digest, until their bytecode was published."""

    def have(
        self, job: JobSpec, code: Path, members: Sequence[Member] = (), is_over: IsOver = lambda: False
    ) -> NodeEnvironment | None:
        """The environment of ``job``, made ready if it is not; ``None`` if it needs none.

        Args:
            code: the job's unpacked folder.
            members: nodes that may have it, besides the one that builds it.
            is_over: asked now and then; once it says so, what was begun is broken off.

        Raises ``EnvironmentFailed`` if no node of this kind can have it, ``Fenced`` if broken off, and ``GpuctlError``
        if this node cannot have it now.
        """
        source = job.environment
        if source is None:
            return None

        def stop() -> bool:
            return self._stopped.is_set() or is_over()

        while not self._lock.acquire(timeout=0.1):
            _check(stop)
        try:
            if self._facts is None:
                self._facts = NodeFacts.of_this_node()
                self._disk.sweep()
            request = self._facts.request_of(source)
            is_new = job.job not in self._requests
            self._requests[job.job] = request
            if is_new:
                self._forget_removed(request)
            if request not in self._ready:
                self._ready[request] = self._get(job, source, request, code, members, stop)
            found = self._ready[request]
            (code.parent / OF_JOB).write_text(found.environment.digest)
            if is_new:
                with contextlib.suppress(GpuctlError):
                    registry.note_use(self._store, found.environment.digest, job.job)
            return found
        except OSError as error:
            raise GpuctlError(f"the environment of {source.file}: {error.strerror or error}") from error
        finally:
            self._do("")
            self._lock.release()

    def warmed(self, digest: str) -> None:
        """An interpreter in that environment has imported what a script of it needs: its bytecode is there now."""
        if found := self._uncompiled.pop(digest, None):
            self._in_background(self._publisher.publish_bytecode, found)

    def drop_finished(self, unfinished: Collection[str]) -> None:
        """What only jobs need that are over may go once the disk is short."""
        for job in self._requests.keys() - set(unfinished):
            del self._requests[job]

    def stop(self) -> None:
        """Break off what is being made: this node leaves."""
        self._stopped.set()
        self._background.shutdown(wait=False, cancel_futures=True)

    # -- the ways to it -----------------------------------------------------------------------------------------------

    def _get(
        self,
        job: JobSpec,
        source: EnvironmentSource,
        request: str,
        code: Path,
        members: Sequence[Member],
        is_over: IsOver,
    ) -> NodeEnvironment:
        claim = BuildClaim(self._store, request, self._own, self._clock)
        while True:
            try:
                if found := self._got(job, source, request, code, members, claim, is_over):
                    return found
            except (StoreError, StoreUnavailable) as error:
                self._do(f"waiting for the bucket: {error.message}")
            self._stopped.wait(_LOOK_S)
            _check(is_over)

    def _got(
        self,
        job: JobSpec,
        source: EnvironmentSource,
        request: str,
        code: Path,
        members: Sequence[Member],
        claim: BuildClaim,
        is_over: IsOver,
    ) -> NodeEnvironment | None:
        """The environment; ``None`` while another node builds it."""
        if known := registry.resolved(self._store, request):
            try:
                return self._fetched(known, source, self._sources(known, members))
            except Damaged as error:
                self._say(f"environment of {source.file}: {error}; it is built again")
                registry.remove(self._store, known.digest)
        if claim.take():
            return self._built(job, source, request, code, claim, is_over)
        holder = claim.holder()
        if holder and holder.built:
            peer = PeerArchives(holder.node, holder.address, self._token)
            with contextlib.suppress(Damaged):  # it has left: the next turn finds who builds it then
                return self._fetched(holder.built, source, [self._disk.archives, peer])
        self._do(f"waiting for {holder.node if holder else 'another node'} to build the environment")
        return None

    def _fetched(
        self, environment: Environment, source: EnvironmentSource, sources: Sequence[ArchiveSource]
    ) -> NodeEnvironment:
        """The environment on this disk, from ``sources`` unless it is there. Raises ``Damaged``, ``OSError``,
        ``GpuctlError``."""
        if there := self._disk.find(environment.digest):
            return there
        self._do(f"fetching the environment of {source.file}")
        self._need(_SPARE * (environment.bytes + environment.pack.bytes), "fetching the environment")
        began = self._clock.monotonic()
        try:
            found, served = self._unpacked(environment, source, sources)
        except Damaged:  # on a disk, perhaps, and what is in the bucket decides
            found, served = self._unpacked(environment, source, sources[-1:])
        told = ", ".join(f"{size / 1e6:.1f} MB from {name}" for name, size in served.items())
        self._say(f"environment of {source.file}: {told}, ready in {self._clock.monotonic() - began:.1f} s")
        return found

    def _unpacked(
        self, environment: Environment, source: EnvironmentSource, sources: Sequence[ArchiveSource]
    ) -> tuple[NodeEnvironment, dict[str, int]]:
        with self._disk.making() as made:
            if source.kind == "conda":
                made.mkdir()  # it brings its Python
            else:
                build.make_empty(made, self._uv({}), what=source.file)
            served = fetch(environment.pack, sources, self._disk.archives, made)
            if environment.bytecode is not None:
                with contextlib.suppress(Damaged):  # then Python compiles it anew
                    fetch(environment.bytecode, sources, self._disk.archives, made)
            if prefix.has_one(made):
                prefix.move(made, prefix.of(self._disk.place(environment.digest)))
                build.show_node_packages(made)
            return self._disk.keep(made, environment), served

    def _built(
        self,
        job: JobSpec,
        source: EnvironmentSource,
        request: str,
        code: Path,
        claim: BuildClaim,
        is_over: IsOver,
    ) -> NodeEnvironment:
        """The environment, installed here. Raises as ``have`` does."""
        began = self._clock.monotonic()
        assert self._facts is not None
        claim.hold()
        try:
            found = self._installer.install(source, code, self._uv(job.env), self._facts, is_over)
        except BaseException:
            claim.release()
            raise
        self._say(f"environment of {source.file}: installed in {self._clock.monotonic() - began:.1f} s")
        self._publishing.add(request)
        self._in_background(self._publish, found, request, claim)
        self._uncompiled[found.environment.digest] = found
        return found

    def _publish(self, found: NodeEnvironment, request: str, claim: BuildClaim) -> None:
        try:
            self._publisher.publish(found, request, claim)
        finally:
            self._publishing.discard(request)

    def _forget_removed(self, request: str) -> None:
        """What is ready here may have been removed from the bucket since: other nodes would get another one then."""
        if request in self._ready and request not in self._publishing:
            with contextlib.suppress(GpuctlError):
                known = registry.resolved(self._store, request)
                if known is None or known.digest != self._ready[request].environment.digest:
                    del self._ready[request]

    # -- the parts ----------------------------------------------------------------------------------------------------

    def _uv(self, job_env: Mapping[str, str]) -> Uv:
        return Uv({**self._env, **job_env}, self._disk.cache)

    def _sources(self, environment: Environment, members: Sequence[Member]) -> list[ArchiveSource]:
        peers = peers_of(members, self._own.node, self._token)
        return [self._disk.archives, *peers, BucketArchives(self._store, environment.digest)]

    def _need(self, size: float, phase: str) -> None:
        self._ready = {key: one for key, one in self._ready.items() if key in self._requests.values()}
        self._disk.need(size, phase, {one.environment.digest for one in self._ready.values()})

    def _in_background(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # this node leaves
            self._background.submit(call, *args)

    def _do(self, what: str) -> None:
        if self.doing != what:
            self.doing = what
            self._on_change()


def _check(is_over: IsOver) -> None:
    """Raises ``Fenced`` once nobody waits any more."""
    if is_over():
        raise Fenced("the environment is no longer needed")
