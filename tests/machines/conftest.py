"""The ``site`` of all tests here, made once, and the ``cloud`` of each. Without root or a program they skip.

All are marked ``machines``: ``make test`` leaves them out, ``make test-machines`` and ``make test-all`` run them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.machines import packages, root
from tests.machines.cloud import Cloud, Site
from tests.machines.machine import sweep
from tests.machines.network import HOST, Network, program

_HERE = Path(__file__).parent
_PROGRAMS = (
    "mmdebstrap",
    "systemd-nspawn",
    "systemctl",
    "dpkg-deb",
    "ip",
    "nft",
    "tc",
    "unshare",
    "nsenter",
    "setpriv",
)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE:
            item.add_marker(pytest.mark.machines)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.getuid() != 0:
        pytest.skip("only root can boot machines")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if missing := [name for name in _PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"machines need {', '.join(missing)}; .ci/install-system installs what is missing")
    try:
        layers, wheels = root.furnished(), root.wheels()
    except root.CannotMake as error:
        pytest.skip(f"no file system for machines: {error}")
    sweep()
    served = tmp_path_factory.mktemp("served")
    (served / "wheels").symlink_to(wheels)
    (served / "apt").mkdir()
    packages.build(served / "apt")
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        s3 = stack.enter_context(program(network.inside(sys.executable, "-m", "tests.fakes.stores.s3", HOST)))
        files = stack.enter_context(program(network.inside(*_file_server(served))))
        port, index = _port(s3, r"^(\d+)$"), _port(files, r"port (\d+)")
        url = f"http://{HOST}:{index}"
        yield Site(network, port, network.door(port), f"{url}/wheels/", f"{url}/apt/", layers, layers[1:])


@pytest.fixture
def cloud(site: Site, tmp_path: Path) -> Iterator[Cloud]:
    """Of AWS. A test that needs another calls ``Cloud`` itself."""
    made = Cloud(site, tmp_path)
    try:
        yield made
    finally:
        made.end()
        site.network.mend()


def _file_server(folder: Path) -> list[str]:
    return [sys.executable, "-u", "-m", "http.server", "--bind", HOST, "--directory", str(folder), "0"]


def _port(server: subprocess.Popen[str], ready: str) -> int:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(ready, line):
            return int(found[1])
    raise AssertionError("a server of the site ended before it listened")
