"""A job in a real image that is older than its node: what of the node's comes along may be too new for it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.bootstrap.containers.command_lines import OPTIONS
from gpuctl.bootstrap.network.nccl_env import OFI_PLUGINS
from tests.bootstrap.containers.test_node_containers import Bench
from tests.fakes import containers
from tests.fakes.shared_objects import PLUGIN, build
from tests.machines import root

IMAGE = "localhost/gpuctl-test-older:1"
SUITE = "bullseye"
"""Debian 11: its C library is 2.31, and Python 3.9. That of whatever runs the tests has ``dlopen`` under a version of
2.34 or later, as has that of the clouds' images."""
_LIMITS = ("--ulimit", "--runtime")
"""Of the options that containers need on this machine: the others bring its own programs in."""
NEEDS_NOTHING = "int begin(void) { return 0; }\n"

_BESIDE = Path(__file__).with_name("test_node_containers.py")
"""Whose plug-in lies at the same place."""
pytestmark = [
    pytest.mark.machines,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group(str(_BESIDE)),
    pytest.mark.usefixtures("older"),
]


@pytest.fixture(scope="module")
def older() -> Iterator[str]:
    """The image, with a ``torch`` that is one as far as can be seen without loading it."""
    if os.getuid() != 0 or not shutil.which("mmdebstrap"):
        pytest.skip("an older image is made by root with mmdebstrap (.ci/install-system)")
    program = containers.runtime()
    try:
        folder = root.plain(SUITE, "python3")
    except root.CannotMake as error:
        pytest.skip(f"no older image: {error}")
    if containers.ask(program, "image", "inspect", IMAGE).returncode != 0:
        with subprocess.Popen(
            ["tar", "-C", str(folder), "--exclude=./dev/*", "-c", "."], stdout=subprocess.PIPE
        ) as tar:
            subprocess.run(
                [program, "import", "-", IMAGE], stdin=tar.stdout, stdout=subprocess.DEVNULL, check=True, timeout=120
            )
    yield IMAGE


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    (made.job / "torch").mkdir()
    (made.job / "torch/__init__.py").write_text("raise ImportError('this torch is none')\n")
    yield made
    containers.clear(made.node)


@pytest.fixture
def plugin() -> Iterator[Path]:
    """Where the node has NCCL's plug-in for EFA."""
    folder = Path(OFI_PLUGINS[-1])
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnccl-net.so"
    yield library
    library.unlink(missing_ok=True)
    for one in made:
        one.rmdir()


def ending(bench: Bench, plugin: Path, fabric: str = "efa") -> str:
    """Why a job in the image did not begin, at the latest for its torch."""
    own = containers.options()
    limits = [word for pair in zip(own[::2], own[1::2], strict=True) if pair[0] in _LIMITS for word in pair]
    options = [*limits, "--env", f"PYTHONPATH={bench.job}"]
    bench.begin(LD_LIBRARY_PATH=str(plugin.parent), **{OPTIONS: shlex.join(options)})
    bench.launch("", image=IMAGE, fabric=fabric)
    return bench.ended().error


def test_the_nodes_plug_in_is_refused_by_the_c_library_version_that_the_image_lacks(bench: Bench, plugin: Path) -> None:
    """NCCL would say so in its log, and go on over TCP."""
    build(plugin, PLUGIN)
    said = ending(bench, plugin)
    found = re.fullmatch(
        r"NCCL cannot use EFA in this image: its plug-in cannot be loaded \((?P<why>.+)\); fix that, or "
        r"train over TCP, which is many times slower: gpuctl train --allow-tcp",
        said,
    )
    assert found, said
    assert re.search(
        r"libc\.so\.6: version `GLIBC_2\.3[4-9]' not found \(required by .*libnccl-net\.so\)", found["why"]
    )


def test_a_plug_in_that_asks_for_nothing_new_is_not_refused(bench: Bench, plugin: Path) -> None:
    """So what came before the other one's end was all right in this image, old as its Python is."""
    build(plugin, NEEDS_NOTHING, "-nostdlib")
    assert "this torch is none" in ending(bench, plugin)


def test_infiniband_is_refused_where_the_image_has_no_verbs(bench: Bench, plugin: Path) -> None:
    assert "its verbs cannot be loaded (libibverbs.so.1: cannot open" in ending(bench, plugin, "infiniband")
