"""What may be gone, damaged or lost when ``down`` is asked for: of the bucket, of Pulumi, of this machine's notes."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from gpuctl.cluster import layout
from tests.fakes.user import User


def no_bucket(user: User) -> None:
    user.end_booting()  # they would write into it
    user.delete_bucket()


def no_record(user: User) -> None:
    user.bucket().delete([layout.CLUSTER])


def no_state(user: User) -> None:
    shutil.rmtree(user.last_up_path().parent / "state")


def damaged_state(user: User) -> None:
    state = user.stack_state()
    state.write_bytes(state.read_bytes()[:-40])


def another_passphrase(user: User) -> None:
    """The salt that belongs to it is another's."""
    (settings,) = user.last_up_path().parent.glob("Pulumi.*.yaml")
    text = settings.read_text()
    assert "encryptionsalt" in text
    settings.write_text(text.replace("encryptionsalt: v1:", "encryptionsalt: v1:x"))


def no_cli(user: User) -> None:
    """What the clouds' own tools have on PATH stays."""
    for program in (user.folder / "bin").glob("pulumi*"):
        program.unlink()
    user.env["PATH"] = f"{user.folder / 'bin'}:/usr/bin:/bin"


def no_plugin(user: User) -> None:
    for program in (user.folder / "bin").glob("pulumi-resource-*"):
        program.unlink()


def nothing_noted(user: User) -> None:
    """But that there is such a cluster, and where its bucket is."""
    shutil.rmtree(user.last_up_path().parent)


ALL = [
    pytest.param(lose, id=lose.__name__)
    for lose in (
        *(no_bucket, no_record, no_state, damaged_state),
        *(another_passphrase, no_cli, no_plugin, nothing_noted),
    )
]


def machines_go_all_the_same(user: User, lose: Callable[[User], None]) -> None:
    """``up``, ``lose``, then ``down`` without ``--force``, after which ``leaks`` finds nothing."""
    user.boot_machines()
    user.up()
    assert len(user.machines()) == 2
    lose(user)
    done = user.run("down", "-y")
    assert f"cluster {user.cluster} is down" in done.stdout
    assert user.run("leaks", "--provider", user.up_flags[1]).stdout == ""
    assert user.run("status", code=2).stderr.startswith(f"error: no cluster named '{user.cluster}'")
