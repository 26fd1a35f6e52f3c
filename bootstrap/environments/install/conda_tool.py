"""A conda environment solved and installed: ``python conda_tool.py solve|install REQUEST ANSWER``, both JSON files.

This runs as a program of its own, by a Python that has py-rattler and need not have gpuctl. rattler is the library
under pixi: it reads conda's channels, solves, and links packages, so that no conda or mamba has to be on a node. Errors
are a line on standard error that begins with ``error:``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


async def solve(request: dict[str, Any]) -> dict[str, Any]:
    """Which packages ``specs`` mean in ``channels``, on this machine: their records."""
    from rattler import Channel, Client, Gateway, VirtualPackage, solve

    gateway = Gateway(cache_dir=Path(request["cache"]) / "repodata", client=Client.default_client())
    records = await solve(
        sources=[Channel(one) for one in request["channels"]],
        specs=request["specs"],
        constraints=request["constraints"],
        gateway=gateway,
        virtual_packages=VirtualPackage.detect(),
    )
    return {
        "records": [
            {
                "name": one.name.normalized,
                "version": str(one.version),
                "build": str(one.build),
                "sha256": one.sha256.hex() if one.sha256 else str(one.url),
                "size": one.size or 0,
                "record": one.to_json(),
            }
            for one in records
        ]
    }


async def install(request: dict[str, Any]) -> dict[str, Any]:
    """Put packages into ``folder``, which are to be used at ``prefix``."""
    from rattler import install

    await install(
        [_record(json.loads(text)) for text in request["records"]],
        target_prefix=request["folder"],
        alternative_target_prefix=request["prefix"],
        cache_dir=Path(request["cache"]) / "pkgs",
        installed_packages=[],
        show_progress=False,
        execute_link_scripts=False,
    )
    return {}


def _record(fields: dict[str, Any]) -> Any:
    """A record from what ``to_json`` made of it; rattler reads the like only as the file that is in a package."""
    from rattler import PackageRecord, RepoDataRecord

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "index.json")
        path.write_text(json.dumps(fields))
        record = PackageRecord.from_index_json(path, fields.get("size"), fields.get("sha256"), fields.get("md5"))
    return RepoDataRecord(record, fields["fn"], fields["url"], fields["channel"])


def main(what: str, request: str, answer: str) -> int:
    """Returns the exit code."""
    try:
        said = asyncio.run({"solve": solve, "install": install}[what](json.loads(Path(request).read_text())))
    except Exception as error:  # noqa: BLE001 - rattler has one class for each of its Rust crates
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    Path(answer).write_text(json.dumps(said))
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # rattler's threads want the GIL as Python ends, and abort it (1 of 60 runs of 0.28)
