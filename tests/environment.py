"""What the tests see of the machine and of whoever runs them: the same everywhere, but for where programs are."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

_KEPT = {
    "CI",
    "LD_LIBRARY_PATH",
    "PATH",
    "TMPDIR",
    "VIRTUAL_ENV",
    "XDG_RUNTIME_DIR",  # Podman's, of a user who is not root
    # How packages are fetched.
    "CURL_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
    "http_proxy",
    "https_proxy",
}
_KEPT_PREFIXES = ("COVERAGE_", "CUDA_", "GPUCTL_TEST_", "NVIDIA_", "PIP_", "PYTEST_")
CACHE = "GPUCTL_TEST_CACHE"
"""Variable: the folder with what tests need and is made once, as ``.ci/install-azurite`` and ``tests/machines`` do."""
_OTHER_CODE = "GPUCTL_TEST_PYTHONPATH"
"""Variable: of another tree whose code the tests' own processes are to run, as ``tools/mutate.py`` has one."""
_SET = {
    "AWS_CONFIG_FILE": os.devnull,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GLOO_SOCKET_IFNAME": "lo",  # or gloo looks for the address of the host's name
    "LC_ALL": "C.UTF-8",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "OMP_NUM_THREADS": "1",
    # torch's store asks the name server for the name of each peer, and waits 5 s by default when it is not there.
    "RES_OPTIONS": "timeout:1 attempts:1",
    "TZ": "UTC",
}
TERMINAL = {"COLUMNS": "120", "TERM": "dumb"}
"""For the tests alone: pytest itself may know what terminal it writes to."""


def clean() -> None:
    """Call it before a test is imported, since torch reads variables then. HOME stays: pytest has no folder yet."""
    seen = of(os.environ)
    for name in os.environ.keys() - seen.keys():
        del os.environ[name]
    os.environ.update(seen)
    os.umask(0o022)
    _open_stdin()
    _hear_signals()


def of(found: Mapping[str, str]) -> dict[str, str]:
    """The variables that the tests see where ``found`` are there."""
    kept = {name: value for name, value in found.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    home = Path(found.get("HOME") or Path.home())
    cache = Path(found.get("XDG_CACHE_HOME") or home / ".cache")
    kept.setdefault(CACHE, str(cache / "gpuctl-tests"))
    kept.setdefault("PIP_CACHE_DIR", str(cache / "pip"))
    if _OTHER_CODE in kept:
        kept["PYTHONPATH"] = kept[_OTHER_CODE]
    settings = Path(found.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    if settings.exists():  # it may name the index
        kept.setdefault("PIP_CONFIG_FILE", str(settings))
    return {**kept, "HOME": str(home), **_SET}


def cache() -> Path:
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "gpuctl-tests")


def _open_stdin() -> None:
    """Where it is closed, the next file that is opened would be the standard input of all that the tests start."""
    try:
        os.fstat(0)
    except OSError:
        os.open(os.devnull, os.O_RDONLY)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process


def _hear_signals() -> None:
    """What a shell starts by ``&`` ignores SIGINT and SIGQUIT, what ``nohup`` starts SIGHUP; and so would all that the
    tests start and signal."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # A program that is started inherits what is ignored, but no handler; and this one still outlives its terminal.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, _nothing if ignored else signal.SIG_DFL)


def _nothing(*_: object) -> None: ...
