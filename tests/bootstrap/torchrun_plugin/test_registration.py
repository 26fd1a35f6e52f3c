"""What every torchrun on a machine with gpuctl imports."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

from gpuctl.bootstrap.torchrun_plugin import registration

_IMPORTED = """
import sys
before = set(sys.modules)
from gpuctl.bootstrap.torchrun_plugin.registration import register
register()
print(*sorted(name for name in set(sys.modules) - before if not name.startswith(("gpuctl", "__future__"))))
"""


def test_torchrun_finds_it_by_its_name() -> None:
    (found,) = entry_points(group="torchrun.handlers", name="gpuctl")
    assert found.load() is registration.register


def test_whoever_uses_another_backend_imports_nothing() -> None:
    said = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True)
    assert said.stdout.split() == []
