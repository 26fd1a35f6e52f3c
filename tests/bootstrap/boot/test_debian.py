"""What the boot's steps ask of Debian has that name there and brings what it is asked for: each step with the real apt,
on a file system that lacks it. No other network than Debian's is asked, and that only once (see ``root``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuctl.bootstrap import boot
from tests.fakes.bare_machine import PINS, wheel
from tests.machines import root
from tests.machines.chroot import Chroot

SUITES = {"bookworm": "3.11", "trixie": "3.13"}
"""Debian 12 and 13, and their Python."""
WANTED = (
    *("docker.io", "docker-cli", "rdma-core", "ibverbs-utils", "ibverbs-providers", "mdadm"),
    *("gcc", "libc6-dev", "python3-dev", "python3-venv"),
)
BOOT = "/opt/gpuctl/boot/gpuctl_boot"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEP = """
import hashlib, sys
from pathlib import Path
sys.path.insert(0, "/opt/gpuctl/boot")
from gpuctl_boot.install import Installation
from gpuctl_boot.metadata import Instance
from gpuctl_boot.store import open_store
wheel, pins = "gpuctl-0.1.0-py3-none-any.whl", "pins"
digests = [hashlib.sha256((Path("/bucket") / name).read_bytes()).hexdigest() for name in (wheel, pins)]
package = {"wheel": wheel, "sha256": digests[0], "extras": ["train"]}
package |= {"constraints": pins, "constraints_sha256": digests[1]}
spec = {
    "provider": "aws",
    "package": package,
    "promise": {"gpus": 8, "fabric": "infiniband", "fabric_cards": 8},
    "sources": {"apt": "deb [trusted=yes] file:/debs ./"},
    "env": {"PIP_NO_INDEX": "1"},
}
here = Instance("i-0", "10.0.0.7", "", "us-east-1a", "us-east-1", "p4d.24xlarge")
machine = Installation(Path("/"), spec, "i-0", here, open_store("file:///bucket", {}, None))
for name in sys.argv[1:]:
    getattr(machine, name)()
"""

TRITON = """
import importlib.util, os, shutil, subprocess, sys, sysconfig, tempfile
folder = tempfile.mkdtemp()
driver = os.path.join(folder, "libcuda.so.1")
cc = shutil.which("gcc")
shared = [cc, "-shared", "-fPIC", "-x", "c", "-o", driver, "-"]
subprocess.run(shared, input=b"int cuInit(int flags) { return 0; }", check=True)
scheme = sysconfig.get_default_scheme()
headers = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]
source, made = os.path.join(folder, "stub.c"), os.path.join(folder, "stub" + sysconfig.get_config_var("EXT_SUFFIX"))
open(source, "w").write(sys.argv[1])
how = ["-O3", "-shared", "-fPIC", "-Wno-psabi", "-l:libcuda.so.1", f"-L{folder}", f"-I{folder}", f"-I{headers}"]
subprocess.run([cc, source, *how, f"-Wl,-rpath,{folder}", "-o", made], check=True)
spec = importlib.util.spec_from_file_location("stub", made)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print("cuInit says", module.begin(), "in", sys.prefix)
"""
"""The call of the compiler in triton/runtime/build.py, for a module that NVIDIA's driver library is linked to."""
MODULE = """
#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#define PY_SSIZE_T_CLEAN
#include <Python.h>
int cuInit(int flags);
static PyObject *begin(PyObject *self, PyObject *args) { return PyLong_FromLong(cuInit(0)); }
static PyMethodDef methods[] = {{"begin", begin, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "stub", NULL, -1, methods};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&definition); }
"""

Lacking = Callable[..., Chroot]


@pytest.fixture(params=SUITES)
def suite(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lacking(suite: str, tmp_path: Path) -> Lacking:
    """The file system of a machine of ``suite`` without some of its programs."""
    if os.getuid() != 0:
        pytest.skip("only root can enter a machine's file system")
    if missing := [name for name in ("mmdebstrap", "dpkg-deb", "unshare") if not shutil.which(name)]:
        pytest.skip(f"a machine's file system needs {', '.join(missing)}; .ci/install-system installs what is missing")
    try:
        below = root.debian(suite)
        debs = root.debs(below, WANTED)
    except root.CannotMake as error:
        pytest.skip(f"no file system of {suite}: {error}")

    def made(*programs: str) -> Chroot:
        bucket = tmp_path / "bucket"
        bucket.mkdir()
        (bucket / "gpuctl-0.1.0-py3-none-any.whl").write_bytes(wheel())
        (bucket / "pins").write_bytes(PINS)
        source = Path(boot.__file__).parent
        chroot = Chroot(tmp_path / "chroot", [below], {"/debs": debs, "/bucket": bucket, BOOT: source})
        chroot.write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n")
        chroot.run("chmod", "+x", "/usr/sbin/policy-rc.d")
        for program in programs:
            chroot.run("rm", "-f", f"/usr/bin/{program}")
        return chroot

    return made


def found(chroot: Chroot, *programs: str) -> set[str]:
    said = chroot.run(
        "python3", "-c", "import json, shutil, sys; print(json.dumps([*map(shutil.which, sys.argv[1:])]))", *programs
    )
    return {Path(path).name for path in json.loads(said) if path}


def steps(chroot: Chroot, *names: str) -> None:
    try:
        chroot.run("python3", "-c", STEP, *names, timeout_s=600)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{names}: {error.stdout[-2000:]}")


def test_torch_compile_can_build_its_module_once_a_bare_machine_has_gpuctl(suite: str, lacking: Lacking) -> None:
    chroot = lacking()
    assert found(chroot, "gcc") == set()
    steps(chroot, "compiler", "gpuctl")
    said = chroot.run("/opt/gpuctl/venv/bin/python", "-c", TRITON, MODULE)
    assert said == "cuInit says 0 in /opt/gpuctl/venv\n"
    assert found(chroot, f"python{SUITES[suite]}") != set()


def test_a_machine_without_containers_gets_dockers_client_too(lacking: Lacking) -> None:
    """It runs the jobs that have an image. Debian 13 has it in a package that the daemon's only recommends."""
    chroot = lacking("podman")
    assert found(chroot, "docker", "podman") == set()
    steps(chroot, "docker")
    assert found(chroot, "docker", "dockerd") == {"docker", "dockerd"}
    assert "Docker version" in chroot.run("docker", "--version")


def test_infiniband_comes_with_the_drivers_of_its_cards(lacking: Lacking) -> None:
    """Without which its programs and NCCL find none: the library only recommends them."""
    chroot = lacking()
    steps(chroot, "fabric")
    assert found(chroot, "ibv_devinfo") == {"ibv_devinfo"}
    assert "mlx5" in chroot.run("cat", "/etc/libibverbs.d/mlx5.driver")
