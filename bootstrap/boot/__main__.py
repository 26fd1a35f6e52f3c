"""``python3 -m gpuctl_boot boot | idle | leave WHY``

User-data has only what every machine needs, whatever becomes of it. The steps are taken from gpuctl's wheel; so
user-data stays small, and a machine that cannot reach the bucket still leaves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from . import FROM_WHEEL
from .idle import watch
from .leave import claim, leave
from .metadata import Metadata
from .report import Reporter
from .steps import Failed, Step, note, run
from .store import BootStore, fetch, open_store

_ALSO_ON_PATH = ":/opt/amazon/efa/bin"
_IDENTITY = "AZURE_MSI_RESOURCE_ID"
"""As object_store calls it, which the agent asks the bucket by."""
_AGAIN_S = 30.0
_LEAVE_AGAIN_S = (60.0, 900.0)
"""Before the second try to leave, and the most before a later one."""


def main(args: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> int:
    root = Path(os.environ.get("GPUCTL_ROOT", "/"))
    spec = json.loads((root / "etc/gpuctl/node.json").read_text())
    metadata = Metadata(spec["provider"], identity=spec["env"].get(_IDENTITY, ""))
    match args:
        case ["boot"]:
            os.environ["PATH"] += _ALSO_ON_PATH
            boot(root, spec, metadata, sleep)
        case ["idle"]:
            watch(root, spec, metadata)
        case ["leave", why]:
            _take_away(root, spec, metadata, why, sleep)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def boot(root: Path, spec: Mapping[str, Any], metadata: Metadata, sleep: Callable[[float], None]) -> None:
    """Until the machine is a node, and the bucket knows; or has failed, and is gone. Raises ``OSError`` if the machine
    cannot find out who it is, or has no address yet: whoever started this tries again."""
    instance = metadata.instance()
    instance = replace(instance, address=spec["address"] or instance.address, type=spec["type"] or instance.type)
    if not instance.address:
        raise OSError("this machine has no IP address yet")
    node = spec["node"] or instance.id
    store = open_store(spec["bucket"], {"AWS_REGION": spec["region"], **os.environ, **spec["env"]}, metadata)
    reporter = Reporter(root, node, instance, store)

    def tell(step: str, reason: str) -> None:
        print(step, reason, flush=True)
        reporter.tell("booting", step, reason)

    try:
        package = spec["package"]
        program = Step("program", lambda: unpack(root, package, store), 120, tries=20, mark=package["sha256"])
        run([program], root, tell, sleep)
        from .install import Installation  # which was not there before

        run(Installation(root, spec, node, instance, store).steps(), root, tell, sleep)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        told = (error.step, error.reason) if isinstance(error, Failed) else ("boot", f"{type(error).__name__}: {error}")
        step, reason = told
        minutes = spec["unhealthy_minutes"]
        with suppress(OSError):  # the disk may be what is full
            note(root, f"leaving in {minutes:g} minutes; to keep the machine: sudo systemctl stop gpuctl-boot")
        heard = reporter.tell("failed", step, reason)
        sleep(60 * minutes)
        if not heard:
            reporter.tell("failed", step, reason)
        _take_away(root, spec, metadata, f"boot failed: {step}: {reason}", sleep)
        return
    while not reporter.tell("ready"):
        sleep(_AGAIN_S)


def unpack(root: Path, package: Mapping[str, Any], store: BootStore) -> None:
    """The rest of this program, beside what there is of it below ``root``."""
    with ZipFile(fetch(store, package["wheel"], package["sha256"], root)) as wheel:
        for name in FROM_WHEEL:
            text = wheel.read(f"gpuctl/bootstrap/boot/{name}.py")
            (root / f"opt/gpuctl/boot/gpuctl_boot/{name}.py").write_bytes(text)


def _take_away(
    root: Path, spec: Mapping[str, Any], metadata: Metadata, why: str, sleep: Callable[[float], None]
) -> None:
    """Tried for ever: a machine that cannot leave is paid for, and there may be no idle watch."""
    if spec["provider"] == "ssh" or not claim(root, why):
        return
    pause_s, most_s = _LEAVE_AGAIN_S
    while not leave(spec, metadata, why, sleep=sleep):
        sleep(pause_s)
        pause_s = min(2 * pause_s, most_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
