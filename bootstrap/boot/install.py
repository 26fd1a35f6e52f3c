"""What a bare machine is made of: the steps, in their order. Each leaves alone what is there already, so on an image
that brings driver, Docker and fabric this takes seconds.

Packages come from the machine's own sources and NVIDIA's; ``NodeSpec.sources`` may name others, for closed networks:

    apt      a deb line that is used in place of all sources of the machine
    driver   a deb line in place of NVIDIA's CUDA repository
    toolkit  a deb line in place of NVIDIA's repository of the container toolkit
    efa      URL of AWS's EFA installer, a .tar.gz

A machine of ``ssh`` belongs to somebody: there nothing is installed but gpuctl, and no disk and no setting is touched.

Sources: docs.nvidia.com, "NVIDIA Driver Installation Guide", "Installing the NVIDIA Container Toolkit" and "Driver
Persistence"; AWS, "Get started with EFA". Reloads of systemd come before containers:
github.com/NVIDIA/nvidia-container-toolkit/issues/48.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from .gate import check
from .metadata import Instance
from .scratch import make_scratch
from .steps import Step, sh
from .store import Store, fetch

_LOCKS = ("var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock", "var/lib/apt/lists/lock", "var/cache/apt/archives/lock")
_UPGRADES = ("apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service")
_CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
_TOOLKIT = "https://nvidia.github.io/libnvidia-container"
_EFA = "https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz"
_AGENT = "gpuctl-agent.service"
_OLDEST_PYTHON = (3, 11)
_AWAY = b"the bucket"


@dataclass(frozen=True)
class Machine:
    """One of them, and what its steps need to know."""

    root: Path
    spec: Mapping[str, Any]
    node: str
    instance: Instance
    store: Store
    heartbeat_within_s: float = 60.0
    """Of the agent, after its start."""

    def steps(self) -> list[Step]:
        package = self.spec["package"]
        mark = " ".join((package["sha256"], package["constraints_sha256"], *package["extras"]))
        ours = [
            Step("gate", lambda: check(self.spec["promise"]), 120, tries=3, always=True),
            Step("gpuctl", self.gpuctl, 1800, mark=mark),
            Step("identity", self.identity, 60, always=True),
            Step("agent", self.agent, 120, tries=2, always=True),
        ]
        if self.spec["provider"] == "ssh":
            return ours
        return [
            Step("hold", self.hold, 900),
            Step("driver", self.driver, 1200),
            Step("docker", self.docker),
            Step("toolkit", self.toolkit),
            Step("fabric", self.fabric, 900),
            Step("scratch", lambda: make_scratch(self.root, self.apt), 300, always=True),
            Step("persistence", self.persistence, 300, tries=2, always=True),
            *ours,
        ]

    # -- what the image may bring -------------------------------------------------------------------------------------

    def hold(self) -> None:
        """No upgrade takes the driver from under what runs, nor dpkg's lock from the steps to come."""
        sh("systemctl", "mask", *_UPGRADES)
        _works("systemctl", "stop", *_UPGRADES)  # which fails for those that are not there
        self._wait_for_dpkg()
        self._hold_driver()

    def driver(self) -> None:
        if not self.spec["promise"]["gpus"] or _works("nvidia-smi", "-L"):
            return
        system = self._system()
        self._add_source("driver", f"{_CUDA}/{system}/x86_64/3bf863cc.pub", f"{_CUDA}/{system}/x86_64/ /")
        self.apt(f"linux-headers-{os.uname().release}", "nvidia-open")
        self._hold_driver()
        sh("modprobe", "nvidia")
        sh("nvidia-smi", "-L")

    def docker(self) -> None:
        if not shutil.which("docker") and not shutil.which("podman"):
            self.apt("docker.io")

    def toolkit(self) -> None:
        """The last reload of systemd is here: one that comes later takes the GPUs from the containers that run."""
        if not self.spec["promise"]["gpus"]:
            return
        if not shutil.which("nvidia-ctk"):
            self._add_source("toolkit", f"{_TOOLKIT}/gpgkey", f"{_TOOLKIT}/stable/deb/$(ARCH) /")
            self.apt("nvidia-container-toolkit")
            self._hold_driver()
        sh("nvidia-ctk", "cdi", "generate", f"--output={self._at('etc/cdi/nvidia.yaml')}")  # for Podman
        if shutil.which("docker"):
            sh("nvidia-ctk", "runtime", "configure", "--runtime=docker")
            sh("systemctl", "daemon-reload")
            sh("systemctl", "restart", "docker")

    def fabric(self) -> None:
        kind = self.spec["promise"]["fabric"]
        if kind in ("efa", "infiniband"):  # which pin memory
            limits = "* - memlock unlimited\nroot - memlock unlimited\n"
            self._at("etc/security/limits.d/99-gpuctl.conf").write_text(limits)
        if kind == "efa" and not shutil.which("fi_info"):
            self._install_efa()
        if kind == "infiniband":
            if not shutil.which("ibv_devinfo"):
                self.apt("rdma-core", "ibverbs-utils")
            for module in ("mlx5_ib", "ib_umad", "rdma_ucm"):
                _works("modprobe", module)  # the gate says what is missing

    def persistence(self) -> None:
        """The driver keeps GPUs awake that nobody uses. Else each question to one wakes it, which takes seconds and
        looks like load, to the idle watch too. Some distributions start the daemon with ``--no-persistence-mode``; so
        it is turned on besides, by way of the daemon where there is one. A machine can do without."""
        if not self.spec["promise"]["gpus"]:
            return
        _works("systemctl", "start", "nvidia-persistenced.service")
        if not _works("nvidia-smi", "-pm", "1"):
            print("GPUs are not kept awake: an idle one may look busy", flush=True)

    # -- gpuctl -------------------------------------------------------------------------------------------------------

    def gpuctl(self) -> None:
        """Into a virtual environment: the image's own, if it has one. What an earlier try has begun is thrown away."""
        package, venv = self.spec["package"], self._at("opt/gpuctl/venv")
        unfinished = self._at("opt/gpuctl/venv.unfinished")
        _works("systemctl", "stop", _AGENT)  # of another version
        wheel = fetch(self.store, package["wheel"], package["sha256"], self.root)
        pins = fetch(self.store, package["constraints"], package["constraints_sha256"], self.root)
        if unfinished.exists() or not (venv / "bin/python").exists():
            unfinished.touch()
            sh(self._python(), "-m", "venv", "--clear", str(venv))
        unfinished.touch()
        pip = (f"{venv}/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
        if any(venv.glob("lib/python*/site-packages/gpuctl")):  # pip would keep it if only its digest is another
            sh(*pip, "uninstall", "-y", "gpuctl")
        what = f"gpuctl[{','.join(package['extras'])}] @ {wheel.as_uri()}"
        sh(*pip, "install", "--progress-bar=off", "-c", str(pins), what, env=self.spec["env"])
        unfinished.unlink()

    def identity(self) -> None:
        env = self.spec["env"]
        found = {
            "node": self.node,
            "provider": self.spec["provider"],
            "address": self.instance.address,
            "bucket": self.spec["bucket"],
            "promised_s": self.spec["notice_s"],
            "env": {**self._network_env(), **env},
        }
        _write(self._at("var/lib/gpuctl/node/identity.json"), json.dumps(found))
        # Within quotes, which systemd.exec(5) takes off again.
        quoted = "".join(f"{key}={json.dumps(value, ensure_ascii=False)}\n" for key, value in env.items())
        _write(self._at("var/lib/gpuctl/agent.env"), quoted)

    def agent(self) -> None:
        """Started, and heard of. A bucket that is away is no fault of the agent's."""
        until, before = time.monotonic() + self.heartbeat_within_s, self._heartbeat()
        sh("systemctl", "start", _AGENT)
        while (now := self._heartbeat()) == before:
            if time.monotonic() > until:
                if now == _AWAY:
                    return
                said = sh("journalctl", "-u", _AGENT, "-n", "3", "-o", "cat").split("\n")
                raise OSError(f"{_AGENT} sends no heartbeat: {' / '.join(filter(None, said))}")
            time.sleep(0.1)

    def _heartbeat(self) -> bytes:
        try:
            return self.store.get(f"nodes/{self.node}.json")
        except KeyError:
            return b""
        except OSError:
            return _AWAY

    def _python(self) -> str:
        if sys.version_info >= _OLDEST_PYTHON and _works(sys.executable, "-c", "import ensurepip"):
            return sys.executable
        name = "python3" if sys.version_info >= _OLDEST_PYTHON else "python3.11"
        self.apt(name, f"{name}-venv")
        return name

    def _network_env(self) -> dict[str, str]:
        """What follows from the interfaces there are. Without it, NCCL and gloo find their own way."""
        python, about = str(self._at("opt/gpuctl/venv") / "bin/python"), self.instance
        command = [python, "-m", "gpuctl.bootstrap.net", "--env", "--type", about.type, "--address", about.address]
        try:
            said = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=30, check=True)
            found: dict[str, str] = json.loads(said.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            print(f"nothing is known of the network: {error}", flush=True)
            return {}
        return found

    # -- packages -----------------------------------------------------------------------------------------------------

    def apt(self, *packages: str) -> None:
        self._wait_for_dpkg()
        quiet = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "a"}
        options = ["-q", "-y", "-o", "DPkg::Lock::Timeout=600"]
        if line := self.spec["sources"].get("apt"):
            self._add_source("apt", "", line)
            options += ["-o", f"Dir::Etc::sourcelist={self._sources()}", "-o", "Dir::Etc::sourceparts=-"]
        sh("dpkg", "--configure", "-a", env=quiet)  # what was broken off
        sh("apt-get", *options, "update", env=quiet)
        sh("apt-get", *options, "--no-install-recommends", "install", *packages, env=quiet)

    def _wait_for_dpkg(self) -> None:
        """Until nobody else holds any of dpkg's locks; the step's limit ends that."""
        for name in _LOCKS:
            path = self.root / name
            if path.exists():
                with path.open("a") as file:
                    print(f"waiting for {path}", flush=True)
                    fcntl.lockf(file, fcntl.LOCK_EX)

    def _hold_driver(self) -> None:
        if not shutil.which("dpkg-query"):
            return
        show = ("dpkg-query", "-W", "-f", r"${Package} ${db:Status-Abbrev}\n", "*nvidia*", "cuda-drivers*")
        listed = subprocess.run(show, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
        if held := [line.split()[0] for line in listed.splitlines() if line.split()[1:2] in (["ii"], ["hi"])]:
            sh("apt-mark", "hold", *held)

    def _add_source(self, name: str, key: str, line: str) -> None:
        """A line of ours in apt's sources: the given one, or else ``line`` signed by what lies at ``key``."""
        if not (given := self.spec["sources"].get(name)):
            with urlopen(key, timeout=30) as answer:
                self._at(f"etc/apt/keyrings/gpuctl-{name}.asc").write_bytes(answer.read())
            given = f"deb [signed-by={self._at(f'etc/apt/keyrings/gpuctl-{name}.asc')}] {line}"
        there = self._sources().read_text().splitlines() if self._sources().exists() else []
        if given not in there:
            self._sources().write_text("\n".join([*there, given, ""]))

    def _sources(self) -> Path:
        return self._at("etc/apt/sources.list.d/gpuctl.list")

    def _system(self) -> str:
        """Such as ``ubuntu2404``."""
        lines = (self.root / "etc/os-release").read_text().splitlines()
        told = {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}
        return f"{told['ID']}{told['VERSION_ID']}".replace(".", "")

    def _install_efa(self) -> None:
        folder = self._at("opt/gpuctl/efa/x").parent
        source = self.spec["sources"].get("efa") or _EFA
        with urlopen(source, timeout=60) as answer, tarfile.open(fileobj=answer, mode="r|*") as packed:
            packed.extractall(folder)
        (installer,) = folder.glob("*/efa_installer.sh")
        sh("bash", "-c", 'cd "$(dirname "$0")" && exec bash "$0" -y', str(installer))

    def _at(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _works(*command: str) -> bool:
    with suppress(OSError):
        sh(*command)
        return True
    return False


def _write(path: Path, text: str) -> None:
    """Readable by its owner alone, and never half."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)
