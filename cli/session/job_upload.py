"""What a job takes along: the working folder, the file that says which packages it needs, and wheels for them. And what
a build of an image does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from gpuctl.cli.render.terminal import bar, count, say, size
from gpuctl.cluster import layout
from gpuctl.cluster.environments import source
from gpuctl.cluster.environments.source import FoundSource
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import code_archive, code_survey, dockerignore, private_files
from gpuctl.cluster.jobs.code_survey import Survey
from gpuctl.cluster.jobs.dockerignore import DockerIgnore
from gpuctl.cluster.records.environments import EnvironmentSource
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.upload import upload_file
from gpuctl.stacks.state.paths import state_dir

_NAMED = 5
"""Of a list, in a line."""


def refuse_home(folder: Path) -> None:
    """Raises ``BadInput`` for a folder that holds a user's keys, among everything in your home."""
    if held := private_files.of_home(folder.resolve()):
        raise BadInput(
            f"the working folder is copied to the nodes, and {folder} holds {held}",
            "move what is needed to a folder of its own, and work there",
        )


def send_folder(store: Bucket, folder: Path, script: str, needed: Sequence[str] = ()) -> str:
    """Pack ``folder`` and send it unless the bucket has it; returns its digest.

    Args:
        store: the cluster's bucket.
        folder: the working folder.
        script: what is to run in it, which may be a program of the nodes' instead.
        needed: files in it without which that cannot be.

    Raises ``BadInput`` for one of these that is excluded.
    """
    found = code_survey.look_over(folder, apart=state_dir().resolve())
    is_here = (folder / script).is_file() and not Path(script).is_absolute()
    sent = {item.name for item in found.items}
    for name in (script, *needed) if is_here else needed:
        if name not in sent:
            raise BadInput(f"{name} is excluded by .gitignore, so the nodes would not get it", "change .gitignore")
    return _send(store, found, "code", ".gpuctlignore")


def send_context(store: Bucket, folder: Path, dockerfile: str) -> str:
    """Pack ``folder`` for a build, and send it unless the bucket has it; returns its digest. Raises ``BadInput``."""
    ignore = DockerIgnore(folder.resolve(), dockerfile)
    found = code_survey.look_over(folder, apart=state_dir().resolve(), ignore=ignore)
    return _send(store, found, "folder", dockerignore.FILE)


def _send(store: Bucket, found: Survey, what: str, ignore_file: str) -> str:
    if found.private:
        names = ", ".join(found.private[:_NAMED]) + (" …" if len(found.private) > _NAMED else "")
        say(f"not uploaded, as they may hold secrets: {names} (to send one: a line !NAME in {ignore_file})")
    with code_archive.packed(found.items) as code:
        what = f"{what} ({count(code.files, 'file')})"
        if code_archive.is_there(store, code.digest):
            say(f"{what}: {size(code.bytes)}, already there")
        else:
            with bar(what, code.bytes) as on_bytes:
                code_archive.upload(store, code, on_bytes)
        return code.digest


def choose(folder: Path, choice: str | None, image: str | None) -> FoundSource | None:
    """The source that a job in ``folder`` uses, by ``--environment`` or what lies there; ``None``: it needs none.

    With an image there is none either: that is the environment. Raises ``BadInput`` for a source that cannot be used.
    """
    if image:
        if choice and choice != source.NONE:
            raise BadInput(f"--environment {choice} has no effect with --image", "the image has the packages; drop one")
        say(f"environment: image {image}")
        return None
    found = source.find(folder, choice)
    if found:
        say(f"environment: {found.source.file} ({count(found.packages, 'package')})")
    return found


def read_wheels(folder: str, found: FoundSource | None) -> list[Path]:
    """The wheels in the folder that ``--wheels`` names. Raises ``BadInput`` where that says nothing."""
    if found is None or found.source.kind != "requirements":
        raise BadInput("--wheels needs a requirements.txt that says which packages to install", "add one")
    wheels = sorted(Path(folder).glob("*.whl"))
    if not Path(folder).is_dir():
        raise BadInput(f"--wheels {folder} is not a folder", "fill one: pip download -r requirements.txt -d wheels")
    if not wheels:
        raise BadInput(f"--wheels {folder} has no wheels", "fill it: pip download -r requirements.txt -d " + folder)
    return wheels


def send_wheels(store: Bucket, wheels: list[Path], found: EnvironmentSource) -> EnvironmentSource:
    """Upload those that the bucket does not have; returns the source with all of them."""
    keys = {layout.wheel(_sha256(path), path.name): path for path in wheels}
    there = {entry.key for entry in store.list(f"{layout.ENVIRONMENTS}/wheels")}
    missing = {key: path for key, path in keys.items() if key not in there}
    with bar(f"wheels ({count(len(missing), 'file')})", sum(path.stat().st_size for path in missing.values())) as sent:
        for key, path in missing.items():
            upload_file(store, key, path, sent)
    return replace(found, wheels=tuple(sorted(keys)))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
