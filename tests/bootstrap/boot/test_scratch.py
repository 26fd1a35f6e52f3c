"""``/scratch``: which disks become it, and which are never touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.boot.scratch import cache_env, make_scratch, use_scratch
from tests.fakes.bare_machine import BareMachine
from tests.paths import ROOT

AWS = "Amazon EC2 NVMe Instance Storage"
LABEL = "gpuctl-scratch"


class Disks:
    """Those that lsblk shows, and what was done with them."""

    def __init__(self, machine: BareMachine) -> None:
        self.machine = machine
        self.apt: list[str] = []

    def show(self, *disks: dict[str, Any]) -> None:
        (self.machine.root / "lsblk.json").write_text(json.dumps({"blockdevices": disks}))
        self.machine.program("lsblk", f"cat {self.machine.root}/lsblk.json")

    def make(self) -> list[str]:
        before = len(self.machine.calls())
        make_scratch(self.machine.root, lambda *names: self.apt.extend(names))
        changes = ("mount", "mkfs", "mdadm")
        return [call for call in self.machine.calls()[before:] if call.startswith(changes)]

    def mounted(self, *folders: str) -> None:
        path = self.machine.root / "proc/mounts"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"/dev/x {self.machine.root}/{folder} ext4 rw 0 0\n" for folder in folders))


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disks:
    machine = BareMachine(tmp_path)
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    return Disks(machine)


def disk(path: str, model: str | None = AWS, **fields: Any) -> dict[str, Any]:
    usual = {"type": "disk", "fstype": None, "pttype": None, "label": None, "mountpoint": None}
    return {"path": path, "model": model, **usual, **fields}


ROOT_DISK = disk("/dev/nvme0n1", "Amazon Elastic Block Store", pttype="gpt", children=[disk("/dev/nvme0n1p1", None)])


def test_one_empty_disk_of_the_machine_is_formatted_and_mounted(disks: Disks) -> None:
    disks.show(ROOT_DISK, disk("/dev/nvme1n1"))
    scratch = disks.machine.root / "scratch"
    assert disks.make() == [
        f"mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=1 -L {LABEL} /dev/nvme1n1",
        f"mount -o noatime /dev/nvme1n1 {scratch}",
    ]
    assert scratch.stat().st_mode & 0o7777 == 0o1777


def test_several_become_one_volume_in_a_fixed_order(disks: Disks) -> None:
    disks.show(disk("/dev/nvme2n1"), ROOT_DISK, disk("/dev/nvme1n1"))
    assert disks.make() == [
        f"mdadm --create /dev/md/{LABEL} --run --level=0 --name={LABEL} --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
        f"mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=1 -L {LABEL} /dev/md/{LABEL}",
        f"mount -o noatime /dev/md/{LABEL} {disks.machine.root}/scratch",
    ]
    assert disks.apt == []


def test_mdadm_is_installed_where_it_is_missing_and_needed(disks: Disks) -> None:
    disks.machine.without("mdadm")
    disks.show(disk("/dev/a"))
    disks.make()
    assert disks.apt == []
    disks.show(disk("/dev/a"), disk("/dev/b"))
    with pytest.raises(FileNotFoundError):  # apt is none of ours here
        disks.make()
    assert disks.apt == ["mdadm"]


@pytest.mark.parametrize(
    "used",
    [
        ROOT_DISK,
        disk("/dev/a", fstype="xfs"),
        disk("/dev/a", pttype="gpt"),
        disk("/dev/a", label="mine"),
        disk("/dev/a", mountpoint="/data"),
        disk("/dev/a", children=[disk("/dev/mapper/vg", None)]),
        disk("/dev/a", type="part"),
        disk("/dev/a", "Amazon Elastic Block Store"),
        disk("/dev/a", "nvme_card-pd"),
        disk("/dev/a", "MSFT NVMe Accelerator v1.0"),
        disk("/dev/a", None),
    ],
    ids=lambda used: " ".join(str(value) for value in used.values() if value)[:60],
)
def test_no_other_disk_is_touched(disks: Disks, used: dict[str, Any]) -> None:
    disks.show(used)
    assert disks.make() == []
    assert (disks.machine.root / "scratch").is_dir()


def test_a_disk_on_which_blkid_finds_something_that_lsblk_did_not_is_not_touched(disks: Disks) -> None:
    disks.show(disk("/dev/nvme1n1"))
    for code in (0, 8):  # found something; found several
        disks.machine.program("blkid", f"exit {code}")
        assert disks.make() == []


@pytest.mark.parametrize("model", [AWS, "nvme_card", "nvme_card3", "Microsoft NVMe Direct Disk v2", f"{AWS}   "])
def test_scratch_disks_of_all_clouds_are_known(disks: Disks, model: str) -> None:
    disks.show(disk("/dev/a", model))
    assert disks.make()[0].startswith("mkfs.ext4")


def test_after_a_reboot_the_volume_is_mounted_and_not_made_again(disks: Disks) -> None:
    disks.show(disk("/dev/a", fstype="ext4", label=LABEL))
    assert disks.make() == [f"mount -o noatime /dev/a {disks.machine.root}/scratch"]
    array = disk("/dev/md127", None, type="raid0", fstype="ext4", label=LABEL)
    member: dict[str, Any] = {"fstype": "linux_raid_member", "label": f"host:{LABEL}", "children": [array]}
    disks.show(disk("/dev/a", **member), disk("/dev/b", **member))
    assert disks.make() == [f"mount -o noatime /dev/md127 {disks.machine.root}/scratch"]


def test_an_array_that_was_broken_off_before_it_had_a_file_system_gets_one(disks: Disks) -> None:
    member: dict[str, Any] = {
        "fstype": "linux_raid_member",
        "label": f"host:{LABEL}",
        "children": [disk("/dev/md127", None)],
    }
    disks.show(disk("/dev/a", **member), disk("/dev/b", **member))
    assert disks.make() == [
        f"mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=1 -L {LABEL} /dev/md127",
        f"mount -o noatime /dev/md127 {disks.machine.root}/scratch",
    ]


def test_an_array_that_is_in_pieces_is_put_together_and_nothing_is_formatted(disks: Disks) -> None:
    disks.show(disk("/dev/a", fstype="linux_raid_member", label=f"host:{LABEL}"))
    with pytest.raises(OSError, match="not assembled"):
        disks.make()
    assert disks.machine.calls("m") == ["mdadm --assemble --scan"]


def test_somebody_elses_array_is_not_touched(disks: Disks) -> None:
    member: dict[str, Any] = {
        "fstype": "linux_raid_member",
        "label": "host:data",
        "children": [disk("/dev/md127", None)],
    }
    disks.show(disk("/dev/a", **member), disk("/dev/b", **member))
    assert disks.make() == []


def test_what_is_mounted_already_stays_as_it_is(disks: Disks) -> None:
    disks.show(disk("/dev/a"))
    disks.mounted("scratch")
    assert disks.make() == []


def test_the_volume_that_an_image_makes_is_used(disks: Disks) -> None:
    disks.show(disk("/dev/a", fstype="LVM2_member"))
    disks.mounted("opt/dlami/nvme")
    root = disks.machine.root
    assert disks.make() == [f"mount --bind {root}/opt/dlami/nvme {root}/scratch"]


# -- what lies on it ---------------------------------------------------------------------------------------------------


def moved(disks: Disks) -> list[str]:
    """Folders that became part of ``/scratch``, as ``FOLDER from PART``."""
    root = disks.machine.root
    before = len(disks.machine.calls())
    use_scratch(root)
    binds = [call.split()[2:] for call in disks.machine.calls()[before:] if call.startswith("mount --bind")]
    return [f"{Path(to).relative_to(root)} from {Path(part).relative_to(root / 'scratch')}" for part, to in binds]


def test_jobs_images_and_caches_lie_there_where_it_is_a_volume(disks: Disks) -> None:
    disks.machine.program("podman", "")
    (disks.machine.root / "scratch").mkdir()
    assert (moved(disks), cache_env(disks.machine.root)) == ([], {})
    disks.mounted("scratch")
    assert moved(disks) == [
        "var/lib/gpuctl/node/jobs from gpuctl/jobs",
        "var/lib/docker from docker",
        "var/lib/containerd from containerd",
        "var/lib/containers from containers",
    ]
    stopped, started = disks.machine.calls("systemctl")
    assert stopped == "systemctl stop docker.socket docker.service containerd.service"
    assert started == "systemctl start docker.service"
    env = cache_env(disks.machine.root)
    assert set(env) == {"TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"}
    for value in env.values():
        folder = disks.machine.root / value.removeprefix("/").partition("/triton")[0]
        assert folder.stat().st_mode & 0o7777 == 0o1777


def test_what_an_image_of_ones_own_brings_stays_in_sight(disks: Disks) -> None:
    disks.mounted("scratch")
    (disks.machine.root / "scratch").mkdir()
    disks.machine.program("docker", 'case "$1" in image) echo 0123456789ab;; esac')
    disks.machine.program("podman", 'case "$1" in ps) echo 0123456789ab;; esac')
    (disks.machine.root / "var/lib/gpuctl/node/jobs/train-1").mkdir(parents=True)
    assert moved(disks) == []
    assert disks.machine.calls("systemctl") == []
    disks.machine.program("docker", "echo cannot connect to the Docker daemon; exit 1")
    assert moved(disks) == []


def test_what_lies_there_already_is_not_moved_again(disks: Disks) -> None:
    disks.mounted("scratch", "var/lib/gpuctl/node/jobs", "var/lib/docker", "var/lib/containerd")
    (disks.machine.root / "scratch").mkdir()
    assert moved(disks) == []


# -- with real disks ---------------------------------------------------------------------------------------------------

_BOOT = """
import sys
from pathlib import Path
from gpuctl.bootstrap.boot.scratch import cache_env, make_scratch, use_scratch

root = Path(sys.argv[1])
make_scratch(root, lambda *names: None)
make_scratch(root, lambda *names: None)
assert (root / "scratch").is_mount(), "nothing is mounted"
(root / "scratch/file").write_text("kept")
"""


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[list[str]]:
    """Two disks of 32 MB, the second with a file system that is none of ours: lsblk sees it only once udev has."""
    programs = {name: shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") for name in _DISK_PROGRAMS}
    if os.getuid() or not all(programs.values()):
        pytest.skip(f"only root, with {', '.join(_DISK_PROGRAMS)}, can make disks")
    made: list[str] = []
    try:
        for name in ("new", "used"):
            image = tmp_path / name
            image.touch()
            os.truncate(image, 32 << 20)
            if name == "used":
                _do("mkfs.ext4", "-q", "-L", "mine", str(image))
            try:
                made.append(_do("losetup", "--find", "--show", str(image)).strip())
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this kernel makes no loop devices: {error.stderr}")
        yield made
    finally:
        for device in made:
            _do("losetup", "--detach", device)


_DISK_PROGRAMS = ("losetup", "blkid", "mkfs.ext4", "mount", "unshare")


def _do(*command: str) -> str:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "PATH": path}
    ).stdout


@pytest.mark.slow
def test_a_real_disk_is_mounted_keeps_its_files_and_the_used_one_beside_it_is_left_alone(
    loops: list[str], tmp_path: Path
) -> None:
    machine = BareMachine(tmp_path / "machine")
    disks = Disks(machine)
    disks.show(*(disk(path) for path in loops))
    (machine.root / "proc").symlink_to("/proc")
    machine.without("blkid", "mkfs.ext4", "mount")
    before = Path(loops[1]).read_bytes()
    path = f"{machine.programs}:/usr/sbin:/usr/bin:/sbin:/bin"
    for _ in range(2):  # as after a reboot: what was mounted is not, and udev has seen the disk
        subprocess.run(
            ["unshare", "--mount", sys.executable, "-c", _BOOT, str(machine.root)],
            env={**machine.env, "PATH": path, "PYTHONPATH": str(ROOT / "src")},
            timeout=60,
            check=True,
        )
        disks.show(disk(loops[0], fstype="ext4", label=LABEL), disk(loops[1], fstype="ext4", label="mine"))
    assert Path(loops[1]).read_bytes() == before
    listed = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount {loops[0]} "$0" && cat "$0/file"',
        str(machine.root / "scratch"),
    ]
    assert _do(*listed) == "kept"


_USE = """
import subprocess, sys
from pathlib import Path
from gpuctl.bootstrap.boot.scratch import use_scratch

root = Path(sys.argv[1])
(root / "scratch").mkdir()
subprocess.run(["mount", "-t", "tmpfs", "none", str(root / "scratch")], check=True)
(root / "var/lib/docker").mkdir(mode=0o710, parents=True)
for _ in range(2):
    use_scratch(root)
(root / "var/lib/gpuctl/node/jobs/file").write_text("kept")
assert (root / "scratch/gpuctl/jobs/file").read_text() == "kept"
assert (root / "scratch/docker").stat().st_mode & 0o7777 == 0o710
mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
assert len([place for place in mounts if place.startswith(str(root))]) == len({*mounts} - {*sys.argv[2:]}), mounts
"""


def test_folders_really_lie_on_the_volume_and_are_mounted_once(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can mount")
    machine = BareMachine(tmp_path / "machine")
    (machine.root / "proc").symlink_to("/proc")
    machine.without("mount")
    before = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", _USE, str(machine.root), *before],
        env={**machine.env, "PATH": f"{machine.programs}:/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")},
        timeout=60,
        check=True,
    )
