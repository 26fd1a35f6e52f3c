"""A bare machine below a folder: what user-data puts there, and on its path nothing but stand-ins that tell how they
were called. So the steps themselves run, as root or not, and the machine that runs the tests is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import psutil

from gpuctl.bootstrap import boot
from gpuctl.bootstrap.node_spec import NodeSpec, Package, Promise
from gpuctl.bootstrap.user_data.render import File, files
from tests.waiting import PATIENCE_S

REAL = ("sh", "bash", "cat", "sleep", "touch", "dirname", "mkdir", "rm", "ln", "grep", "timeout", "env")
"""Programs that stand-ins are made of."""
SYSTEM = {
    "etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="24.04"\n',
    "etc/passwd": "root:x:0:0::/root:/bin/sh\nubuntu:x:1000:1000::/home/ubuntu:/bin/sh\n",
    "etc/ssh/ssh_host_ed25519_key.pub": "ssh-ed25519 AAAA root@ip-10-0-0-7\n",
    "home/ubuntu/.ssh/authorized_keys": "ssh-ed25519 BBBB me@laptop\n",
    f"usr/include/python{sys.version_info.major}.{sys.version_info.minor}/Python.h": "",
}
"""What its image brings."""
PINS = b"# nothing is pinned\n"
NODE = "i-0123456789abcdef0"
"""What ``tests.fakes.metadata`` calls a machine of AWS's."""

_STARTS_AGENT = """case "$*" in
    "start gpuctl-agent.service") mkdir -p "$BUCKET/nodes"; echo $$ > "$BUCKET/nodes/$NODE.json";;
    *dlami*) exit 5;;
esac"""
"""An agent that is started is heard of; AWS's own service for scratch disks is not there."""
_TWO_CARDS = """for i in 0 1; do
    echo "provider: efa"; echo "    domain: rdmap$i-rdm"
    echo "provider: efa"; echo "    domain: rdmap$i-rdm"
done"""
_INSTALLS = """for package; do case "$package" in
    docker.io) ln -sf dpkg "$PROGRAMS/docker";;
    ibverbs-utils) ln -sf dpkg "$PROGRAMS/ibv_devinfo";;
    nvidia-container-toolkit) ln -sf dpkg "$PROGRAMS/nvidia-ctk";;
    nvidia-fabricmanager*) ln -sf dpkg "$PROGRAMS/nv-fabricmanager";;
esac; done"""
_TELL = """printf '%s\\n' "${0##*/} $*" >> "$CALLS" """
STAND_INS = {
    "systemctl": _STARTS_AGENT,
    "journalctl": 'echo "error: there is no cluster"',
    "apt-get": _INSTALLS,
    "apt-mark": "",
    "dpkg": "",
    "dpkg-query": 'echo "nvidia-driver-580 ii "; echo "libnvidia-compute-580 hi "; echo "nvidia-old rc "',
    "nvidia-smi": 'case "$*" in *ecc*) for i in 0 1; do echo "$i, 40960, 0"; done;; esac',
    "modinfo": "echo 580.95.05",
    "python3": 'echo "cuda 0 2"',
    "gcc": "",
    "nvidia-ctk": "",
    "docker": "",
    "fi_info": _TWO_CARDS,
    "modprobe": "",
    "lsblk": """echo '{"blockdevices": []}'""",
    "udevadm": "",
    "blkid": "exit 2",
    "mount": "",
    "mdadm": "",
    "mkfs.ext4": "",
}
_HURRIED = """
import sys, time
from gpuctl_boot.__main__ import main
sys.exit(main(["boot"], sleep=lambda seconds: time.sleep(seconds if seconds >= 600 else seconds / 100)))
"""


def wheel() -> bytes:
    """gpuctl's, without anything but the boot program: so pip needs no index."""
    made = io.BytesIO()
    info = "gpuctl-0.1.0.dist-info"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("gpuctl/__init__.py", "")
        for path in sorted(Path(boot.__file__).parent.glob("*.py")):
            archive.writestr(f"gpuctl/bootstrap/boot/{path.name}", path.read_text())
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: gpuctl\nVersion: 0.1.0\nProvides-Extra: train\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return made.getvalue()


class BareMachine:
    """Of AWS, with two A100 and two cards of EFA, unless ``changes`` say otherwise. Its bucket is a folder."""

    def __init__(self, folder: Path, metadata_url: str = "http://127.0.0.1:9", **changes: Any) -> None:
        self.root = folder / "root"
        self.bucket = folder / "bucket"
        self.programs = folder / "programs"
        self.programs.mkdir(parents=True)
        self._calls = folder / "calls"
        for name in REAL:
            (self.programs / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        for name, body in STAND_INS.items():
            self.program(name, body)
        self.wheel = wheel()
        self.spec = NodeSpec(
            **{
                "cluster": "demo",
                "provider": "aws",
                "bucket": self.bucket.as_uri(),
                "package": self._published(),
                "promise": Promise(gpus=2, gpu_memory_gb=40, fabric="efa", fabric_cards=2),
                "region": "us-east-1",
                "env": {"PIP_NO_INDEX": "1"},
                "unhealthy_minutes": 0.0,
                **changes,
            }
        )
        self.env = {
            "PATH": str(self.programs),
            "PYTHONPATH": str(self.root / "opt/gpuctl/boot"),
            "GPUCTL_ROOT": str(self.root),
            "GPUCTL_METADATA": metadata_url,
            "BUCKET": str(self.bucket),
            "NODE": NODE,
            "CALLS": str(self._calls),
            "PROGRAMS": str(self.programs),
        }
        self.put_files()

    def put_files(self) -> None:
        """As cloud-init does."""
        image = {name: File(text, "0644") for name, text in SYSTEM.items()}
        for name, file in {**image, **files(self.spec)}.items():
            path = self.root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
            path.chmod(int(file.mode, 8))

    @property
    def plain_spec(self) -> dict[str, Any]:
        """As the boot program reads it."""
        found: dict[str, Any] = json.loads((self.root / "etc/gpuctl/node.json").read_text())
        return found

    def _published(self) -> Package:
        digests = [hashlib.sha256(data).hexdigest() for data in (self.wheel, PINS)]
        keys = (f"boot/{digests[0]}/gpuctl-0.1.0-py3-none-any.whl", f"boot/{digests[1]}/constraints.txt")
        for key, data in zip(keys, (self.wheel, PINS), strict=True):
            (self.bucket / key).parent.mkdir(parents=True, exist_ok=True)
            (self.bucket / key).write_bytes(data)
        return Package(wheel=keys[0], sha256=digests[0], constraints=keys[1], constraints_sha256=digests[1])

    # -- programs -----------------------------------------------------------------------------------------------------

    def program(self, name: str, body: str) -> None:
        """From now on, ``name`` is this shell script."""
        path = self.programs / name
        partial = path.with_suffix(".partial")
        partial.write_text(f"#!/bin/sh\n{_TELL}\n{body}\n")
        partial.chmod(0o755)
        partial.replace(path)

    def trap(self, name: str, after: str) -> Path:
        """The next time that ``name`` is called once step ``after`` is done, it makes the file returned, and waits."""
        path, caught = self.programs / name, self.programs / f"{name}.caught"
        usual = path.read_text().partition(_TELL)[2] if path.exists() else ""
        done = self.root / f"var/lib/gpuctl/boot/{after}.done"
        self.program(name, f'if [ -e "{done}" ] && [ ! -e "{caught}" ]; then touch "{caught}"; sleep 600; fi{usual}')
        return caught

    def without(self, *names: str) -> None:
        for name in names:
            (self.programs / name).unlink()

    def calls(self, of: str = "") -> list[str]:
        """All so far, or those that begin with ``of``."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line for line in lines if line.startswith(of)]

    # -- the boot program ---------------------------------------------------------------------------------------------

    def start(self) -> subprocess.Popen[str]:
        """With pauses of a hundredth, but for those of minutes."""
        return subprocess.Popen(
            [sys.executable, "-c", _HURRIED],
            env=self.env,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def boot(self) -> str:
        """To its end; what it printed."""
        process = self.start()
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
        return said

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.bucket / f"boot/{NODE}.json").read_bytes())
        return found

    def log(self) -> str:
        """As the bucket has it."""
        return (self.bucket / f"boot/{NODE}.log").read_text()


def lose_power(process: subprocess.Popen[str]) -> None:
    """Of all that ``process`` has started too."""
    whole = [psutil.Process(process.pid)]
    for one in whole:  # which grows; one that is stopped starts no more, and does not see another one's end
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGSTOP)
            whole += one.children()
    for one in whole:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate(timeout=PATIENCE_S)
    psutil.wait_procs(whole, timeout=PATIENCE_S)
