"""The clusters a user has made."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cluster.errors import BadInput, CorruptRecord
from gpuctl.stacks.state.clusters import KnownCluster, command, find, forget, known_clusters, remember
from gpuctl.stacks.state.paths import state_dir


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))


def test_a_cluster_is_remembered_until_it_is_forgotten() -> None:
    made = KnownCluster(name="a", provider="local", bucket="file:///b", created_at=1.0)
    remember(made)
    assert find("a") == made and known_clusters() == [made]
    forget("a")
    forget("a")
    assert known_clusters() == []


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadInput, match="`gpuctl up --cluster b`"):
        find("b")
    remember(KnownCluster(name="a", provider="local", bucket="file:///b"))
    with pytest.raises(BadInput, match="there are: a"):
        find("b")


def test_what_is_noted_is_for_this_user_alone() -> None:
    remember(KnownCluster(name="a", provider="local", bucket="file:///b"))
    file = state_dir() / "clusters" / "a.json"
    assert [one.stat().st_mode & 0o077 for one in (file, file.parent, state_dir())] == [0, 0, 0]


def test_a_file_that_is_no_record_is_named() -> None:
    (state_dir() / "clusters").mkdir(parents=True)
    (state_dir() / "clusters" / "a.json").write_text("{}")
    with pytest.raises(CorruptRecord, match=r"a\.json"):
        find("a")


def test_the_state_directory_follows_the_custom_of_the_system() -> None:
    assert state_dir({"GPUCTL_STATE_DIR": "/x"}) == Path("/x")
    assert state_dir({"XDG_STATE_HOME": "/y"}) == Path("/y/gpuctl")
    assert state_dir({}) == Path.home() / ".local/state/gpuctl"


def test_a_command_line_names_every_cluster_but_the_default_one() -> None:
    assert command("down", "default") == "gpuctl down"
    assert command("train script.py", "big") == "gpuctl train script.py --cluster big"
