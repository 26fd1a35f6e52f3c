"""A machine's file system without the machine: programs run in it, and what they write stays in a folder of the test's.

They see no network unless they are meant to, and end with whoever started them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_ENTER = """
    set -e
    folder="$1" layers="$2" mounts="$3"
    shift 3
    mount -t overlay overlay -o "lowerdir=$layers,upperdir=$folder/upper,workdir=$folder/work" "$folder/merged"
    mount -t proc proc "$folder/merged/proc"
    mount --rbind /dev "$folder/merged/dev"
    for pair in $mounts; do
        source="${pair%%:*}" target="$folder/merged${pair#*:}"
        if [ -d "$source" ]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; touch "$target"; fi
        mount --bind "$source" "$target"
    done
    exec chroot "$folder/merged" "$@"
"""
_ENV = {
    "DEBIAN_FRONTEND": "noninteractive",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


class Chroot:
    """For root only. ``mounts``: folders and files of this machine, by the path that they have inside."""

    def __init__(self, folder: Path, layers: Sequence[Path], mounts: Mapping[str, Path]) -> None:
        self._folder = folder
        self._layers = ":".join(str(layer) for layer in layers)
        self._mounts = " ".join(f"{source.resolve()}:{target}" for target, source in mounts.items())
        for part in ("upper", "work", "merged"):
            (folder / part).mkdir(parents=True)
        # What is installed here is thrown away: it need not outlive a power loss.
        self.write("/etc/dpkg/dpkg.cfg.d/90-fast", "force-unsafe-io\n")

    def write(self, path: str, text: str) -> None:
        target = self._folder / "upper" / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def run(
        self, *command: str, network: bool = False, timeout_s: float = 120, env: Mapping[str, str] | None = None
    ) -> str:
        """What it prints. Raises ``subprocess.CalledProcessError``, which has it too."""
        alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", *(() if network else ("--net",)))
        return subprocess.run(
            [*alone, "sh", "-c", _ENTER, "sh", str(self._folder), self._layers, self._mounts, *command],
            check=True,
            env={**_ENV, **(env or {})},
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ).stdout
