"""Where Pulumi's state is: said once, and then known. By the real command line; see ``test_rented``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.session.test_public_ip import Teller, teller
from tests.fakes.aws.user import Account

__all__ = ["teller"]


def logged(folder: Path) -> Path:
    """From now on every call of the CLI is noted in this file, with the backend that it was told of."""
    log, program = folder / "backends", folder / "bin" / "pulumi"
    real = program.rename(program.with_name("pulumi-stand-in"))
    program.write_text(f'#!/bin/sh\necho "$PULUMI_BACKEND_URL" >> {log}\nexec {real} "$@"\n')
    program.chmod(0o700)
    return log


def named(log: Path) -> set[str]:
    """Backends, since this was last asked. Not told of any: the CLI was asked for its version."""
    found = {line for line in log.read_text().splitlines() if line}
    log.unlink()
    return found


@pytest.mark.slow
def test_a_backend_is_said_once_and_then_known(account: Account, teller: Teller) -> None:
    log = logged(account.folder)
    account.env["GPUCTL_CHECKIP"] = teller.url
    account.boot_machines()
    team = "s3://team-state?region=eu-west-1"
    account.up("--backend", team, "--ssh-from", "me", nodes="1")
    assert named(log) == {team}
    assert account.last_up()["ssh_from"] == "198.51.100.7/32"
    refused = account.up("--backend", "file:///elsewhere", nodes="1", code=2)
    assert refused.stderr.splitlines()[-1] == (
        f"error: Pulumi's state of {account.cluster} is in s3://team-state, not in file:///elsewhere; "
        f"leave --backend out, or run `gpuctl down --cluster {account.cluster}` first"
    )
    account.up(nodes="2")
    account.run("repair", "-y")
    assert named(log) == {team}
    account.env["GPUCTL_BACKEND"] = "gs://of-another-cluster"
    account.run("down", "-y")
    assert named(log) == {team}
    account.env.pop("GPUCTL_BACKEND")
    account.up(nodes="1")
    assert named(log) == {f"file://{account.folder}/state/pulumi/{account.cluster}/state"}, "forgotten with the cluster"
    account.run("down", "-y")
