"""What a node must have for a round to begin on it, outside of images."""

from __future__ import annotations

from collections.abc import Mapping

from gpuctl.cluster.errors import GpuctlError
from gpuctl.trainers.diagnostics.net_plugin import complaint, missing_in
from gpuctl.trainers.launchers.adapter import named
from gpuctl.trainers.launchers.process_group import missing
from gpuctl.trainers.launchers.torchrun import TORCHRUN, LaunchSpec


def require_fabric(fabric: str, env: Mapping[str, str]) -> None:
    """Raises ``GpuctlError`` if there is a ``fabric`` and NCCL would go on over TCP."""
    if fabric and (lacking := missing_in(fabric, env)):
        raise GpuctlError(complaint(fabric, lacking, "on this node"))


def require_package(spec: LaunchSpec) -> None:
    """Raises ``GpuctlError`` if this node lacks the framework that the launcher is for."""
    if spec.launcher != TORCHRUN and (what := missing(named(spec.launcher), [spec.script], spec.env)):
        raise GpuctlError(what)
