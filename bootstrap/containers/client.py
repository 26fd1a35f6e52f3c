"""Docker or Podman on this node: find it, and ask it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuctl.bootstrap.containers.command_lines import ContainerRuntime
from gpuctl.cluster.errors import GpuctlError

_ASK_S = 30.0
"""For an answer to a question that costs nothing."""


class ContainerClient:
    """Runs Docker's or Podman's own program. ``env``: its variables, which may lack ``HOME``."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = {"HOME": str(Path.home()), **env}

    def ask(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """What a command that ends at once has said; one that could not be run has failed."""
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env=self.env,
                timeout=_ASK_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))

    def has(self, runtime: ContainerRuntime, image: str) -> bool:
        """Whether ``image``, by its full name, is here."""
        return self.ask([runtime.program, "image", "inspect", "--format", "{{.Id}}", image]).returncode == 0

    def find(self) -> ContainerRuntime:
        """Docker if it answers, else Podman. Raises ``GpuctlError`` if neither is there."""
        if sys.platform != "linux":
            raise GpuctlError("images need Linux nodes", "train without --image")
        complaint = "neither Docker nor Podman is installed on this node"
        docker, podman = shutil.which("docker"), shutil.which("podman")
        if docker and "podman" not in self.ask([docker, "--version"]).stdout.lower():
            answer = self.ask([docker, "info", "--format", "{{.ServerVersion}} {{.SecurityOptions}}"])
            if answer.returncode == 0:
                return ContainerRuntime("docker", docker, rootless="rootless" in answer.stdout)
            complaint = f"Docker does not respond on this node: {last_line(answer.stderr)}"
        if podman:
            answer = self.ask([podman, "info", "--format", "json"])
            if answer.returncode == 0:
                host = msgspec.json.decode(answer.stdout)["host"]
                rootless, remote = host["security"]["rootless"], host.get("serviceIsRemote")
                scopes = host.get("cgroupManager") == "systemd" and not rootless and not remote
                return ContainerRuntime("podman", podman, rootless=rootless, scopes=scopes)
            complaint = f"Podman does not work on this node: {last_line(answer.stderr)}"
        raise GpuctlError(complaint, "fix or install one, or train without --image")


def last_line(text: str) -> str:
    """The last line that a runtime has printed, without what it begins errors with."""
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("Error: ").removeprefix("ERROR: ") if lines else "it printed nothing"
