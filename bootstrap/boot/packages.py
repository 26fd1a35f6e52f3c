"""apt on a machine where others use it too: waits for their locks, adds our sources without breaking theirs."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from .steps import sh, works

_LOCKS = ("var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock", "var/lib/apt/lists/lock", "var/cache/apt/archives/lock")
_QUIET = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"}
"""needrestart only lists: in mode ``a`` it may restart gpuctl-boot in the middle of a step."""


@dataclass(frozen=True)
class Packages:
    """The package manager of the machine below ``root``. ``given``: deb lines by name that replace the usual ones (see
    ``install``)."""

    root: Path
    given: Mapping[str, str]

    def install(self, *packages: str) -> None:
        """Raises ``OSError``. A list that cannot be updated is no reason to fail: what is wanted may be in another."""
        self.wait_for_dpkg()
        options = ["-q", "-y", "-o", "DPkg::Lock::Timeout=600"]
        if line := self.given.get("apt"):
            self._add(line)
            options += ["-o", f"Dir::Etc::sourcelist={self._ours}", "-o", "Dir::Etc::sourceparts=-"]
        sh("dpkg", "--configure", "-a", env=_QUIET)  # what was broken off
        works("apt-get", *options, "update", env=_QUIET)
        sh("apt-get", *options, "--no-install-recommends", "install", *packages, env=_QUIET)

    def install_from(self, name: str, key: str, url: str, suite: str, *packages: str) -> None:
        """``install`` with one more source: the given one called ``name``, or else ``url`` with ``suite``, signed by
        what lies at ``key``. Where that fails, the source is taken out again: apt refuses all others with a bad one.

        A URL that the machine's sources have already is left to them: the same twice with different keys is an error
        for every later call of apt (``Conflicting values set for option Signed-By``).
        """
        before = self._lines()
        if line := self.given.get(name):
            self._add(line)
        elif not self._has(url):
            keyring = self._at(f"etc/apt/keyrings/gpuctl-{name}.asc")
            with urlopen(key, timeout=30) as answer:
                keyring.write_bytes(answer.read())
            self._add(f"deb [signed-by={keyring}] {url} {suite}")
        try:
            self.install(*packages)
        except OSError:
            self._ours.write_text("".join(f"{line}\n" for line in before))
            raise

    def hold_driver(self) -> None:
        """No upgrade takes it from under what runs."""
        if not shutil.which("dpkg-query"):
            return
        show = ("dpkg-query", "-W", "-f", r"${Package} ${db:Status-Abbrev}\n", "*nvidia*", "cuda-drivers*")
        listed = subprocess.run(show, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
        if held := [line.split()[0] for line in listed.splitlines() if line.split()[1:2] in (["ii"], ["hi"])]:
            sh("apt-mark", "hold", *held)

    def wait_for_dpkg(self) -> None:
        """Until nobody else holds any of dpkg's locks; the step's limit ends that."""
        for name in _LOCKS:
            path = self.root / name
            if path.exists():
                with path.open("a") as file:
                    print(f"waiting for {path}", flush=True)
                    fcntl.lockf(file, fcntl.LOCK_EX)

    def system(self) -> str:
        """The distribution's name in NVIDIA's repository, such as ``ubuntu2404``."""
        lines = (self.root / "etc/os-release").read_text().splitlines()
        told = {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}
        return f"{told['ID']}{told['VERSION_ID']}".replace(".", "")

    @property
    def _ours(self) -> Path:
        return self._at("etc/apt/sources.list.d/gpuctl.list")

    def _lines(self) -> list[str]:
        return self._ours.read_text().splitlines() if self._ours.exists() else []

    def _add(self, line: str) -> None:
        there = self._lines()
        if line not in there:
            self._ours.write_text("\n".join([*there, line, ""]))

    def _has(self, url: str) -> bool:
        apt = self.root / "etc/apt"
        files = [apt / "sources.list", *apt.glob("sources.list.d/*.list"), *apt.glob("sources.list.d/*.sources")]
        wanted = re.compile(rf"^[^#\n]*{re.escape(url.rstrip('/'))}/?(\s|$)", re.MULTILINE)
        return any(wanted.search(file.read_text(errors="replace")) for file in files if file.exists())

    def _at(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
