"""A small apt repository with stand-ins for NVIDIA's packages, by their real names: no index that tests use has those.

They bring the programs that the boot's steps call, which answer as on a machine with eight GPUs of 40 GB; nvidia-ctk
fails the first two times that it is to list the devices.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from tests.machines.root import PYTHON as PYTHON_VERSION

SMI = """#!/bin/sh
each() { for index in 0 1 2 3 4 5 6 7; do eval "echo \\"$1\\""; done; }
case "$*" in
    -L) each 'GPU $index: NVIDIA A100-SXM4-40GB (UUID: GPU-$index)' ;;
    *query-gpu=index,memory.total,ecc*) each '$index, 40960, 0' ;;
    *query-remapped-rows=gpu_bus_id,*) each '0000000$index:00:00.0, No, No' ;;
    *query-gpu=utilization.gpu*) each 0 ;;
    '-pm 1') each 'Enabled persistence mode for GPU 0000000$index:00:00.0.' ;;
    *) echo "nvidia-smi: not told what to say to $*" >&2; exit 2 ;;
esac
"""
CTK = """#!/bin/sh
test "$1" = cdi || exit 0
echo "$*" >> /var/lib/nvidia-ctk.calls
test "$(wc -l < /var/lib/nvidia-ctk.calls)" -gt 2 || { echo "the driver is not ready yet" >&2; exit 1; }
"""
PYTHON = """#!/bin/sh
case "$*" in *libcuda*) echo "cuda 0 8" ;; *) exec /usr/bin/python3 "$@" ;; esac
"""
"""For the gate, which asks CUDA how many GPUs it sees."""
MODINFO = "#!/bin/sh\necho 580.95.05\n"
_MODPROBE = '#!/bin/sh\ntest "$1" = nvidia || exec /usr/sbin/modprobe "$@"\n'

PACKAGES = {
    f"linux-headers-{os.uname().release}": {},
    "nvidia-open": {"usr/bin/nvidia-smi": SMI, "usr/local/sbin/modprobe": _MODPROBE, "usr/local/bin/python3": PYTHON},
    "gcc": {"usr/bin/gcc": "#!/bin/sh\n"},
    "libc6-dev": {},
    f"python{PYTHON_VERSION}-dev": {f"usr/include/python{PYTHON_VERSION}/Python.h": ""},
    "nvidia-container-toolkit": {"usr/bin/nvidia-ctk": CTK},
}


def build(folder: Path) -> None:
    """A flat repository: ``deb [trusted=yes] URL ./``."""
    entries = []
    for name, files in PACKAGES.items():
        tree = folder / f"{name}.tree"
        for path, text in files.items():
            target = tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            target.chmod(0o755)
        control = f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody\nDescription: stands in\n"
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(control)
        made = folder / f"{name}.deb"
        command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(made)]
        subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
        data = made.read_bytes()
        entries.append(
            f"{control}Filename: ./{made.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
        )
    (folder / "Packages").write_text("\n".join(entries))
