"""What a bare machine is made of: the steps, in their order. Each leaves alone what is there already, so on an image
that brings driver, Docker and fabric this takes seconds.

Packages come from the machine's own sources and NVIDIA's; ``NodeSpec.sources`` may name others, for closed networks:

    apt      a deb line that is used in place of all sources of the machine
    driver   a deb line in place of NVIDIA's CUDA repository
    toolkit  a deb line in place of NVIDIA's repository of the container toolkit
    efa      URL of AWS's EFA installer, a .tar.gz

A machine of ``ssh`` belongs to somebody: there nothing is installed but gpuctl, and no disk and no setting is touched.

Sources: docs.nvidia.com, "Installing the NVIDIA Container Toolkit", "Support for Container Device Interface" and
"Driver Persistence"; AWS, "Get started with EFA".
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from .driver import install_driver
from .gate import check
from .metadata import Instance
from .packages import Packages
from .scratch import cache_env, make_scratch, use_scratch
from .steps import Step, sh, works
from .store import BootStore, fetch

_UPGRADES = ("apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service")
_TOOLKIT = "https://nvidia.github.io/libnvidia-container"
_EFA = "https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz"
_DOCKER = {"exec-opts": ["native.cgroupdriver=cgroupfs"]}
"""NVIDIA's workaround that needs no list of devices: github.com/NVIDIA/nvidia-container-toolkit/issues/48."""
_AGENT = "gpuctl-agent.service"
_OLDEST_PYTHON = (3, 11)
_AWAY = b"the bucket"


@dataclass(frozen=True)
class Installation:
    """A machine to install on, and what its steps need to know."""

    root: Path
    spec: Mapping[str, Any]
    node: str
    instance: Instance
    store: BootStore
    heartbeat_within_s: float = 60.0
    """Of the agent, after its start."""

    def steps(self) -> list[Step]:
        package = self.spec["package"]
        mark = " ".join((package["sha256"], package["constraints_sha256"], *package["extras"]))
        gate = Step("gate", lambda: check(self.spec["promise"]), 120, tries=5, always=True)
        ours = [
            Step("gpuctl", self.gpuctl, 1800, mark=mark),
            Step("identity", self.identity, 60, always=True),
            Step("agent", self.agent, 120, tries=2, always=True),
        ]
        if self.spec["provider"] == "ssh":
            return [gate, *ours]
        return [
            Step("hold", self.hold, 900),
            Step("driver", self.driver, 1200, tries=3),
            Step("fabric", self.fabric, 900),
            Step("persistence", self.persistence, 300, tries=2, always=True),
            gate,
            Step("scratch", lambda: make_scratch(self.root, self.packages.install), 300, always=True),
            Step("docker", self.docker),
            Step("toolkit", self.toolkit),
            Step("storage", lambda: use_scratch(self.root), 120, always=True),
            Step("cdi", self.cdi, 120, always=True),
            Step("compiler", self.compiler),
            *ours,
        ]

    @property
    def packages(self) -> Packages:
        return Packages(self.root, self.spec["sources"])

    # -- what the image may bring -------------------------------------------------------------------------------------

    def hold(self) -> None:
        """No upgrade takes the driver from under what runs, nor dpkg's lock from the steps to come."""
        sh("systemctl", "mask", *_UPGRADES)
        works("systemctl", "stop", *_UPGRADES)  # which fails for those that are not there
        if shutil.which("snap"):  # a refresh reloads systemd
            works("snap", "refresh", "--hold")
        self.packages.wait_for_dpkg()
        self.packages.hold_driver()

    def driver(self) -> None:
        if self.spec["promise"]["gpus"]:
            install_driver(self.root, self.packages)

    def docker(self) -> None:
        if not shutil.which("docker") and not shutil.which("podman"):
            self.packages.install("docker.io")
            if not shutil.which("docker"):  # Debian has the client in another package since 13, and only recommends it
                self.packages.install("docker-cli")

    def toolkit(self) -> None:
        """The last reload of systemd that is ours is here: one that comes later takes the GPUs from containers whose
        cgroups are systemd's. Others, such as snapd, reload it when they like, so Docker keeps its cgroups itself."""
        if not self.spec["promise"]["gpus"]:
            return
        if not shutil.which("nvidia-ctk"):
            url = f"{_TOOLKIT}/stable/deb/$(ARCH)"
            self.packages.install_from("toolkit", f"{_TOOLKIT}/gpgkey", url, "/", "nvidia-container-toolkit")
            self.packages.hold_driver()
        if shutil.which("docker"):
            sh("nvidia-ctk", "runtime", "configure", "--runtime=docker")
            _merge(self._at("etc/docker/daemon.json"), _DOCKER)
            sh("systemctl", "daemon-reload")
            sh("systemctl", "restart", "docker")

    def cdi(self) -> None:
        """The list of devices by which Podman, and Docker since 29.2, give GPUs to containers: at every boot, because
        another driver has other files. It wants the control devices, which nobody may have needed so far."""
        if not self.spec["promise"]["gpus"]:
            return
        works("nvidia-ctk", "system", "create-device-nodes", "--control-devices", "--load-kernel-modules")
        sh("nvidia-ctk", "cdi", "generate", f"--output={self._at('etc/cdi/nvidia.yaml')}")

    def fabric(self) -> None:
        kind = self.spec["promise"]["fabric"]
        if kind in ("efa", "infiniband"):  # which pin memory
            limits = "* - memlock unlimited\nroot - memlock unlimited\n"
            self._at("etc/security/limits.d/99-gpuctl.conf").write_text(limits)
        if kind == "efa" and not shutil.which("fi_info"):
            self._install_efa()
        if kind == "infiniband":
            if not shutil.which("ibv_devinfo"):
                # The last has the cards' drivers: the library of verbs finds none without, and only recommends them.
                self.packages.install("rdma-core", "ibverbs-utils", "ibverbs-providers")
            for module in ("mlx5_ib", "ib_umad", "rdma_ucm"):
                works("modprobe", module)  # the gate says what is missing

    def persistence(self) -> None:
        """The driver keeps GPUs awake that nobody uses. Else each question to one wakes it, which takes seconds and
        looks like load, to the idle watch too. Some distributions start the daemon with ``--no-persistence-mode``; so
        it is turned on besides, by way of the daemon where there is one. A machine can do without."""
        if not self.spec["promise"]["gpus"]:
            return
        works("systemctl", "start", "nvidia-persistenced.service")
        if not works("nvidia-smi", "-pm", "1"):
            print("GPUs are not kept awake: an idle one may look busy", flush=True)

    # -- gpuctl -------------------------------------------------------------------------------------------------------

    def gpuctl(self) -> None:
        """Install gpuctl into a virtual environment: the image's own, if it has one. What an earlier try has begun is
        thrown away."""
        package, venv = self.spec["package"], self._at("opt/gpuctl/venv")
        unfinished = self._at("opt/gpuctl/venv.unfinished")
        works("systemctl", "stop", _AGENT)  # of another version
        wheel = fetch(self.store, package["wheel"], package["sha256"], self.root)
        pins = fetch(self.store, package["constraints"], package["constraints_sha256"], self.root)
        if unfinished.exists() or not (venv / "bin/python").exists():
            unfinished.touch()
            sh(self._python(), "-m", "venv", "--clear", str(venv))
        unfinished.touch()
        pip = (f"{venv}/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
        name = wheel.name.partition("-")[0]
        if any(venv.glob("lib/python*/site-packages/gpuctl")):  # pip would keep it if only its digest is another
            sh(*pip, "uninstall", "-y", name)
        what = f"{name}[{','.join(package['extras'])}] @ {wheel.as_uri()}"
        sh(*pip, "install", "--progress-bar=off", "-c", str(pins), what, env=self.spec["env"])
        self._link_cuda_runtime()
        unfinished.unlink()

    def _link_cuda_runtime(self) -> None:
        """Link the CUDA runtime by the name that EFA's plug-in for NCCL opens it by: torch's wheels have it with a
        version only, and another one than torch's would be a second runtime in the process (aws-ofi-nccl,
        src/nccl_ofi_cuda.cpp)."""
        found = sorted(self._at("opt/gpuctl/venv").glob("lib/python*/site-packages/nvidia/*/lib/libcudart.so.*"))
        link = self._at("opt/gpuctl/lib/libcudart.so")
        link.unlink(missing_ok=True)
        if found:
            link.symlink_to(found[0])

    def compiler(self) -> None:
        """``torch.compile`` has Triton build a module in C for each GPU program, with the headers of the Python that
        gpuctl runs in (triton/runtime/build.py)."""
        if not self.spec["promise"]["gpus"]:
            return
        major, minor = sys.version_info[:2] if sys.version_info >= _OLDEST_PYTHON else _OLDEST_PYTHON
        header = self.root / f"usr/include/python{major}.{minor}/Python.h"
        if not shutil.which("gcc") or not header.exists():
            self.packages.install("gcc", "libc6-dev", f"python{major}.{minor}-dev")

    def identity(self) -> None:
        env = self.spec["env"]
        found = {
            "node": self.node,
            "provider": self.spec["provider"],
            "address": self.instance.address,
            "bucket": self.spec["bucket"],
            "notice_s": self.spec["shutdown_s"],
            "promised_s": self.spec["notice_s"],
            "env": {**cache_env(self.root), **self._network_env(), **env},
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
        if sys.version_info >= _OLDEST_PYTHON and works(sys.executable, "-c", "import ensurepip"):
            return sys.executable
        name = "python3" if sys.version_info >= _OLDEST_PYTHON else "python3.11"
        self.packages.install(name, f"{name}-venv")
        return name

    def _network_env(self) -> dict[str, str]:
        """What follows from the interfaces there are. Without it, NCCL and gloo find their own way."""
        python, about = str(self._at("opt/gpuctl/venv") / "bin/python"), self.instance
        command = [
            python,
            "-m",
            "gpuctl.bootstrap.network.inventory",
            "--env",
            "--type",
            about.type,
            "--address",
            about.address,
        ]
        try:
            said = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=30, check=True)
            found: dict[str, str] = json.loads(said.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            print(f"cannot inspect the network: {error}", flush=True)
            return {}
        return found

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


def _merge(path: Path, settings: Mapping[str, Any]) -> None:
    """Merge keys into a JSON file that may not exist yet."""
    found = json.loads(path.read_text() or "{}") if path.exists() else {}
    path.write_text(json.dumps({**found, **settings}, indent=4) + "\n")


def _write(path: Path, text: str) -> None:
    """Readable by its owner alone, and never half."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)
