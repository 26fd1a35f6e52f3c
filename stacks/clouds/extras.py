"""A cloud's Python packages, which come with an extra of gpuctl's own package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from gpuctl.cluster.distribution import pip_install
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName


class NotInstalled(BadInput):
    """An optional package is missing. It is not a cloud's answer, so no check ignores it."""


def needs(name: str, error: ModuleNotFoundError) -> NotInstalled:
    """The error for a missing optional package."""
    return NotInstalled(f"{name} needs {error.name}, which is not installed", pip_install(name))


def require_pulumi(name: CloudName) -> None:
    """Raises ``NotInstalled`` if what declares ``name``'s resources is missing. Imports nothing that is heavy."""
    require(name, ("pulumi", _PULUMI[name]))


def require(name: CloudName, modules: Sequence[str]) -> None:
    for module in modules:
        try:
            found = find_spec(module)
        except ModuleNotFoundError as error:
            raise needs(name, error) from error
        if found is None:
            raise needs(name, ModuleNotFoundError(name=module))


def not_installed(error: ModuleNotFoundError) -> NotInstalled | None:
    """The error for a missing module, for whichever cloud it is; ``None`` if no extra of gpuctl brings it."""
    top = (error.name or "").partition(".")[0]
    extras = _EXTRAS.get(top)
    if not extras:
        return None
    return NotInstalled(f"this needs {error.name}, which is not installed", pip_install(*extras))


_PULUMI = {"aws": "pulumi_aws", "gcp": "pulumi_gcp", "azure": "pulumi_azure_native"}
SDKS: Mapping[CloudName, tuple[str, ...]] = {
    "aws": ("boto3",),
    "gcp": ("google.auth", "google.cloud.compute"),
    "azure": ("azure.identity", "azure.mgmt.compute"),
}
_EXTRAS: Mapping[str, tuple[str, ...]] = {
    **{module: (name,) for name, module in _PULUMI.items()},
    "pulumi": CLOUDS,
    "semver": CLOUDS,
    "boto3": ("aws",),
    "botocore": ("aws",),
    "google": ("gcp",),
    "azure": ("azure",),
    "torch": ("train",),
    "numpy": ("train",),
    "matplotlib": ("demo",),
    "sklearn": ("demo",),
}
"""By top-level package: the extras that bring it."""
