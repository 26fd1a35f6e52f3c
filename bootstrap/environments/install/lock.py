"""A source resolved for this node: which version of each package, and which of its wheels.

uv does it, of wheels alone: what a build from source would make depends on what else is on the machine. Each kind of
source becomes a ``pylock.toml`` (PEP 751).

The node's torch fits its driver, and stays. Where uv resolves, it is told that torch is there in that very version and
needs nothing, so that dependents such as torchvision are chosen to go with it. From a lock that has the same version it
is left out, with all that only it needs; one that has another brings its own (see ``driver``).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuctl.bootstrap.environments.facts import NodeFacts
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed, Uv
from gpuctl.cluster.environments.source import UV_SETTINGS, index_urls
from gpuctl.cluster.records.environments import EnvironmentSource

_FILE = "pylock.toml"
_OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""What a lock has because of torch alone."""
_TORCH_IS_HERE = """\
[[dependency-metadata]]
name = "torch"
version = "{release}"
requires-dist = []
"""


@dataclass(frozen=True, slots=True)
class Lock:
    """The packages of an environment, as ``path`` has them for uv."""

    path: Path
    packages: dict[str, str]
    """Versions by name."""
    digest: str
    """Of the environment: see ``NodeFacts.environment_of``."""
    wheel_bytes: int
    """Of the wheels, where that is known."""
    torch: str
    """The node's torch, if it is the one that is used; empty: it has its own, or there is none."""
    folder: Path
    """Where uv finds its settings, such as indexes."""
    config: Path | None = None
    """The settings, if not those."""
    indexes: tuple[str, ...] = ()
    """URLs that the source names: a lock has none, and with one may come the password for its wheels."""


def resolve(
    source: EnvironmentSource,
    code: Path,
    scratch: Path,
    uv: Uv,
    facts: NodeFacts,
    python: Path,
    *,
    wheels: Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Lock:
    """Resolve ``source`` for this node.

    Args:
        code: the job's unpacked folder, in which the source's file lies.
        scratch: an empty folder for the result.
        python: the interpreter that it is for.
        wheels: a folder with the only wheels that may be used.

    Raises ``EnvironmentFailed`` with the resolver's reason, ``OSError``, ``Fenced``.
    """
    path = scratch / _FILE
    config = None
    match source.kind:
        case "requirements":
            config = _compile(source.file, code, path, uv, facts, str(python), wheels, is_over)
        case "uv.lock":
            _export(source.file, code, path, uv, facts, str(python), is_over)
        case "pylock":
            _filter(code / source.file, path, facts)
        case "conda":
            raise EnvironmentFailed(
                f"{source.file}: this node has no conda",
                "use a requirements.txt or a uv.lock, or --image with an image that has it",
            )
    indexes = index_urls(code, source.file) if source.kind == "requirements" else []
    found = _read(path, source.file, (code / source.file).parent, facts)
    return replace(found, config=config, indexes=tuple(indexes))


def _compile(
    file: str,
    code: Path,
    path: Path,
    uv: Uv,
    facts: NodeFacts,
    python: str,
    wheels: Path | None,
    is_over: Callable[[], bool],
) -> Path | None:
    """Returns the settings that uv needs, if not those that it finds."""
    here = path.parent / "constraints.txt"
    given = [*facts.needs, *([f"torch=={facts.torch_release}"] if facts.torch else [])]
    here.write_text("".join(f"{line}\n" for line in given))
    options = ["--constraints", str(here), "--python", python, "--only-binary", ":all:", "--format", "pylock.toml"]
    config = None
    if facts.torch:
        config, theirs = path.parent / UV_SETTINGS, (code / file).parent / UV_SETTINGS
        settings = theirs.read_text() + "\n" if theirs.is_file() else ""  # uv reads one such file
        config.write_text(settings + _TORCH_IS_HERE.format(release=facts.torch_release))
        options += ["--config-file", str(config), "--no-emit-package", "torch"]
    if wheels is not None:
        options += ["--no-index", "--find-links", str(wheels)]
    uv.run("pip", "compile", file, *options, "--output-file", str(path), "-q", cwd=code, what=file, is_over=is_over)
    return config


def _export(
    file: str, code: Path, path: Path, uv: Uv, facts: NodeFacts, python: str, is_over: Callable[[], bool]
) -> None:
    locked = {one["name"]: str(one.get("version", "")) for one in _table(code / file, file).get("package", [])}
    own = _has_own_torch(locked, facts)
    prune = [] if own or "torch" not in locked else ["--prune", "torch"]
    options = ["--locked", "--no-dev", "--no-emit-project", "--format", "pylock.toml", "--python", python, *prune]
    folder = (code / file).parent
    uv.run("export", *options, "--output-file", str(path), "-q", cwd=folder, what=file, is_over=is_over)


def _filter(given: Path, path: Path, facts: NodeFacts) -> None:
    """Without torch and what it alone needs, if the node has that very version. A lock may not say who needs what, so
    these go by their names."""
    text = given.read_text(encoding="utf-8")
    head, *blocks = re.split(r"(?m)^(?=\[\[packages\]\])", text)
    locked = {one["name"]: str(one.get("version", "")) for one in _table(given, given.name).get("packages", [])}
    if "torch" in locked and not _has_own_torch(locked, facts):
        blocks = [block for block in blocks if not _OF_TORCH.fullmatch(_name(block))]
    path.write_text(head + "".join(blocks), encoding="utf-8")


def _name(block: str) -> str:
    found = re.search(r'(?m)^name\s*=\s*"([^"]+)"', block)
    return found[1] if found else ""


def _has_own_torch(locked: Mapping[str, str], facts: NodeFacts) -> bool:
    return "torch" in locked and locked["torch"].partition("+")[0] != facts.torch_release


def _read(path: Path, file: str, folder: Path, facts: NodeFacts) -> Lock:
    table = _table(path, file)
    packages: Sequence[Mapping[str, Any]] = table.get("packages", [])
    versions = {one["name"]: str(one.get("version", "")) for one in packages}
    _check_needs(versions, file, facts)
    chosen = [(one["name"], str(one.get("version", "")), sorted(_hashes(one))) for one in packages]
    sizes = [min((wheel.get("size", 0) for wheel in one.get("wheels", ())), default=0) for one in packages]
    return Lock(
        path=path,
        packages=versions,
        digest=facts.environment_of(chosen),
        wheel_bytes=sum(sizes),
        torch="" if "torch" in versions else facts.torch,
        folder=folder,
    )


def _check_needs(versions: Mapping[str, str], file: str, facts: NodeFacts) -> None:
    """Raises ``EnvironmentFailed`` for a lock with which gpuctl itself could not run. What uv resolves here has them as
    constraints already."""
    from packaging.requirements import Requirement

    for text in facts.needs:
        need = Requirement(text)
        version = versions.get(need.name)
        if version and not need.specifier.contains(version, prereleases=True):
            raise EnvironmentFailed(
                f"{file}: it has {need.name} {version}, and gpuctl needs {need.name}{need.specifier}",
                f"lock {need.name} in that range",
            )


def _hashes(package: Mapping[str, Any]) -> list[str]:
    of_wheels = [str(value) for wheel in package.get("wheels", ()) for value in wheel.get("hashes", {}).values()]
    return of_wheels or [str(package.get("vcs") or package.get("archive") or "")]


def _table(path: Path, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EnvironmentFailed(f"{file} is not TOML: {error}", "let its tool write it anew") from error
