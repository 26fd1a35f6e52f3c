"""Pulumi's CLI and plug-ins: found, installed where they are missing, and named with version and size.

::

    <state>/pulumi-cli/bin/pulumi              a CLI for gpuctl alone, where there is none on PATH
    <state>/pulumi-cli/*.tar.gz.part           a download that broke off: the next attempt goes on from it
    $PULUMI_HOME/plugins/resource-aws-v7.51.1  a plug-in, shared with whatever else runs Pulumi (default: ~/.pulumi)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpuctl.stacks.catalog.instance_types import CloudName
from gpuctl.stacks.clouds.answers import PreflightCheck
from gpuctl.stacks.clouds.extras import needs
from gpuctl.stacks.engine import pulumi_release
from gpuctl.stacks.engine.errors import FailureKind, StackFailed, first_line
from gpuctl.stacks.engine.pulumi_release import OnDownload, Release
from gpuctl.stacks.state.paths import private_folder, state_dir

if TYPE_CHECKING:
    from pulumi.automation import PulumiCommand

OLDEST_CLI = (3, 181, 0)
"""The first with all that the Automation API of the pinned SDK asks for."""
CLI = "3.272.0"
"""What is installed: the release of the SDK that constraints.txt pins. A test fails until both are bumped together; the
CLI may be newer than the SDK that is installed, and older by much."""
_QUIET = {"PULUMI_SKIP_UPDATE_CHECK": "true"}
_PACKAGES = {"aws": "pulumi_aws", "gcp": "pulumi_gcp", "azure": "pulumi_azure_native"}


class Plugin(msgspec.Struct, frozen=True):
    """The plug-in that a provider's Python package needs (``pulumi-plugin.json``)."""

    name: str
    version: str

    @property
    def program(self) -> str:
        return f"pulumi-resource-{self.name}"


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """A plug-in that the engine would run."""

    program: Path
    folder: Path | None
    """Of it alone; ``None``: it is on PATH, of whatever version."""


def cli_folder() -> Path:
    return state_dir() / "pulumi-cli"


def found_cli() -> PulumiCommand:
    """The one on PATH, else gpuctl's own. Raises ``StackFailed`` if there is none, or none that is new enough."""
    from pulumi.automation import PulumiCommand

    own = cli_folder()
    refused: list[StackFailed] = []
    for root in (None, str(own)):
        if not (shutil.which("pulumi") if root is None else (own / "bin" / "pulumi").is_file()):
            continue
        try:
            found = PulumiCommand(root=root, skip_version_check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            refused.append(_refusal(FailureKind.NO_CLI, f"Pulumi's CLI does not run: {error}"))
            continue
        version = found.version
        if version is not None and (version.major, version.minor, version.patch) >= OLDEST_CLI:
            return found
        told = version or "of a version that it does not tell"
        refused.append(_refusal(FailureKind.OLD_CLI, f"Pulumi's CLI is {told}, which is too old"))
    raise refused[0] if refused else _refusal(FailureKind.NO_CLI, "Pulumi's CLI is not installed")


def ensure_cli(agree: Callable[[Release, StackFailed], bool], on_download: OnDownload) -> PulumiCommand:
    """``found_cli``, after it has been installed into gpuctl's own folder if ``agree`` says so; it gets what would be
    installed, and why. Raises ``StackFailed`` if not, or if it cannot be."""
    try:
        return found_cli()
    except StackFailed as error:
        missing = error
    release = pulumi_release.cli(CLI)
    if not agree(release, missing):
        raise missing
    with _installing(release, missing.kind, missing.hint), _alone(release, on_download):
        with suppress(StackFailed):
            return found_cli()  # another process was faster
        archive = pulumi_release.download(release, cli_folder(), on_download)
        try:
            _put_in_place(archive)
        finally:
            archive.unlink()
        return found_cli()


def ensure_plugin(command: PulumiCommand, provider: CloudName, on_download: OnDownload) -> None:
    """Download the provider's plug-in now if the engine would do it half-way, unseen. Raises ``StackFailed``, and
    ``BadInput`` if the provider's packages are not installed."""
    needed = needed_plugin(provider)
    if find_plugin(needed):
        return
    release = pulumi_release.plugin(needed.name, needed.version)
    by_hand = f"pulumi plugin install resource {needed.name} {needed.version}"
    with _installing(release, FailureKind.NO_PLUGIN, f"or run: {by_hand}"), _alone(release, on_download):
        if find_plugin(needed):
            return
        if os.environ.get("PULUMI_PLUGIN_DOWNLOAD_URL_OVERRIDES"):  # where to download from is the CLI's to say
            with on_download(f"downloading {release.what}", None):
                _install_plugin(command, needed)
            return
        archive = pulumi_release.download(release, cli_folder(), on_download)
        try:
            _install_plugin(command, needed, "--file", str(archive))
        finally:
            archive.unlink()


def needed_plugin(provider: CloudName) -> Plugin:
    """Raises ``BadInput`` if the provider's package is not installed."""
    package = _PACKAGES[provider]
    spec = find_spec(package)  # importing it takes a second
    if spec is None or not spec.submodule_search_locations:
        raise needs(provider, ModuleNotFoundError(name=package))
    told = Path(spec.submodule_search_locations[0]) / "pulumi-plugin.json"
    return msgspec.json.decode(told.read_bytes(), type=Plugin)


def find_plugin(plugin: Plugin) -> FoundPlugin | None:
    """Find a plug-in as the engine does (sdk/go/common/workspace/plugins.go): one on PATH first, of any version; else
    this very version in Pulumi's own folder, unless its installation has not ended."""
    ignores_path = os.environ.get("PULUMI_IGNORE_AMBIENT_PLUGINS", "").lower() in ("1", "true")
    if not ignores_path and (there := shutil.which(plugin.program)):
        return FoundPlugin(Path(there), None)
    home = Path(os.environ.get("PULUMI_HOME") or Path.home() / ".pulumi")
    folder = home / "plugins" / f"resource-{plugin.name}-v{plugin.version}"
    if folder.is_dir() and not folder.with_name(f"{folder.name}.partial").exists():
        return FoundPlugin(folder / plugin.program, folder)
    return None


def checks(provider: CloudName) -> list[PreflightCheck]:
    """Check what ``up`` needs on this machine: rows of ``gpuctl check``."""
    return [
        PreflightCheck.of("pulumi", lambda: _cli_check(provider)),
        PreflightCheck.of("plug-in", lambda: _plugin_check(provider)),
    ]


def _cli_check(provider: CloudName) -> PreflightCheck:
    if find_spec("pulumi") is None:
        raise needs(provider, ModuleNotFoundError(name="pulumi"))
    found = found_cli()
    program = Path(shutil.which(found.command) or found.command).resolve()
    size = sum(one.stat().st_size for one in program.parent.glob("pulumi*") if one.is_file())
    return PreflightCheck.ok("pulumi", f"{found.version} in {program.parent} ({_megabytes(size)})")


def _plugin_check(provider: CloudName) -> PreflightCheck:
    needed = needed_plugin(provider)
    found = find_plugin(needed)
    if found is None:
        return PreflightCheck.ok(
            "plug-in", f"{needed.name} {needed.version} is not installed yet; `gpuctl up` downloads it"
        )
    if found.folder is None:
        size = found.program.stat().st_size
        return PreflightCheck.ok("plug-in", f"{needed.name}: {found.program} from PATH is used ({_megabytes(size)})")
    size = sum(one.stat().st_size for one in found.folder.rglob("*") if one.is_file())
    return PreflightCheck.ok("plug-in", f"{needed.name} {needed.version} in {found.folder} ({_megabytes(size)})")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def _refusal(kind: FailureKind, message: str) -> StackFailed:
    oldest = ".".join(map(str, OLDEST_CLI))
    own = cli_folder() / "bin" / "pulumi"
    return StackFailed(kind, message, f"install {oldest} or newer (pulumi.com/docs/install), or put it at {own}")


@contextmanager
def _installing(release: Release, kind: FailureKind, hint: str) -> Iterator[None]:
    """Turn what goes wrong within into a ``StackFailed`` of one line."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        message = f"{release.what} could not be installed in {cli_folder()}: {error.strerror or error}{where}"
        raise StackFailed(kind, message, "repeat it; the download resumes") from error
    except pulumi_release.DownloadFailed as error:
        raise StackFailed(kind, error.message, error.hint or hint) from error


@contextmanager
def _alone(release: Release, on_download: OnDownload) -> Iterator[None]:
    """One process at a time; the lock ends with its holder."""
    lock = private_folder(cli_folder()) / f".{release.file}.lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with on_download(f"waiting for another gpuctl that installs {release.what}", None):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _put_in_place(archive: Path) -> None:
    """All of the CLI, or nothing: it is unpacked and run beside the place where it is found, then moved there."""
    folder = cli_folder()
    for stale in folder.glob(".unpacked-*"):
        shutil.rmtree(stale)
    unpacked = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=folder))
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer have it
            tar.extractall(unpacked)
        new = unpacked / "pulumi" / "bin"  # as releases before 3.0 had it, and as Windows' have it
        new = new if new.is_dir() else unpacked / "pulumi"
        subprocess.run(
            [new / "pulumi", "version"], check=True, capture_output=True, env=os.environ | _QUIET, timeout=60
        )
        if (folder / "bin").exists():
            (folder / "bin").rename(unpacked / "old")
        new.rename(folder / "bin")
    except (tarfile.TarError, EOFError, zlib.error, subprocess.SubprocessError) as error:
        raise pulumi_release.DownloadFailed(f"{archive.name} is not a CLI that runs here: {error}") from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _install_plugin(command: PulumiCommand, plugin: Plugin, *more: str) -> None:
    """The CLI's own way, which takes a lock and marks what is not whole."""
    from pulumi.automation import CommandError

    args = ["plugin", "install", "resource", plugin.name, plugin.version, *more]
    try:
        command.run(args, str(cli_folder()), _QUIET)
    except CommandError as error:
        errors = [line for line in str(error).replace(" stderr: ", "").splitlines() if line.startswith("error: ")]
        said = first_line("\n".join(errors) or str(error))
        message = f"Pulumi's plug-in {plugin.name} {plugin.version} could not be installed: {said}"
        raise pulumi_release.DownloadFailed(message) from error
