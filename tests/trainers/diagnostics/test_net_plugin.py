"""What NCCL would load for EFA or InfiniBand, loaded by the real loader: stand-ins that lack each thing in turn."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.trainers.diagnostics import net_plugin
from gpuctl.trainers.diagnostics.net_plugin import complaint, missing_in
from tests.fakes.shared_objects import NEEDS_NEWER, PLUGIN, build, newer_than_here

BEGIN = "import ctypes, sys; sys.exit(ctypes.CDLL('libnccl-net.so').begin())"
VERBS = "#include <stdlib.h>\nvoid *ibv_get_device_list(int *count) { *count = %d; return 0; }\n"


_PYTHON = ["/lib64/ld-linux-x86-64.so.2", "--inhibit-cache", sys.executable]
"""That finds no CUDA runtime which this machine may have."""


def runtime(folder: Path) -> Path:
    """torch's CUDA runtime, as NVIDIA's wheel has it."""
    return build(folder / "nvidia/cu13/lib/libcudart.so.13", "", "-Wl,-soname,libcudart.so.13")


def begins(env: dict[str, str]) -> bool:
    """Whether the plug-in finds all that it needs, once it is loaded."""
    return subprocess.run([*_PYTHON, "-c", BEGIN], env=env, timeout=60, check=False).returncode == 0


def asked(*args: str, **env: str) -> dict[str, list[str]]:
    command = [*_PYTHON, net_plugin.__file__, *args]
    ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=60, check=True)
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


def test_no_plug_in_is_missing(tmp_path: Path) -> None:
    (why,) = missing_in("efa", {"LD_LIBRARY_PATH": str(tmp_path)})
    assert why.startswith("its plug-in cannot be loaded (libnccl-net.so: cannot open shared object file")


def test_a_plug_in_whose_library_is_not_there_is_named_with_it(tmp_path: Path) -> None:
    hwloc = build(tmp_path / "libhwloc.so.15", "int topology;\n", "-Wl,-soname,libhwloc.so.15")
    source = "extern int topology;\nint begin(void) { return topology; }\n"
    build(tmp_path / "libnccl-net.so", source, str(hwloc))
    hwloc.unlink()
    (why,) = missing_in("efa", {"LD_LIBRARY_PATH": str(tmp_path)})
    assert "libhwloc.so.15: cannot open shared object file" in why


def test_a_plug_in_for_a_newer_c_library_is_refused_by_the_version_that_it_wants(tmp_path: Path) -> None:
    """As Ubuntu 24.04's in an image of 22.04."""
    build(tmp_path / "plugin/libnccl-net.so", NEEDS_NEWER, *newer_than_here(tmp_path))
    (why,) = missing_in("efa", {"LD_LIBRARY_PATH": str(tmp_path / "plugin")})
    assert "version `LIBC_9.9' not found" in why or "symbol newest, version LIBC_9.9 not defined" in why


needs_loader = pytest.mark.skipif(not Path(_PYTHON[0]).exists(), reason="asks glibc's loader on x86-64")


@needs_loader
def test_the_cuda_runtime_is_missing_until_it_has_a_name_without_a_version(tmp_path: Path) -> None:
    """The boot makes that name: see ``fabric.CUDART``."""
    build(tmp_path / "plugin/libnccl-net.so", PLUGIN)
    wheel = runtime(tmp_path / "site-packages")
    env = {"LD_LIBRARY_PATH": f"{tmp_path}/plugin:{wheel.parent}"}
    assert not begins(env), "the wheel's folder alone is of no use"
    (why,) = asked("efa", **env)["missing"]
    assert why.startswith("its plug-in needs the CUDA runtime (libcudart.so: cannot open shared object file")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcudart.so").symlink_to(wheel)
    env = {"LD_LIBRARY_PATH": f"{tmp_path}/plugin:{tmp_path}/lib"}
    assert begins(env)
    assert asked("efa", **env)["missing"] == []


@needs_loader
def test_in_an_image_the_runtime_of_its_own_torch_gets_that_name(tmp_path: Path) -> None:
    build(tmp_path / "plugin/libnccl-net.so", PLUGIN)
    wheel = runtime(tmp_path / "site-packages")
    env = {"LD_LIBRARY_PATH": f"{tmp_path}/plugin", "PYTHONPATH": str(tmp_path / "site-packages")}
    told = asked("efa", str(tmp_path / "lib"), **env)
    assert told == {"missing": [], "library_path": [str(tmp_path / "lib")]}
    assert (tmp_path / "lib/libcudart.so").resolve() == wheel
    assert begins({"LD_LIBRARY_PATH": f"{tmp_path}/plugin:{told['library_path'][0]}"})


def test_a_plug_in_with_the_runtime_within_needs_none(tmp_path: Path) -> None:
    build(tmp_path / "libnccl-net.so", "int begin(void) { return 0; }\n")
    assert missing_in("efa", {"LD_LIBRARY_PATH": str(tmp_path)}) == ()


def test_a_plug_in_that_was_named_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    build(tmp_path / "libnccl-net-ofi.so", "int begin(void) { return 0; }\n")
    path = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert missing_in("efa", {**path, "NCCL_NET_PLUGIN": "ofi"}) == ()
    assert missing_in("efa", {**path, "NCCL_NET_PLUGIN": str(tmp_path / "libnccl-net-ofi.so")}) == ()
    assert missing_in("efa", {**path, "NCCL_NET_PLUGIN": "other"}) != ()


@pytest.mark.parametrize(
    ("fabric", "env"),
    [
        ("efa", {"NCCL_NET": "Socket"}),
        ("efa", {"NCCL_NET_PLUGIN": "none"}),
        ("infiniband", {"NCCL_NET": "Socket"}),
        ("infiniband", {"NCCL_IB_DISABLE": "1"}),
    ],
)
def test_who_asks_for_tcp_gets_it(fabric: str, env: dict[str, str], tmp_path: Path) -> None:
    assert missing_in(fabric, {"LD_LIBRARY_PATH": str(tmp_path), **env}) == ()


@pytest.mark.parametrize(("cards", "why"), [(8, ()), (0, ("libibverbs finds no card",))])
def test_of_infiniband_libraries_and_providers_are_asked(tmp_path: Path, cards: int, why: tuple[str, ...]) -> None:
    build(tmp_path / "libibverbs.so.1", VERBS % cards)
    found = missing_in("infiniband", {"LD_LIBRARY_PATH": str(tmp_path)})
    assert [words.partition(":")[0] for words in found] == list(why)


@pytest.mark.parametrize(("cards", "why"), [(4, ()), (0, ("libibverbs finds no card",))])
def test_a_plug_in_that_asks_for_verbs_must_see_a_card(tmp_path: Path, cards: int, why: tuple[str, ...]) -> None:
    """As in a container without the devices: EFA's provider in libfabric is linked with libibverbs."""
    verbs = build(tmp_path / "libibverbs.so.1", VERBS % cards, "-Wl,-soname,libibverbs.so.1")
    source = "void *ibv_get_device_list(int *);\nint begin(void) { int n; ibv_get_device_list(&n); return n; }\n"
    build(tmp_path / "libnccl-net.so", source, str(verbs))
    found = missing_in("efa", {"LD_LIBRARY_PATH": str(tmp_path)})
    assert [words.partition(":")[0] for words in found] == list(why)


def test_what_was_missing_is_asked_for_again_and_what_is_there_is_not(tmp_path: Path) -> None:
    env = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert missing_in("efa", env) != ()
    log = tmp_path / "log"
    source = f'''#include <stdio.h>
    __attribute__((constructor)) static void told(void) {{ fputs("loaded\\n", fopen("{log}", "a")); }}
    '''
    build(tmp_path / "libnccl-net.so", source)
    assert missing_in("efa", env) == missing_in("efa", env) == ()
    assert log.read_text() == "loaded\n"


def test_a_plug_in_that_ends_the_process_is_no_plug_in(tmp_path: Path) -> None:
    source = "#include <stdlib.h>\n__attribute__((constructor)) static void at_once(void) { abort(); }\n"
    build(tmp_path / "libnccl-net.so", source)
    assert missing_in("efa", {"LD_LIBRARY_PATH": str(tmp_path)}) == ("loading it ended with -6",)


def test_the_complaint_says_what_to_do() -> None:
    said = complaint("efa", ["one thing", "another"], "on this node")
    assert said.startswith("NCCL cannot use EFA on this node: one thing; another; fix that, or ")
    assert said.endswith("gpuctl train --allow-tcp")


def test_it_needs_an_old_python_and_its_standard_library_alone() -> None:
    tree = ast.parse(Path(net_plugin.__file__).read_text(), feature_version=(3, 8))
    names = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names
