"""A shell, or a command, where a job's workers run on this node: ``python -m gpuctl.bootstrap.job_shell NODE_FOLDER JOB
[WORD...]``. It has their folder, their variables and their packages; of a job with an image, their container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuctl.bootstrap.containers.command_lines import ContainerRuntime
from gpuctl.bootstrap.containers.node_containers import NOTE
from gpuctl.bootstrap.environments.disk import EnvironmentDisk
from gpuctl.bootstrap.environments.node_environments import OF_JOB
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.bootstrap.jobs.workspace import JobWorkspace
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a job's workers run on this node."""

    folder: Path
    """The job's code."""
    env: Mapping[str, str]
    python: str
    prefix: tuple[str, ...] = ()
    """What a command begins with, to be run there: of a job with an image."""

    def command(self, words: Sequence[str], *, terminal: bool = False) -> list[str]:
        """``words`` as a command of this machine; none are a shell."""
        words = words or [os.environ.get("SHELL", "/bin/sh") if not self.prefix else "sh"]
        return [*(part for part in self.prefix if terminal or part != "-t"), *words]


def find(node: Path, job: str) -> JobPlace:
    """Where ``job`` runs on the node whose folder is ``node``. Raises ``GpuctlError`` if it was not prepared there."""
    identity = NodeIdentity.read(node)
    os.environ.update(identity.env)  # the keys to the bucket, where the machine has no identity of its own
    folder = node / "jobs" / job
    workspace = JobWorkspace(open_bucket(identity.bucket), folder, job)
    if not workspace.code.is_dir():
        raise GpuctlError(f"{job} has not been prepared on {identity.node}", "name another job with --job, or a node")
    spec = workspace.prepare()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = workspace.worker_env({**os.environ, **identity.env, "PATH": path})
    if spec.image:
        return JobPlace(workspace.code, env, "python3", _in_container(node, job, workspace.code))
    if spec.environment is None:
        return JobPlace(workspace.code, env, sys.executable)
    digest = (folder / OF_JOB).read_text() if (folder / OF_JOB).is_file() else ""
    found = EnvironmentDisk(node / "environments", print).find(digest) if digest else None
    if found is None:
        raise GpuctlError(f"the environment of {job} is not on {identity.node}", "wait until the job has begun there")
    return JobPlace(workspace.code, found.variables(env), found.python)


def _in_container(node: Path, job: str, code: Path) -> tuple[str, ...]:
    """The beginning of a command in the container that runs the job's workers here."""
    try:
        runtime = msgspec.json.decode((node / NOTE).read_bytes(), type=ContainerRuntime)
    except (OSError, msgspec.MsgspecError):
        raise GpuctlError(f"no container has run on this node, so none of {job} has", "see `gpuctl status`") from None
    ask = [runtime.program, "ps", "-q", "--filter", f"label=gpuctl.job={job}"]
    running = subprocess.run(ask, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout.split()
    if not running:
        raise GpuctlError(f"no container of {job} runs on this node", "its image is used while it trains")
    return (runtime.program, "exec", "-i", "-t", "-w", str(code), running[0])


def main(folder: str, job: str, *words: str) -> int:
    """Become that shell, or command; returns only if it cannot."""
    try:
        place = find(Path(folder), job)
    except GpuctlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    command = place.command(words, terminal=os.isatty(0))
    os.chdir(place.folder)
    try:
        os.execvpe(command[0], command, dict(place.env))
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
