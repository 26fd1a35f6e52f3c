"""The health gate: each way in which a machine can have less than its type, and how that is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.boot.gate import check
from tests.fakes.bare_machine import BareMachine

PROMISE = {"gpus": 2, "gpu_memory_gb": 40.0, "fabric": "efa", "fabric_cards": 2}
_PORT = """hca_id: mlx5_{0}
        transport:                      InfiniBand (0)
                port:   1
                        state:                  {1} (4)
                        link_layer:             {2}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BareMachine:
    machine = BareMachine(tmp_path)
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    return machine


def gpus(machine: BareMachine, *rows: str, **others: tuple[str, ...]) -> None:
    """``nvidia-smi`` answers with ``rows``, and a question for a field of ``others`` with those; it knows no other."""
    cases = [f"*{word}*) {_echo(told)} ;;" for word, told in {**others, "memory.total": rows}.items()]
    machine.program("nvidia-smi", "\n".join(['case "$*" in', *cases, "*) echo no such question; exit 2 ;;", "esac"]))


def _echo(rows: tuple[str, ...]) -> str:
    return "; ".join(f'echo "{row}"' for row in rows)


def ports(machine: BareMachine, *told: tuple[str, str]) -> None:
    text = "".join(_PORT.format(n, *each) for n, each in enumerate(told))
    machine.program("ibv_devinfo", f"cat <<'END'\n{text}END")


def wrong(**changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        check({**PROMISE, **changes})
    return str(caught.value)


@pytest.mark.usefixtures("machine")
def test_a_machine_that_has_what_its_type_promises_passes() -> None:
    check(PROMISE)


def test_a_machine_without_gpus_or_fabric_is_asked_for_none(machine: BareMachine) -> None:
    machine.without("nvidia-smi", "fi_info")
    check({"gpus": 0, "gpu_memory_gb": 0.0, "fabric": "gvnic", "fabric_cards": 1})


@pytest.mark.parametrize(
    ("mib", "promised"), [(23028, 24), (40960, 40), (81559, 80), (143771, 141), (15360, 16), (32510, 32), (46068, 48)]
)
def test_what_drivers_keep_of_the_memory_is_no_fault(machine: BareMachine, mib: int, promised: float) -> None:
    gpus(machine, f"0, {mib}, [N/A]", f"1, {mib}, [N/A]")
    check({**PROMISE, "gpu_memory_gb": promised})


def test_a_missing_gpu_is_named(machine: BareMachine) -> None:
    gpus(machine, "0, 40960, 0")
    assert wrong() == "1 GPUs found, expected 2"


def test_a_gpu_too_many_is_another_machine_than_was_paid_for(machine: BareMachine) -> None:
    gpus(machine, *(f"{n}, 40960, 0" for n in range(3)))
    assert wrong() == "3 GPUs found, expected 2"


def test_a_gpu_with_too_little_memory_is_named(machine: BareMachine) -> None:
    gpus(machine, "0, 40960, 0", "1, 20480, 0")
    assert wrong() == "GPU 1 has 21 GB of memory, expected 40"


def test_a_gpu_with_uncorrected_errors_is_named(machine: BareMachine) -> None:
    gpus(machine, "0, 40960, 3", "1, 40960, [N/A]")
    assert wrong() == "GPU 0 has 3 uncorrected memory errors"


GOOD = ("0, 40960, 0", "1, 40960, 0")
NO_REMAPPING = ("00000000:18:00.0, [N/A], [N/A]", "00000000:19:00.0, [N/A], [N/A]")


@pytest.mark.parametrize("yes", ["Yes", "1"])
def test_what_a_card_remembers_of_bad_memory_is_named(machine: BareMachine, yes: str) -> None:
    """Whose errors of this very hour are none, since its driver is fresh."""
    gpus(machine, *GOOD, remapped_rows=(f"00000000:18:00.0, {yes}, {yes}", "00000000:19:00.0, No, 0"))
    assert wrong() == "GPU 00000000:18:00.0 has faulty memory that could not be remapped"
    gpus(machine, *GOOD, remapped_rows=("00000000:18:00.0, 0, No", f"00000000:19:00.0, No, {yes}"))
    assert wrong() == "GPU 00000000:19:00.0 has faulty memory, to be remapped at its next reset"


@pytest.mark.parametrize("remapped", [{"remapped_rows": NO_REMAPPING}, {}])
def test_an_older_card_is_asked_for_its_retired_pages(
    machine: BareMachine, remapped: dict[str, tuple[str, ...]]
) -> None:
    gpus(machine, *GOOD, **remapped, retired_pages=("00000000:18:00.0, No", "00000000:19:00.0, Yes"))
    assert wrong() == "GPU 00000000:19:00.0 has faulty memory, to be retired at its next reset"


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"remapped_rows": ("00000000:18:00.0, No, No", "00000000:19:00.0, 0, 0")},
        {"remapped_rows": NO_REMAPPING, "retired_pages": ("00000000:18:00.0, [N/A]", "00000000:19:00.0, [N/A]")},
        {"retired_pages": ("00000000:18:00.0, No", "00000000:19:00.0, [Not Supported]")},
    ],
)
def test_sound_memory_and_a_driver_that_knows_nothing_of_it_pass(
    machine: BareMachine, others: dict[str, tuple[str, ...]]
) -> None:
    gpus(machine, *GOOD, **others)
    check(PROMISE)


def test_gpus_that_nvidia_smi_sees_and_cuda_cannot_use_are_a_fault(machine: BareMachine) -> None:
    machine.program("python3", 'echo "cuda 999 0"')
    assert wrong() == "CUDA does not start (error 999)"
    machine.program("python3", 'echo "cuda 0 1"')
    assert wrong() == "CUDA sees 1 GPUs, expected 2"
    machine.program("python3", "exec sleep 600")
    machine.program("timeout", "exit 124")
    assert wrong() == "CUDA does not start: 124: it printed nothing"


CUDA = """
#include <stdlib.h>
int cuInit(unsigned flags) { return atoi(getenv("CUDA_SAYS")); }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
"""


def test_switches_that_nobody_manages_are_the_fabric_managers_fault(
    machine: BareMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's library that is one as far as ctypes can tell, and says 802 as it does then."""
    compiler = shutil.which("gcc", path=os.defpath)
    if not compiler:
        pytest.skip("a stand-in for libcuda.so.1 needs gcc")
    source = tmp_path / "cuda.c"
    source.write_text(CUDA)
    build = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)]
    subprocess.run(build, check=True, timeout=60, env={"PATH": os.defpath})
    machine.program("python3", f'exec {sys.executable} "$@"')
    assert wrong() == (
        "CUDA does not start: 1: OSError: libcuda.so.1: cannot open shared object file: No such file or directory"
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_SAYS", "0")
    check(PROMISE)
    monkeypatch.setenv("CUDA_SAYS", "802")
    machine.program("systemctl", 'case "$1" in is-active) echo failed; exit 3;; esac')
    assert wrong() == (
        "CUDA does not start (error 802): the fabric manager is failed (journalctl -u nvidia-fabricmanager.service)"
    )


def test_a_missing_card_of_efa_is_named(machine: BareMachine) -> None:
    machine.program("fi_info", 'echo "    domain: rdmap0-rdm"; echo "    domain: rdmap0-rdm"')
    assert wrong() == "1 working efa devices, expected 2"


def test_a_program_that_fails_is_the_reason(machine: BareMachine) -> None:
    machine.program("fi_info", 'echo "fi_getinfo: -61"; exit 61')
    with pytest.raises(OSError, match="fi_getinfo: -61"):
        check(PROMISE)


def test_of_infiniband_only_active_ports_count_and_no_ethernet(machine: BareMachine) -> None:
    good, down, ethernet = ("PORT_ACTIVE", "InfiniBand"), ("PORT_DOWN", "InfiniBand"), ("PORT_ACTIVE", "Ethernet")
    ports(machine, good, good, ethernet)
    check({**PROMISE, "fabric": "infiniband"})
    ports(machine, good, down, ethernet)
    assert wrong(fabric="infiniband") == "1 working infiniband devices, expected 2"


def test_all_that_is_wrong_is_named_at_once(machine: BareMachine) -> None:
    gpus(machine, "0, 20480, 1")
    machine.program("fi_info", "")
    assert wrong() == (
        "1 GPUs found, expected 2; GPU 0 has 21 GB of memory, expected 40; "
        "GPU 0 has 1 uncorrected memory errors; 0 working efa devices, expected 2"
    )
