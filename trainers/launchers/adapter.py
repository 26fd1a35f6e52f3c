"""What a launcher knows of a round, and what it has to say about each of its processes.

A launcher is one module in ``adapters``, with a ``LAUNCHER`` in it. ``process_group`` does the rest: it starts the
processes of a node, and ends them together.

Also read by the interpreters of images, which have no gpuctl: the standard library only, from Python 3.8 on.
"""

from __future__ import annotations

import pkgutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PMIX_")
"""Variables of a job of another kind that gpuctl itself runs in: they speak of other processes than these."""
STOP_SIGNAL = "GPUCTL_STOP_SIGNAL"
"""Variable of a job: by which signal its processes are asked to stop, if not by that of its launcher."""


@dataclass(frozen=True)
class World:
    """A round, as one of its nodes sees it."""

    job: str
    round: int
    rank: int
    """This node's."""
    hosts: tuple[str, ...]
    """Address of each node, by rank."""
    nprocs: tuple[int, ...]
    """Number of processes on each."""
    master_address: str
    master_port: int
    """On rank 0, and free for the framework: no process of an earlier round has had it."""

    @property
    def nproc(self) -> int:
        """Processes on this node."""
        return self.nprocs[self.rank]

    @property
    def size(self) -> int:
        """Processes on all nodes."""
        return sum(self.nprocs)

    @property
    def first(self) -> int:
        """Global rank of this node's first process."""
        return sum(self.nprocs[: self.rank])


@dataclass(frozen=True)
class Process:
    """One process of a round, before it starts."""

    world: World
    local_rank: int
    env: Mapping[str, str] = field(default_factory=dict)
    """The job's own variables, which a launcher may look at: what people have set themselves stays."""
    peers: tuple[str, ...] = ()
    """``host:port`` of every process, by global rank, each free where it is; only for a launcher with ``meets``."""
    packages: frozenset[str] = frozenset()
    """Of ``Launcher.packages``, those that are there."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.world.first + self.local_rank


@dataclass(frozen=True)
class Launcher:
    """How the processes of a framework find each other, and how they are ended."""

    name: str
    variables: Callable[[Process], dict[str, str]]
    """What a process of the framework reads, besides the variables of ``plain``."""
    needs: str = ""
    """Package without which nothing can run."""
    install: str = ""
    """Command that installs it."""
    packages: tuple[str, ...] = ()
    """Further ones that make a difference."""
    one_per_node: bool = True
    """One process a node is the custom, for all of its GPUs; else one for each of them."""
    stop: int = signal.SIGTERM
    """By which signal a process is asked to stop. JAX and TensorFlow take SIGTERM for themselves, and train on."""
    meets: bool = False
    """Its processes need a key-value store on rank 0 (see ``key_value_store``)."""
    ends_softly: bool = False
    """When one process of a node has failed the others get SIGTERM first. Frameworks wait for the one that is lost, in
    calls that only SIGKILL ends."""
    options: Mapping[str, Callable[[Process], dict[str, str]]] = field(default_factory=dict)
    """Further variables by the word that asks for them, after the name: ``exec:slurm``."""
    chosen: tuple[str, ...] = ()
    """Of ``options``."""


def names() -> list[str]:
    """Of all launchers, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "adapters")]))


def named(text: str) -> Launcher:
    """The launcher that ``--launcher`` names; raises ``ValueError`` for a word that it does not know.

    >>> named("exec:slurm").chosen
    ('slurm',)
    """
    name, *chosen = text.split(":")
    if name not in names():
        raise ValueError(f"is not a launcher; use one of: {', '.join(names())}")
    launcher: Launcher = import_module(f"gpuctl.trainers.launchers.adapters.{name}").LAUNCHER
    if unknown := [word for word in chosen if word not in launcher.options]:
        known = f"use one of: {', '.join(launcher.options)}" if launcher.options else "it has no options"
        raise ValueError(f"names an unknown option of {name}, {unknown[0]!r}; {known}")
    return replace(launcher, chosen=tuple(chosen))


def all_variables(launcher: Launcher, process: Process) -> dict[str, str]:
    """What ``process`` finds in its environment besides the job's own variables."""
    found = {**plain(process), **launcher.variables(process), "GPUCTL_LAUNCHER": launcher.name}
    for word in launcher.chosen:
        found.update(launcher.options[word](process))
    return found


def plain(process: Process) -> dict[str, str]:
    """The variables that every process gets: torchrun's, and what tells the nodes apart."""
    world = process.world
    return {
        "RANK": str(process.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(process.local_rank),
        "LOCAL_WORLD_SIZE": str(world.nproc),
        "NODE_RANK": str(world.rank),
        "NNODES": str(len(world.hosts)),
        "GROUP_RANK": str(world.rank),
        "GROUP_WORLD_SIZE": str(len(world.hosts)),
        "MASTER_ADDR": world.master_address,
        "MASTER_PORT": str(world.master_port),
        "GPUCTL_NODE_ADDRESSES": ",".join(world.hosts),
    }


def stop_signal(launcher: Launcher, env: Mapping[str, str]) -> int:
    """By which signal the processes of a job with the variables ``env`` are asked to stop."""
    return _signal_named(env.get(STOP_SIGNAL, "")) or launcher.stop


def is_stop_signal(name: str) -> bool:
    """Whether ``GPUCTL_STOP_SIGNAL`` may have this value."""
    return _signal_named(name) is not None


def _signal_named(name: str) -> int | None:
    """
    >>> _signal_named("TERM") == _signal_named("SIGTERM") == signal.SIGTERM, _signal_named("KILL")
    (True, None)
    """
    names = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2, "INT": signal.SIGINT}
    return names.get(name[3:] if name.startswith("SIG") else name)


def joined(host: str, port: int) -> str:
    """
    >>> joined("10.0.0.1", 80), joined("fd00::1", 80)
    ('10.0.0.1:80', '[fd00::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
