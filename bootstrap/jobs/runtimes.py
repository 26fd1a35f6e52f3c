"""All that a node runs workers with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gpuctl.bootstrap.containers.node_containers import Containers
from gpuctl.bootstrap.environments.node_environments import NodeEnvironments
from gpuctl.bootstrap.jobs.interpreters import Interpreters


@dataclass(frozen=True, slots=True)
class Runtimes:
    """Those of one node."""

    interpreters: Interpreters
    containers: Containers
    """For jobs with an image."""
    environments: NodeEnvironments
    """For the others, as far as they need packages."""

    @property
    def doing(self) -> str:
        """What takes long just now, for people."""
        return self.containers.doing or self.environments.doing

    def keep(self, wanted: Collection[str] | None) -> None:
        """Keep the interpreters that are wanted (see ``Interpreters.keep``)."""
        self.interpreters.keep(wanted)
        for key in self.interpreters.warm():
            self.environments.warmed(key)

    def stop(self) -> None:
        """Break off what is being prepared: this node leaves."""
        self.containers.stop()
        self.environments.stop()
