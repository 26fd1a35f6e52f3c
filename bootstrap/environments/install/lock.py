"""A source resolved for this node: which version of each package, and which of its wheels.

uv does it, of wheels alone: what a build from source would make depends on what else is on the machine. Each kind of
source becomes a ``pylock.toml`` (PEP 751).

The node's torch fits its driver, and stays. Where uv resolves, it is told that torch is there in that very version and
needs nothing, so that dependents such as torchvision are chosen to go with it. From a lock that has the same version it
is left out, with all that only it needs; one that has another brings its own (see ``driver``). The node's gpuctl stays
in any case: it is that of the cluster.
"""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuctl.bootstrap.environments.facts import NodeFacts
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed, Uv
from gpuctl.cluster import distribution
from gpuctl.cluster.environments.source import UV_SETTINGS, hashes, index_urls
from gpuctl.cluster.records.environments import EnvironmentSource

_FILE = "pylock.toml"
_OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""What a lock has because of torch alone."""
_IS_HERE = """\
[[dependency-metadata]]
name = "{name}"
version = "{version}"
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
    is_conda: bool = False
    """It is the lock of an ``environment.yml``: see ``conda``."""


def resolve(
    source: EnvironmentSource,
    code: Path,
    scratch: Path,
    uv: Uv,
    facts: NodeFacts,
    *,
    wheels: Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Lock:
    """Resolve ``source`` for this node.

    Args:
        code: the job's unpacked folder, in which the source's file lies.
        scratch: an empty folder for the result.
        wheels: a folder with the only wheels that may be used.

    Raises ``EnvironmentFailed`` with the resolver's reason, ``OSError``, ``Fenced``.
    """
    path = scratch / _FILE
    config = None
    match source.kind:
        case "requirements":
            config = _compile(source.file, code, path, uv, facts, wheels, is_over)
        case "uv.lock":
            _export(source.file, code, path, uv, facts, is_over)
        case "pylock":
            _filter(code / source.file, path, facts)
        case "conda":
            raise AssertionError("see conda.resolve")
    indexes = index_urls(code, source.file) if source.kind == "requirements" else []
    if source.kind == "requirements":
        _check_hashes(path, source.file, hashes(code, source.file))
    found = _read(path, source.file, (code / source.file).parent, facts)
    return replace(found, config=config, indexes=tuple(indexes))


def _compile(
    file: str,
    code: Path,
    path: Path,
    uv: Uv,
    facts: NodeFacts,
    wheels: Path | None,
    is_over: Callable[[], bool],
) -> Path:
    """Returns the settings that uv needs in place of those that it would find."""
    here = path.parent / "constraints.txt"
    own = facts.own_packages
    here.write_text("".join(f"{line}\n" for line in (*facts.needs, *(f"{name}=={own[name]}" for name in own))))
    config, theirs = path.parent / UV_SETTINGS, (code / file).parent / UV_SETTINGS
    settings = theirs.read_text() + "\n" if theirs.is_file() else ""  # uv reads one such file
    config.write_text(settings + "".join(_IS_HERE.format(name=name, version=own[name]) for name in own))
    options = ["--constraints", str(here), "--config-file", str(config), "--python", sys.executable]
    options += ["--only-binary", ":all:", "--format", "pylock.toml"]
    for name, version in own.items():
        write_stub(path.parent / "stubs", name, version)  # an index may have neither, and a folder of wheels
        options += ["--no-emit-package", name]
    options += ["--find-links", str(path.parent / "stubs")]
    if wheels is not None:
        options += ["--no-index", "--find-links", str(wheels)]
    uv.run("pip", "compile", file, *options, "--output-file", str(path), "-q", cwd=code, what=file, is_over=is_over)
    return config


def _export(file: str, code: Path, path: Path, uv: Uv, facts: NodeFacts, is_over: Callable[[], bool]) -> None:
    locked = {one["name"]: str(one.get("version", "")) for one in _table(code / file, file).get("package", [])}
    options = ["--locked", "--no-dev", "--no-emit-project", "--format", "pylock.toml", "--python", sys.executable]
    for name in facts.own_packages:
        if name in locked and not (name == "torch" and _has_own_torch(locked, facts)):
            options += ["--prune", name]
    folder = (code / file).parent
    uv.run("export", *options, "--output-file", str(path), "-q", cwd=folder, what=file, is_over=is_over)


def _filter(given: Path, path: Path, facts: NodeFacts) -> None:
    """Without gpuctl, and without torch and what it alone needs if the node has that very version. A lock may not say
    who needs what, so these go by their names."""
    text = given.read_text(encoding="utf-8")
    head, *blocks = re.split(r"(?m)^(?=\[\[packages\]\])", text)
    locked = {one["name"]: str(one.get("version", "")) for one in _table(given, given.name).get("packages", [])}
    if "torch" in locked and not _has_own_torch(locked, facts):
        blocks = [block for block in blocks if not _OF_TORCH.fullmatch(_name(block))]
    blocks = [block for block in blocks if _name(block) != distribution.NAME]
    path.write_text(head + "".join(blocks), encoding="utf-8")


def write_stub(folder: Path, name: str, version: str) -> Path:
    """Write a wheel with nothing in it: a package that is there already, for a resolver to see."""
    stem = f"{name.replace('-', '_')}-{version}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        about = f"{stem}.dist-info"
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def _name(block: str) -> str:
    found = re.search(r'(?m)^name\s*=\s*"([^"]+)"', block)
    return found[1] if found else ""


def _has_own_torch(locked: Mapping[str, str], facts: NodeFacts) -> bool:
    return "torch" in locked and locked["torch"].partition("+")[0] != facts.torch_release


def _read(path: Path, file: str, folder: Path, facts: NodeFacts) -> Lock:
    table = _table(path, file)
    packages: Sequence[Mapping[str, Any]] = table.get("packages", [])
    versions = {one["name"]: str(one.get("version", "")) for one in packages}
    check_needs(versions, file, facts)
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


def check_needs(versions: Mapping[str, str], file: str, facts: NodeFacts) -> None:
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


def _check_hashes(path: Path, file: str, given: Mapping[str, Collection[str]]) -> None:
    """Raises ``EnvironmentFailed`` if a wheel may be installed whose hash is not among those that ``file`` gives for
    its package: ``uv pip compile`` does not look at them."""
    for package in _table(path, file).get("packages", []):
        wanted = given.get(package["name"])
        for wheel in package.get("wheels", ()) if wanted else ():
            if not {f"{kind}:{value}" for kind, value in wheel.get("hashes", {}).items()} & set(wanted or ()):
                name = str(wheel.get("name") or wheel.get("url") or wheel.get("path") or "").rpartition("/")[2]
                raise EnvironmentFailed(
                    f"{file}: {name} is not what its hashes for {package['name']} say",
                    "list the hashes of all its files (pip-compile --generate-hashes), or use a uv.lock",
                )


def _hashes(package: Mapping[str, Any]) -> list[str]:
    of_wheels = [str(value) for wheel in package.get("wheels", ()) for value in wheel.get("hashes", {}).values()]
    return of_wheels or [str(package.get("vcs") or package.get("archive") or "")]


def _table(path: Path, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EnvironmentFailed(f"{file} is not TOML: {error}", "let its tool write it anew") from error
