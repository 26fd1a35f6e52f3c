"""A few rows of ``test_two_users`` through the command line, for each cloud: its tags, and the bucket that it keeps."""

from __future__ import annotations

from gpuctl.cluster import layout
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.error_mapping import to_reopen
from tests.fakes.user import User

_WEIGHTS = f"{layout.checkpoints('a-1')}/10/weights"


def a_second_user_changes_nothing(user: User) -> None:
    """Of what the first one's cluster has left: with its name, and with another name at its prefix."""
    user.boot_machines()
    user.up(nodes="1")
    first, url, bucket = user.cluster, user.known().bucket, user.bucket()
    bucket.put(_WEIGHTS, b"weights")
    user.run("down", "-y")
    before = _objects(bucket)

    user.env |= {"GPUCTL_STATE_DIR": str(user.folder / "kim"), "LOGNAME": "kim"}
    user.cluster = f"{first}b"
    for name, words in ((f"{first}b", ["--bucket", to_reopen(url)]), (first, [])):
        user.cluster = name
        line = user.up(*words, code=2, nodes="1").stderr.splitlines()[-1]
        assert f"holds the jobs and checkpoints of cluster '{first}' of " in line and "gpuctl attach" in line
    assert _objects(bucket) == before
    # An older gpuctl left no word of whose they are; the bucket has its tags.
    bucket.delete([layout.PAST])
    user.env["GPUCTL_STATE_DIR"] = str(user.folder / "state")  # where the test looks for the cluster's machines
    user.up(nodes="1")
    line = user.run("down", "-y", "--delete-checkpoints", first, code=1).stderr.splitlines()[-1]
    assert "the checkpoints were not deleted" in line and f"gpuctl buckets rm {_name(line)}" in line
    assert bucket.get(_WEIGHTS) == b"weights"


def it_comes_back_after_a_colleague_has_removed_it(user: User) -> None:
    """By its tags: the state of whoever made it still lists everything."""
    user.boot_machines()
    user.up(nodes="1")
    url, first = user.known().bucket, user.env
    user.env = user.env | {"GPUCTL_STATE_DIR": str(user.folder / "kim"), "LOGNAME": "kim"}
    user.run_alone("attach", url)
    user.run("down", "-y")

    user.env = first
    code, shown = user.at_a_terminal("up", typed="n\n")
    assert code == 1 and "Nothing of the cluster is left" in shown and "Create it again? [y/N]" in shown
    user.up(nodes="1")
    assert len(user.machines()) == 1 and user.run("status").stdout.count(" live ") == 1
    user.run("down", "-y")
    assert user.run("leaks", "--provider", user.up_flags[1]).stdout == ""


def a_stale_note_makes_nothing_beside_a_namesake(user: User) -> None:
    """The second one has taken the cluster down, and made another of its name."""
    user.boot_machines()
    user.up(nodes="1")
    url, first = user.known().bucket, user.env
    user.env = user.env | {"GPUCTL_STATE_DIR": str(user.folder / "kim"), "LOGNAME": "kim"}
    user.run_alone("attach", url)
    user.run("down", "-y")
    user.run_alone("attach", url)
    user.up(nodes="1")
    machines, second = user.machines(), user.env

    user.env, made = first, user.obstacles.done()
    line = user.up(code=2, nodes="2").stderr.splitlines()[-1]
    assert f"another cluster {user.cluster} exists in " in line and ", made by kim" in line
    assert user.obstacles.done() == made and user.machines() == machines
    user.env = second
    user.run("down", "-y")


def _name(line: str) -> str:
    return line.partition("made the bucket ")[2].partition(";")[0]


def _objects(bucket: Bucket) -> dict[str, bytes | None]:
    return {entry.key: bucket.get(entry.key) for entry in bucket.list("")}
