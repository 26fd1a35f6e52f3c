"""Small shared objects that stand in for NVIDIA's, AWS's and the kernel's libraries. Skips without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGIN = """
#include <dlfcn.h>
int begin(void) { return dlopen("libcudart.so", RTLD_NOW) ? 0 : 1; }
"""
"""EFA's for NCCL: begins if it can open the CUDA runtime, by that name."""

DRIVER = """
#include <unistd.h>
static int begun_in;
int cuInit(unsigned flags) {
    if (begun_in && begun_in != getpid()) return 3;
    begun_in = getpid();
    return 0;
}
int cuDeviceGetCount(int *count) { *count = 1; return begun_in == getpid() ? 0 : 3; }
"""
"""CUDA's: what has begun in one process does not work in its forks (error 3). Needs the soname libcuda.so.1."""

NEEDS_NEWER = "int newest(void);\nint begin(void) { return newest(); }\n"
"""With ``newer_than_here``."""


def build(path: Path, source: str = "", *options: str) -> Path:
    """``path``, made of C."""
    compiler = shutil.which("gcc", path=os.defpath)
    if not compiler:
        pytest.skip("stand-ins for shared objects need gcc")
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(path), "-", "-x", "none", *options]
    subprocess.run(command, input=source, text=True, check=True, timeout=60, env={"PATH": os.defpath})
    return path


def newer_than_here(folder: Path) -> list[str]:
    """Options with which what is built needs a version of a library that is newer than the one that is found: as an
    image's older C library is to a plug-in of the host's."""
    for name, version in (("new", "9.9"), ("old", "1.0")):
        script = folder / f"{name}.versions"
        script.write_text(f"LIBC_{version} {{ global: newest; }};\n")
        options = ["-Wl,-soname,liboldc.so.6", f"-Wl,--version-script={script}"]
        build(folder / name / "liboldc.so.6", "int newest(void) { return 1; }\n", *options)
    return [str(folder / "new/liboldc.so.6"), f"-Wl,-rpath,{folder}/old"]
