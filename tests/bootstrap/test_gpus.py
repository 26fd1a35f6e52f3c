"""What accelerators a node has, asked of stand-ins for ``nvidia-smi``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuctl.bootstrap.gpus import found_devices, visible_devices
from gpuctl.cluster.errors import GpuctlError

Say = Callable[[str], None]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Has the only program on the path run a shell's line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(line: str) -> None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{line}\n")
        (folder / "nvidia-smi").chmod(0o755)

    return write


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """A bus with one card of NVIDIA's, beside another's."""
    for name, vendor, kind in [("0000:00:01.0", "0x1d0f", "0x030000"), ("0000:10:1c.0", "0x10de", "0x030200")]:
        device = tmp_path / "pci" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    return tmp_path / "pci"


def test_each_gpu_is_named(nvidia_smi: Say, card: Path) -> None:
    nvidia_smi("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'; echo '  MIG 1g.10gb Device 0:'; echo 'GPU 1: NVIDIA H100'")
    assert found_devices(pci=card) == ("GPU 0: NVIDIA H100 (UUID: GPU-1)", "GPU 1: NVIDIA H100")


def test_a_node_has_the_gpus_that_its_workers_see() -> None:
    found = ("GPU 0: A", "GPU 1: B", "GPU 2: C")
    assert visible_devices(found, {}) == found
    told = {
        "": (),
        "1": found[1:2],
        "2,0": (found[2], found[0]),
        "0,7": found[:1],
        "GPU-1": found,
        "MIG-1,MIG-2": found,
    }
    for word, expected in told.items():
        assert visible_devices(found, {"CUDA_VISIBLE_DEVICES": word}) == expected, word


@pytest.mark.usefixtures("nvidia_smi")
def test_a_machine_without_nvidia_smi_has_none(card: Path) -> None:
    assert found_devices(pci=card) == ()


def test_a_driver_that_fails_is_an_error_and_not_a_machine_without_gpus(nvidia_smi: Say, card: Path) -> None:
    nvidia_smi("echo 'GPU 0: NVIDIA H100'; exit 15")
    with pytest.raises(GpuctlError, match=r"^nvidia-smi -L fails with code 15: GPU 0"):
        found_devices(pci=card)
    nvidia_smi("echo 'NVIDIA-SMI has failed because it could not talk to the driver.' >&2; echo more; exit 9")
    with pytest.raises(GpuctlError, match=r"^nvidia-smi -L fails with code 9: NVIDIA-SMI has failed .*; fix") as caught:
        found_devices(pci=card)
    assert "\n" not in str(caught.value)


def test_an_image_for_gpus_on_a_machine_without_one_is_no_error(nvidia_smi: Say, tmp_path: Path, card: Path) -> None:
    nvidia_smi("echo 'NVIDIA-SMI has failed'; exit 9")
    assert found_devices(pci=tmp_path / "nothing") == ()
    (card / "0000:10:1c.0" / "class").write_text("0x020700\n")  # a network card of the same maker's
    assert found_devices(pci=card) == ()


def test_one_that_does_not_answer_is_an_error_and_is_not_waited_for(nvidia_smi: Say, tmp_path: Path) -> None:
    nvidia_smi("exec /bin/sleep 100")
    began = time.monotonic()
    with pytest.raises(GpuctlError, match=r"^nvidia-smi -L has not answered in 0.2 s; "):
        found_devices(0.2, tmp_path / "nothing")
    assert time.monotonic() - began < 20
    for thread in threading.enumerate():
        if thread.name == "nvidia-smi":
            assert thread.daemon, "one that hears no kill keeps nobody alive"
            thread.join(20)
            assert not thread.is_alive(), "this one does hear it"


def test_it_has_longer_than_a_slow_machine_needs(nvidia_smi: Say, card: Path) -> None:
    assert found_devices.__defaults__ is not None and found_devices.__defaults__[0] >= 8 * 3
    nvidia_smi("/bin/sleep 0.3; echo 'GPU 0: slow'")
    assert found_devices(pci=card) == ("GPU 0: slow",)
