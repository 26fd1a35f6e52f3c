"""The machines themselves: whatever ends the tests ends them too."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from tests.machines.cloud import Site
from tests.paths import ROOT
from tests.waiting import PATIENCE_S

BOOTS_ONE = """
import sys, time
from pathlib import Path
from tests.machines.machine import Machine
from tests.machines.network import Network
folder, *layers = map(Path, sys.argv[1:])
with Network() as network:
    machine = Machine(network, folder, "m0", "10.77.0.10", layers, {})
    machine.switch_on()
    while len(machine.processes()) < 3:
        time.sleep(0.05)
    print(*(process.pid for process in machine.processes()), flush=True)
    sys.stdin.read()
"""


def test_a_run_of_the_tests_that_is_killed_leaves_no_machine(site: Site, tmp_path: Path) -> None:
    layers = [str(layer) for layer in site.bare_layers]
    command = [sys.executable, "-c", BOOTS_ONE, str(tmp_path / "m0"), *layers]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        there = []
        for pid in run.stdout.readline().split():
            with contextlib.suppress(psutil.NoSuchProcess):  # what boots it comes and goes
                there.append(psutil.Process(int(pid)))
        run.kill()
    assert there
    _, alive = psutil.wait_procs(there, timeout=PATIENCE_S)
    assert not alive
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
