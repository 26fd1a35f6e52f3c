"""Azure Blob Storage as Microsoft's Azurite speaks it (``.ci/install-azurite`` installs it)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlencode

from tests import environment
from tests.fakes.stores.serving import started

_ACCOUNT = "devstoreaccount1"
_SECRET = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's only account, and its key, which is no secret. Source: learn.microsoft.com, "Use the Azurite emulator"."""

_SPOKEN = "2023-11-03"
"""The version of the protocol that ``create`` speaks; obstore 0.12 speaks the same."""

# As `node main.js …`, but ends when standard input does.
_WRAPPER = "process.stdin.on('end', () => process.exit(0)).resume(); require(process.argv[1])"


class NotInstalled(Exception):
    """Azurite, or the node that it runs on, is not there."""


@contextmanager
def serving() -> Iterator[str]:
    """Yields the account's URL. Nothing is written to disk. Raises ``NotInstalled``."""
    node = shutil.which("node")
    if node is None:
        raise NotInstalled("there is no node to run Azurite; .ci/install-system installs both")
    # `--disableTelemetry`: it would tell its makers about every start.
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry", "--blobPort", "0"]
    with started([node, "-e", _WRAPPER, "--", str(_program()), *options], r"listens on (http://\S+)") as endpoint:
        yield f"{endpoint}/{_ACCOUNT}"


def create(endpoint: str, container: str) -> None:
    _ask("PUT", endpoint, container)


def delete(endpoint: str, container: str) -> None:
    """With all that is in it."""
    _ask("DELETE", endpoint, container)


def _ask(method: str, endpoint: str, container: str) -> None:
    date = formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": _SPOKEN}
    signed = "\n".join(f"{name}:{value}" for name, value in headers.items())
    signature = _signature(method + "\n" * 12 + f"{signed}\n/{_ACCOUNT}/{_ACCOUNT}/{container}\nrestype:container")
    headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}
    request = urllib.request.Request(f"{endpoint}/{container}?restype=container", headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=30):
        pass


def url(endpoint: str, container: str, secret: str = _SECRET) -> str:
    """What ``open_bucket`` takes for a prefix in ``container``."""
    return f"az://{container}/prefix?endpoint={endpoint}&account_name={_ACCOUNT}&account_key={quote(secret, safe='')}"


def shared_url(endpoint: str, container: str, may: str) -> str:
    """As ``url``, with a signature for the container that allows ``may`` only: of "racwdl", in this order.

    Source: learn.microsoft.com, "Create a service SAS", version 2020-12-06 and later.
    """
    until, spoken = "2099-01-01T00:00:00Z", "2020-12-06"
    place = f"/blob/{_ACCOUNT}/{container}"
    signature = _signature("\n".join([may, "", until, place, "", "", "", spoken, "c", *[""] * 7]))
    key = urlencode({"sp": may, "se": until, "sv": spoken, "sr": "c", "sig": signature})
    return f"az://{container}/prefix?endpoint={endpoint}&account_name={_ACCOUNT}&sas_key={quote(key, safe='')}"


def _signature(text: str) -> str:
    return base64.b64encode(hmac.new(base64.b64decode(_SECRET), text.encode(), hashlib.sha256).digest()).decode()


def _program() -> Path:
    """Where ``.ci/install-azurite`` put it, or on the path."""
    installed = environment.cache() / "azurite/node_modules/.bin/azurite-blob"
    found = str(installed) if installed.exists() else shutil.which("azurite-blob")
    if found is None:
        raise NotInstalled("Azurite is not installed; .ci/install-system installs it")
    return Path(found).resolve()
