"""Taking this machine away for good: out of its group, which would replace a machine that only powers off. One that is
ill is replaced on purpose, where the cloud has a call for that which a node may make (Azure has none).

Whoever wants to claims first, so that two reasons never act both. A machine of ``ssh`` was there before and stays.

Where the cloud does not let it go, its power goes off, if that ends the bill. AWS's group takes a machine that is off
for broken, terminates it and starts another, whatever the machine's shutdown behaviour is; Google does not bill for one
that is off. Azure bills it in full until somebody deallocates it, and nothing on it would try again; so there the power
stays on.

Sources: Amazon EC2 Auto Scaling, TerminateInstanceInAutoScalingGroup and "Health checks for instances"; Compute Engine,
instanceGroupManagers.deleteInstances, recreateInstances and "Suspend, stop, or reset"; Azure, "Virtual Machine Scale
Sets - Delete Instances" and "States and billing status of Azure Virtual Machines".
"""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from .metadata import Instance, Metadata
from .sigv4 import signed

_PAUSES_S = (2, 5, 10, 20, 30)
"""Between tries. Long enough for a call whose answer was lost to show its effect, which is that we are gone."""
_BILLED_WHEN_OFF = ("azure",)
_TIMEOUT_S = 20
_FORM = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}


def claim(root: Path, why: str) -> bool:
    """Whether it is ours to take the machine below ``root`` away; ``False``: someone else is at it."""
    path = root / "run/gpuctl/leaving"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(why)
    except FileExistsError:
        return False
    return True


def power_off() -> None:
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["systemctl", "poweroff"], timeout=60, check=False)


def leave(
    spec: Mapping[str, Any],
    metadata: Metadata,
    why: str,
    *,
    replace: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    timeout_s: float = _TIMEOUT_S,
    last_resort: Callable[[], None] = power_off,
) -> bool:
    """Shrink the group by this machine, which the cloud then takes; with ``replace``, the group starts another one in
    its place. ``False``: it would not, and where that helps the power goes off; a machine that is still there later is
    to try again.

    ``spec`` is the ``NodeSpec``; its ``sources`` may name other addresses of ``autoscaling``, ``compute`` and ``arm``.
    """
    print(f"leaving: {why}", flush=True)
    if metadata.provider == "ssh":
        return True
    once = str(uuid.uuid4())
    for pause in (*_PAUSES_S, 0):
        try:
            _shrink(spec.get("sources", {}), metadata, once, replace, timeout_s)
        except (OSError, ValueError, LookupError, HTTPException) as error:
            print(f"the cloud does not let this machine terminate itself: {_words(error)}", flush=True)
            sleep(pause)
        else:
            return True
    if metadata.provider not in _BILLED_WHEN_OFF:
        last_resort()
    return False


def _shrink(sources: Mapping[str, str], metadata: Metadata, once: str, replace: bool, timeout_s: float) -> None:
    machine = metadata.instance()
    if not machine.group and metadata.provider != "aws":
        raise LookupError(f"{machine.id} is not in a group")
    make = {"aws": _of_aws, "gcp": _of_gcp, "azure": _of_azure}[metadata.provider]
    with urlopen(make(sources, metadata, machine, once, replace), timeout=timeout_s):
        pass


def _of_aws(sources: Mapping[str, str], metadata: Metadata, machine: Instance, _: str, replace: bool) -> Request:
    url = sources.get("autoscaling") or f"https://autoscaling.{machine.region}.amazonaws.com/"
    action = {
        "Action": "TerminateInstanceInAutoScalingGroup",
        "InstanceId": machine.id,
        "ShouldDecrementDesiredCapacity": "false" if replace else "true",
        "Version": "2011-01-01",
    }
    body, keys = urlencode(action).encode(), metadata.aws_credentials()
    return Request(url, body, signed("POST", url, machine.region, "autoscaling", keys, _FORM, body))


def _of_gcp(sources: Mapping[str, str], metadata: Metadata, machine: Instance, once: str, replace: bool) -> Request:
    """``once`` makes a repeated request one: Google's ``requestId``."""
    url = sources.get("compute") or "https://compute.googleapis.com"
    which = {"instances": [f"zones/{machine.zone}/instances/{machine.id}"]}
    call = "recreateInstances" if replace else "deleteInstances"
    path = f"/compute/v1/{machine.group}/{call}?requestId={once}"
    return _bearing(url.rstrip("/") + path, metadata.token(url), which)


def _of_azure(sources: Mapping[str, str], metadata: Metadata, machine: Instance, _once: str, _replace: bool) -> Request:
    url = sources.get("arm") or "https://management.azure.com"
    which = {"instanceIds": [machine.id.rpartition("_")[2]]}
    path = f"{machine.group}/delete?api-version=2024-07-01"
    return _bearing(url.rstrip("/") + path, metadata.token("https://management.azure.com/"), which)


def _bearing(url: str, token: str, data: object) -> Request:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return Request(url, json.dumps(data).encode(), headers)


def _words(error: Exception) -> str:
    said = error.read(300).decode(errors="replace") if isinstance(error, HTTPError) else ""
    return " ".join(f"{error!r} {said}".split())
