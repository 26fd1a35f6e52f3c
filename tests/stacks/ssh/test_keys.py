"""The key of a user who has none, and the private keys that ssh must be told of."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.ssh import config, keys
from gpuctl.stacks.ssh.hosts import Host
from tests.fakes.requests import asked

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="no ssh here: apt-get install openssh-client")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))


def test_the_key_is_made_once_for_this_user_alone() -> None:
    key = keys.make()
    assert key.startswith("ssh-ed25519 ") and keys.make() == key
    assert stat.S_IMODE(keys.own().stat().st_mode) == 0o600
    assert keys.identity(key, None) == str(keys.own())
    assert keys.identity("ssh-ed25519 another", None) == ""


def test_a_key_whose_public_part_was_never_written_is_used() -> None:
    key = keys.make()
    keys.own().with_suffix(".pub").unlink()
    assert keys.make().split()[:2] == key.split()[:2]
    assert keys.identity(keys.make(), None) == str(keys.own())


def test_without_ssh_keygen_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert keys.make() == ""


def test_the_private_key_beside_a_public_one_is_told_to_ssh(tmp_path: Path) -> None:
    public, private = tmp_path / "work.pub", tmp_path / "work"
    public.write_text(keys.make())
    assert keys.identity(keys.make(), public) == "", "an agent or a token holds it"
    private.write_bytes(b"")
    identity = keys.identity(keys.make(), public)
    assert identity == str(private)
    last_request.remember(LastRequest(request=asked("aws", cluster="a"), terms=NodeOptions(identity=identity)))
    rented = Host(node="i-1", index=0, takes_part=True, address="203.0.113.9", is_public=True)
    path = config.write("a", [rented])
    done = subprocess.run(["ssh", "-G", "-F", str(path), "a-0"], capture_output=True, text=True, check=True)
    assert f"identityfile {private}" in done.stdout
