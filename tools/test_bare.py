"""``make test`` from a clean clone on a Debian that has Python and make and nothing else (``make test-bare``).

Twice, as root and as a plain user, and with SIGINT ignored, as under ``nohup`` and in some CI systems. What each
printed is in ``build/bare-USER.log``, and its last lines are shown. pip finds packages there where it finds them here.
For root, on Linux, with mmdebstrap.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.machines import root
from tests.machines.chroot import Chroot
from tests.paths import ROOT

USERS = ("root", "plain")
_PACKAGES = ("python3", "python3-venv", "make")
_TRUST = ("SSL_CERT_FILE",)
"""By which uv knows a package index of this machine's."""
_TIMEOUT_S = 3600.0
_SHOWN = 12
_SCRIPT = """
    set -e
    [ "$1" = root ] || useradd --create-home "$1"
    home="$(getent passwd "$1" | cut -d: -f6)"
    cp -r /clone "$home/gpuctl"
    chown -R "$1" "$home/gpuctl"
    cd "$home/gpuctl"
    trap '' INT
    runuser --user "$1" -- env HOME="$home" make test > /log 2>&1
"""


def main() -> int:
    if os.geteuid() != 0:
        print("error: make test-bare makes a Debian of its own: run it as root, on Linux", file=sys.stderr)
        return 1
    try:
        layer = root.plain(root.SUITE, *_PACKAGES)
    except root.CannotMake as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    codes = [_run(user, layer) for user in USERS]
    return max(codes)


def _run(user: str, layer: Path) -> int:
    log = ROOT / "build" / f"bare-{user}.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    print(f"as {user}, with SIGINT ignored: see {log.relative_to(ROOT)}", flush=True)
    env = pip_settings() | {name: os.environ[name] for name in _TRUST if name in os.environ}
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        mounts = {"/clone": clone, "/log": log}
        mounts |= {path: Path(path) for path in ("/sys", "/etc/resolv.conf")}
        machine = Chroot(Path(place) / "root", [layer], mounts | {str(path): path for path in named_paths(env)})
        began, code = time.monotonic(), 0
        try:
            machine.run("sh", "-c", _SCRIPT, "sh", user, network=True, timeout_s=_TIMEOUT_S, env=env)
        except subprocess.CalledProcessError as error:
            code = error.returncode
            print(error.stdout, end="")  # of what comes before make; the rest is in the log
        took_s = time.monotonic() - began
    with log.open(errors="replace") as file:
        print("".join(deque(file, _SHOWN)), end="")
    print(f"as {user}: {'passed' if code == 0 else f'failed with code {code}'} in {took_s / 60:.1f} min\n", flush=True)
    return code


def pip_settings() -> dict[str, str]:
    """This machine's for pip, as environment variables: whose names begin with ``PIP_``."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    found: dict[str, str] = {}
    for line in told.stdout.splitlines():
        name, _, value = line.partition("=")
        place, _, option = name.rpartition(".")
        # The Makefile has its own constraints; what the environment says counts more than a file, and comes first.
        if place in ("global", "install", ":env:") and option != "constraint":
            found.setdefault(f"PIP_{option.upper().replace('-', '_')}", str(ast.literal_eval(value)))
    return found


def named_paths(settings: Mapping[str, str]) -> Iterator[Path]:
    """Files and folders of this machine that these settings name. An index's files lie beside it."""
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            yield path.parent if word.startswith("file://") else path


if __name__ == "__main__":
    sys.exit(main())
