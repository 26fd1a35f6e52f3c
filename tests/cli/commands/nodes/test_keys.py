"""Whose key it is that logs in to rented nodes: the one that gpuctl made, one beside a public key that was named, one
that only an agent can use. Behind the endpoint of ``test_reaching``, with a real sshd and a real agent."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.ssh import keys
from tests.cli.commands.nodes.test_reaching import FIRST, Behind
from tests.fakes.requests import asked
from tests.waiting import until

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="no ssh here: apt-get install openssh-client")


class Owner(Behind):
    """Whose ssh has been told nothing, and has no agent."""

    def __init__(self, home: Path, url: str, stack: ExitStack) -> None:
        super().__init__(home, url, stack)
        (home / "home" / ".ssh" / "config").unlink()
        self.env.pop("SSH_AUTH_SOCK", None)

    def rented_with(self, public_key: str, named: Path | None) -> None:
        """What an ``up`` that was given the file ``named``, or none, has left: the nodes let the key in."""
        self.identity.with_suffix(".pub").write_text(f"{public_key}\n")
        terms = NodeOptions(identity=keys.identity(public_key, named))
        last_request.remember(LastRequest(request=asked("aws", cluster="default", ssh_key=public_key), terms=terms))

    def logs_in(self, *, code: int = 0) -> str:
        """What ``exec`` says of why not, if it does not."""
        done = self.run("exec", "0", "--", "echo $GPUCTL_TEST_NODE", code=code)
        assert code or done.stdout == f"{FIRST}\n"
        return done.stderr


@pytest.fixture
def owner(tmp_path: Path, file_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    with ExitStack() as stack:
        yield Owner(tmp_path, file_url, stack)


@pytest.mark.slow
def test_the_key_that_gpuctl_made_logs_in(owner: Owner) -> None:
    owner.rented_with(keys.make(), None)
    owner.logs_in()


@pytest.mark.slow
def test_the_private_key_beside_the_one_that_was_named_logs_in(owner: Owner, tmp_path: Path) -> None:
    public = _new(tmp_path / "mine")
    owner.rented_with(public, tmp_path / "mine.pub")
    owner.logs_in()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["beside", "elsewhere"])
def test_an_encrypted_key_logs_in_by_the_agent(owner: Owner, tmp_path: Path, where: str) -> None:
    """``elsewhere``: the agent alone has it, as of a hardware token."""
    private = tmp_path / "mine"
    public = _new(private)
    with ExitStack() as stack:
        agent = _agent(tmp_path / "agent", stack)
        subprocess.run(
            ["ssh-add", "-q", str(private)], env={**os.environ, "SSH_AUTH_SOCK": agent}, check=True, timeout=60
        )
        change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a passphrase", "-f", str(private)]
        subprocess.run(change, check=True, capture_output=True, timeout=60)
        if where == "elsewhere":
            private.unlink()
        owner.rented_with(public, private.with_suffix(".pub"))
        assert "accepts none of the keys" in owner.logs_in(code=1)
        owner.env["SSH_AUTH_SOCK"] = agent
        owner.logs_in()


def _new(private: Path) -> str:
    """The public key of one that is made."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "work", "-f", str(private)]
    subprocess.run(command, check=True, timeout=60)
    return private.with_suffix(".pub").read_text().strip()


def _agent(socket: Path, stack: ExitStack) -> str:
    process = stack.enter_context(
        subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    )
    stack.callback(process.terminate)
    until(socket.exists, "the agent listens")
    return str(socket)
