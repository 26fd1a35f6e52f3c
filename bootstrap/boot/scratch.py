"""``/scratch``: the disks that came with the machine and end with it, as one volume.

Only disks of the models that clouds hang in for this, and of those only empty ones, or a volume of our own label. What
the image has already made of them (AWS's: ``/opt/dlami/nvme``) is used as it is; without any, it is a plain folder.

Where it is a volume of its own, what is large and may be lost lies there: jobs' files with their tiers of checkpoints,
images of containers, and the workers' caches (``cache_env``). The disk with the system is slow and mostly full.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .steps import sh, works

_LABEL = "gpuctl-scratch"
_MODELS = re.compile(r"Amazon EC2 NVMe Instance Storage|nvme_card\d*|Microsoft NVMe Direct Disk.*")
"""AWS, Google (persistent disks are ``nvme_card-pd`` there), Azure (remote ones are ``MSFT NVMe Accelerator``)."""
_JOBS = ("var/lib/gpuctl/node/jobs", "gpuctl/jobs")
_OF_DOCKER = (("var/lib/docker", "docker"), ("var/lib/containerd", "containerd"))
"""Docker >= 29 has its images in containerd's folder (docs.docker.com, "containerd image store with Docker Engine")."""
_OF_PODMAN = (("var/lib/containers", "containers"),)
_BLKID_FINDS_NOTHING = 2
_COLUMNS = "PATH,TYPE,MODEL,FSTYPE,PTTYPE,LABEL,MOUNTPOINT"


def make_scratch(root: Path, apt: Callable[..., None]) -> None:
    folder = root / "scratch"
    folder.mkdir(exist_ok=True)
    if _is_mounted(root, folder):
        return
    with suppress(OSError):
        sh("systemctl", "start", "dlami-nvme.service")  # which is not there on other images
    image = root / "opt/dlami/nvme"
    if _is_mounted(root, image):
        sh("mount", "--bind", str(image), str(folder))
    else:
        _mount_volume(folder, apt)
    folder.chmod(0o1777)


def use_scratch(root: Path) -> None:
    """Have ``/scratch`` in place of folders of the system's disk that are empty so far: what an image
    of one's own brings stays in sight. At every boot, since a mount does not outlive one."""
    scratch = root / "scratch"
    if not _is_mounted(root, scratch):
        return
    for name in ("tmp", "cache"):
        (scratch / name).mkdir(exist_ok=True)
        (scratch / name).chmod(0o1777)
    jobs = root / _JOBS[0]
    if not jobs.is_dir() or not any(jobs.iterdir()):
        _bind(root, *_JOBS)
    if shutil.which("docker") and _has_nothing("docker"):
        works("systemctl", "stop", "docker.socket", "docker.service", "containerd.service")
        for each in _OF_DOCKER:
            _bind(root, *each)
        sh("systemctl", "start", "docker.service")
    if shutil.which("podman") and _has_nothing("podman"):
        for each in _OF_PODMAN:
            _bind(root, *each)


def cache_env(root: Path) -> dict[str, str]:
    """Variables by which workers have their temporary files and caches there: Hugging Face's and torch's, Triton's and
    torch.compile's. Empty where it is no volume of its own."""
    if not _is_mounted(root, root / "scratch"):
        return {}
    cache = "/scratch/cache"
    return {"TMPDIR": "/scratch/tmp", "XDG_CACHE_HOME": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}


def _has_nothing(program: str) -> bool:
    """No image and no container, which would go out of sight."""
    try:
        return not sh(program, "image", "ls", "--quiet").strip() and not sh(program, "ps", "--all", "--quiet").strip()
    except OSError:
        return False


def _bind(root: Path, name: str, part: str) -> None:
    folder, there = root / name, root / "scratch" / part
    for each in (folder, there):
        each.mkdir(parents=True, exist_ok=True)
    if not _is_mounted(root, folder):
        there.chmod(folder.stat().st_mode & 0o7777)
        sh("mount", "--bind", str(there), str(folder))


def _mount_volume(folder: Path, apt: Callable[..., None]) -> None:
    sh("udevadm", "settle")  # lsblk knows what udev has seen
    devices = list(_devices())
    mount = ("mount", "-o", "noatime")
    for device in devices:
        if device["label"] == _LABEL and device["fstype"] == "ext4":
            sh(*mount, device["path"], str(folder))
            return
    if volume := _new_volume(devices, apt):
        # Nothing of 8 TB is discarded or written now: the step has a limit.
        sh("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=1", "-L", _LABEL, volume)
        sh(*mount, volume, str(folder))


def _new_volume(devices: list[dict[str, Any]], apt: Callable[..., None]) -> str:
    """The device for a file system; empty: there are no disks for one."""
    for device in devices:
        if (device["label"] or "").endswith(f":{_LABEL}"):  # a part of our array, which shows no file system
            if device["children"]:
                return str(device["children"][0]["path"])
            sh("mdadm", "--assemble", "--scan")
            raise OSError("the array of the scratch disks was not assembled")  # it is now: try again
    empty = sorted(d["path"] for d in devices if _MODELS.fullmatch((d["model"] or "").strip()) and _is_empty(d))
    if len(empty) < 2:
        return "".join(empty)
    if not shutil.which("mdadm"):
        apt("mdadm")
    array = f"/dev/md/{_LABEL}"
    sh("mdadm", "--create", array, "--run", "--level=0", f"--name={_LABEL}", f"--raid-devices={len(empty)}", *empty)
    return array


def _is_empty(disk: dict[str, Any]) -> bool:
    used = (disk["fstype"], disk["pttype"], disk["label"], disk["mountpoint"], disk["children"])
    if disk["type"] != "disk" or any(used):
        return False
    return subprocess.run(["blkid", "--probe", disk["path"]], check=False).returncode == _BLKID_FINDS_NOTHING


def _devices() -> Iterator[dict[str, Any]]:
    """All block devices; those of which others are made have them as ``children``."""
    waiting = json.loads(sh("lsblk", "--json", "--output", _COLUMNS))["blockdevices"]
    while waiting:
        device = {"children": [], **waiting.pop()}
        waiting += device["children"]
        yield device


def _is_mounted(root: Path, folder: Path) -> bool:
    path = root / "proc/mounts"
    return any(line.split()[1] == str(folder) for line in path.read_text().splitlines()) if path.exists() else False
