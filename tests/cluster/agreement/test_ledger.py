"""The ledger: one winner for each version, whatever happens between the writers and the store."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuctl.cluster.agreement.ledger import Ledger, Version
from gpuctl.cluster.errors import CorruptRecord, StoreError, StoreUnavailable
from gpuctl.cluster.records.nodes import Rank0
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.interface import Entry, Store
from tests.cluster import contender
from tests.cluster.contender import Claims, contend, ledger_at
from tests.fakes.faults import FaultyStore, Proxy
from tests.marks import slow_but_on_a_folder


def _ledger(store: Store, keep: int | None = 64) -> Ledger[str]:
    return Ledger(store, "ledger", str, keep=keep)


def _grow(ledger: Ledger[str], to: int) -> None:
    for number in range(ledger.read().number, to):
        assert ledger.commit(f"v{number + 1}", number)


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[Proxy]:
    with Proxy(s3_endpoint).running() as proxy:
        yield proxy


@pytest.fixture
def spoiled(proxy: Proxy, s3_url: str, s3_endpoint: str) -> Bucket:
    """On S3, behind ``proxy``, with little patience."""
    return open_bucket(s3_url.replace(s3_endpoint, proxy.url), patience_s=0.5, timeout_s=0.5)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(open_bucket("memory://"))


# -- a document with versions -----------------------------------------------------------------------------------------


def test_an_empty_ledger_is_version_0(bucket_url: str) -> None:
    ledger = _ledger(open_bucket(bucket_url))
    assert ledger.read() == Version(None, 0)
    assert ledger.newer(0) is None
    assert ledger.history() == []


def test_versions_follow_one_another(bucket_url: str) -> None:
    ledger = _ledger(open_bucket(bucket_url))
    assert ledger.commit("one", 0)
    assert ledger.commit("two", 1)
    assert ledger.read() == Version("two", 2)
    assert ledger.newer(0) == Version("two", 2)
    assert ledger.newer(1) == Version("two", 2)
    assert ledger.newer(2) is None
    assert ledger.history() == [Version("one", 1), Version("two", 2)]
    assert ledger.since(1) == [Version("two", 2)]


def test_a_version_is_written_once(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    first, second = _ledger(bucket), _ledger(bucket)
    assert first.commit("mine", 0)
    assert not second.commit("yours", 0)
    assert second.read() == Version("mine", 1)


def test_an_update_is_made_anew_of_what_others_committed_meanwhile(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    ledger, other = _ledger(bucket), _ledger(bucket)
    seen = []

    def change(value: str | None) -> str:
        seen.append(value)
        if len(seen) == 1:
            assert other.commit("theirs", 0)
        return f"{value} and mine"

    assert ledger.update(change, "busy") == ("theirs", "theirs and mine")
    assert seen == [None, "theirs"]
    assert ledger.read() == Version("theirs and mine", 2)


def test_an_update_that_changes_nothing_commits_nothing(store: FaultyStore) -> None:
    _grow(_ledger(store), 1)
    assert _ledger(store).update(lambda _: None, "busy") == ("v1", None)
    assert _ledger(store).read() == Version("v1", 1)


def test_an_update_that_always_comes_second_gives_up(store: FaultyStore) -> None:
    ledger, other = _ledger(store), _ledger(store)

    def change(_: str | None) -> str:
        _grow(other, other.read().number + 1)
        return "mine"

    with pytest.raises(StoreUnavailable, match="job j kept changing"):
        ledger.update(change, "job j kept changing")
    assert "mine" not in [version.value for version in other.history()]


def test_records_come_back_as_they_were(bucket_url: str) -> None:
    ledger = Ledger(open_bucket(bucket_url), "rank0", Rank0)
    value = Rank0(node="n0", incarnation="i", address="127.0.0.1", port=1)
    assert ledger.commit(value, 0)
    assert ledger.read() == Version(value, 1)


def test_neighbours_and_foreign_files_are_not_versions(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    _grow(_ledger(bucket), 1)
    for key in ("ledger2/000000000009", "ledger/5", "ledger/²", "ledger/notes.txt", "ledger/deep/000000000009"):
        bucket.put(key, b"x")
    assert _ledger(bucket).read() == Version("v1", 1)


# -- pruning ----------------------------------------------------------------------------------------------------------


def test_keep_versions_stay_and_the_older_ones_go(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    ledger = _ledger(bucket, keep=3)
    _grow(ledger, 10)
    assert [e.key[-2:] for e in bucket.list("ledger")] == ["08", "09", "10"]
    assert ledger.history() == [Version("v8", 8), Version("v9", 9), Version("v10", 10)]
    assert ledger.since(9) == [Version("v10", 10)]


def test_without_a_limit_all_stay(store: FaultyStore) -> None:
    _grow(_ledger(store, keep=None), 100)
    assert len(_ledger(store, keep=None).history()) == 100
    assert "delete" not in store.calls


def test_a_sweep_takes_what_an_interrupted_pruning_left(store: FaultyStore) -> None:
    store.trouble("delete", "lost", "lost", "lost", "lost", "lost")
    _grow(_ledger(store, keep=3), 8)
    assert len(store.inner.list("ledger")) > 3
    _grow(_ledger(store, keep=3), 9)
    assert len(store.inner.list("ledger")) == 3


@pytest.mark.parametrize("keep", [1, 0, -1])
def test_a_ledger_that_keeps_nothing_is_refused(store: FaultyStore, keep: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        _ledger(store, keep=keep)


def test_a_pruning_that_fails_does_not_spoil_the_win(store: FaultyStore) -> None:
    ledger = _ledger(store, keep=2)
    _grow(ledger, 2)
    store.trouble("delete", "lost", "unheard")
    assert ledger.commit("three", 2)
    assert ledger.commit("four", 3)
    store.trouble("list", "none", "none", "lost")  # the look for a higher one, twice, and then the sweep's
    assert ledger.commit("five", 4)
    assert ledger.commit("six", 5)


def test_a_bucket_that_forbids_deletion_still_decides(proxy: Proxy, spoiled: Bucket) -> None:
    refused = proxy.plan("refuse", "POST", "delete", times=99, status=403, code="AccessDenied")
    _grow(_ledger(spoiled, keep=2), 5)
    assert refused.met.is_set()
    assert _ledger(spoiled, keep=2).history() == [Version("v4", 4), Version("v5", 5)]


# -- a sleeper --------------------------------------------------------------------------------------------------------


def test_a_sleeper_loses_when_its_next_version_was_written(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    sleeper = _ledger(bucket)
    asleep = sleeper.read()
    _grow(_ledger(bucket), 3)
    assert not sleeper.commit("late", asleep.number)
    assert sleeper.read() == Version("v3", 3)


@pytest.mark.parametrize("asleep_at", [0, 1, 4, 5])
def test_a_sleeper_loses_when_its_next_version_was_written_and_pruned(bucket_url: str, asleep_at: int) -> None:
    bucket = open_bucket(bucket_url)
    _grow(_ledger(bucket, keep=3), 9)
    assert bucket.get(f"ledger/{asleep_at + 1:012d}") is None
    sleeper = _ledger(bucket, keep=3)
    assert not sleeper.commit("late", asleep_at)
    assert sleeper.read() == Version("v9", 9)
    assert [v.value for v in sleeper.history()] == ["v7", "v8", "v9"]
    assert len(bucket.list("ledger")) == 3, "it left its version behind"


def test_a_sleeper_loses_however_the_others_prune(store: FaultyStore) -> None:
    _grow(_ledger(store, keep=2), 5)
    assert not _ledger(store, keep=64).commit("late", 1)


@pytest.mark.parametrize("trouble", ["unheard", "retried"])
def test_a_sleeper_loses_also_when_its_answer_got_lost(store: FaultyStore, trouble: str) -> None:
    _grow(_ledger(store, keep=2), 5)
    store.trouble("create", trouble)  # type: ignore[arg-type]
    assert not _ledger(store, keep=2).commit("late", 1)


def test_what_a_dead_sleeper_left_is_seen_by_nobody(store: FaultyStore) -> None:
    _grow(_ledger(store, keep=3), 9)
    store.trouble("list", "lost")  # it dies between its put and its look
    with pytest.raises(StoreUnavailable):
        _ledger(store, keep=3).commit("late", 4)
    assert store.inner.get("ledger/000000000005")
    reader = _ledger(store, keep=3)
    assert reader.read() == Version("v9", 9)
    assert reader.newer(4) == Version("v9", 9)
    assert [v.number for v in reader.history()] == [7, 8, 9]


def test_a_watcher_that_slept_past_a_pruning_learns_by_reading(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    _grow(_ledger(bucket, keep=3), 9)
    watcher = _ledger(bucket, keep=3)
    assert watcher.newer(2) is None
    assert watcher.newer(6) == Version("v9", 9)
    assert watcher.read() == Version("v9", 9)


def test_a_version_that_was_built_upon_at_once_is_no_win_and_still_stands(store: FaultyStore) -> None:
    """The one case where False is not "it is not there": a caller reads before it does anything over, or undoes it."""

    class Overtaken(FaultyStore):
        def create(self, key: str, data: bytes) -> bool:
            created = super().create(key, data)
            assert _ledger(self.inner).commit("built upon it", 1)
            return created

    assert not _ledger(Overtaken(store.inner)).commit("mine", 0)
    assert [v.value for v in _ledger(store).history()] == ["mine", "built upon it"]


# -- listings that are no snapshots -----------------------------------------------------------------------------------


class _Holed(FaultyStore):
    """Its listing lacks a version, as that of a local folder does when it is written while the listing is under way."""

    lacks = ""

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        return [e for e in super().list(prefix, after) if not self.lacks or not e.key.endswith(self.lacks)]


@pytest.mark.parametrize("keep", [None, 64])
def test_nothing_is_passed_over_when_a_listing_has_a_hole(keep: int | None) -> None:
    store = _Holed(open_bucket("memory://"))
    ledger = _ledger(store, keep=keep)
    _grow(ledger, 5)
    store.lacks = "04"
    assert [v.number for v in ledger.since(0)] == [1, 2, 3]
    assert [v.number for v in ledger.since(2)] == [3]
    store.lacks = ""
    assert [v.number for v in ledger.since(3)] == [4, 5]


def test_a_queues_next_entry_is_waited_for() -> None:
    store = _Holed(open_bucket("memory://"))
    queue = _ledger(store, keep=None)
    _grow(queue, 2)
    store.lacks = "01"
    assert queue.since(0) == []


# -- lost answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["unheard", "retried"])
def test_a_put_that_landed_is_a_win_whatever_the_answer(store: FaultyStore, trouble: str) -> None:
    store.trouble("create", trouble)  # type: ignore[arg-type]
    assert _ledger(store).commit("mine", 0)


def test_a_put_that_never_landed_is_an_open_question(store: FaultyStore) -> None:
    store.trouble("create", "lost")
    ledger = _ledger(store)
    with pytest.raises(StoreUnavailable, match="create never arrived"):
        ledger.commit("mine", 0)
    assert ledger.read() == Version(None, 0)
    assert ledger.commit("mine", 0)


def test_a_put_that_never_landed_is_a_defeat_if_another_did(store: FaultyStore) -> None:
    _grow(_ledger(store), 1)
    store.trouble("create", "lost")
    assert not _ledger(store).commit("mine", 0)


@pytest.mark.parametrize("verb", ["get", "list"])
def test_a_commit_that_cannot_be_settled_is_an_open_question(store: FaultyStore, verb: str) -> None:
    store.trouble("create", "unheard")
    store.trouble(verb, "lost")
    with pytest.raises(StoreUnavailable):
        _ledger(store).commit("mine", 0)
    assert _ledger(store).read() == Version("mine", 1)


def test_a_put_that_lands_between_two_looks_is_not_called_a_defeat(store: FaultyStore) -> None:
    """It is an open question or a win: whoever is told "lost" believes that another has decided."""

    class Late(FaultyStore):
        late: tuple[str, bytes] | None = None

        def create(self, key: str, data: bytes) -> bool:
            self.late = key, data
            raise StoreUnavailable("timed out")

        def get(self, key: str) -> bytes | None:
            found = super().get(key)
            if self.late:
                self.inner.create(*self.late)
            return found

    with pytest.raises(StoreUnavailable):
        _ledger(Late(store.inner)).commit("mine", 0)


def test_a_put_that_times_out_after_it_landed_is_a_win(proxy: Proxy, spoiled: Bucket) -> None:
    fault = proxy.plan("land-hold", "PUT")
    assert _ledger(spoiled).commit("mine", 0)
    assert fault.met.is_set()


def test_a_put_that_times_out_and_never_lands_is_an_open_question(proxy: Proxy, spoiled: Bucket) -> None:
    proxy.plan("hold", "PUT", times=99)
    with pytest.raises(StoreUnavailable):
        _ledger(spoiled).commit("mine", 0)
    assert _ledger(spoiled).read() == Version(None, 0)


def test_a_put_that_lands_long_after_its_time_decides_nothing_twice(proxy: Proxy, spoiled: Bucket) -> None:
    fault = proxy.plan("hold", "PUT")
    with pytest.raises(StoreUnavailable):
        _ledger(spoiled).commit("first try", 0)
    assert _ledger(spoiled).commit("second try", 0)
    fault.gate.set()
    assert fault.over.wait(10)
    assert _ledger(spoiled).history() == [Version("second try", 1)]


@pytest.mark.parametrize("spoil", ["land-refuse", "land-reset", "refuse"])
def test_an_answer_of_s3_that_got_lost_is_settled(proxy: Proxy, spoiled: Bucket, spoil: str) -> None:
    proxy.plan(spoil, "PUT")  # type: ignore[arg-type]
    assert _ledger(spoiled).commit("mine", 0)
    assert _ledger(spoiled).read() == Version("mine", 1)


def test_a_lost_answer_does_not_make_a_winner_of_the_loser(proxy: Proxy, spoiled: Bucket) -> None:
    _grow(_ledger(spoiled), 1)
    for spoil in ("land-refuse", "land-reset", "land-hold"):
        proxy.plan(spoil, "PUT")
        assert not _ledger(spoiled).commit("mine", 0)
        proxy.heal()


def test_a_conflict_is_tried_again(proxy: Proxy, spoiled: Bucket) -> None:
    proxy.plan("refuse", "PUT", times=2, status=409, code="ConditionalRequestConflict")
    assert _ledger(spoiled).commit("mine", 0)


def test_a_refused_put_says_so(proxy: Proxy, spoiled: Bucket) -> None:
    proxy.plan("refuse", "PUT", times=99, status=403, code="AccessDenied")
    with pytest.raises(StoreError, match="AccessDenied"):
        _ledger(spoiled).commit("mine", 0)


def test_a_read_too_slow_for_its_version_finds_the_newest(proxy: Proxy, s3_url: str, s3_endpoint: str) -> None:
    bucket = open_bucket(s3_url)
    _grow(_ledger(bucket, keep=3), 2)
    slow = proxy.plan("hold", "GET", where="ledger/000000000002")
    reader = _ledger(open_bucket(s3_url.replace(s3_endpoint, proxy.url)), keep=3)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reader.read)
        assert slow.met.wait(10)
        _grow(_ledger(bucket, keep=3), 7)
        slow.gate.set()
        assert found.result(10) == Version("v7", 7)


# -- many writers -----------------------------------------------------------------------------------------------------


def _in_threads(url: str, writers: int, attempts: int, keep: int | None) -> list[Claims]:
    with ThreadPoolExecutor(writers) as pool:
        return list(pool.map(lambda me: contend(url, f"t{me}", attempts, keep), range(writers)))


def _in_processes(url: str, writers: int, attempts: int, keep: int | None) -> list[Claims]:
    command = [sys.executable, contender.__file__ or "", url]
    processes = [
        subprocess.Popen(
            [*command, f"p{me}", str(attempts), str(keep)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for me in range(writers)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
        return [{int(version): value for version, value in claims.items()} for claims in told]
    finally:
        for process in processes:
            process.kill()
            process.wait()


Race = Callable[[str, int, int, int | None], list[Claims]]
"""URL, writers, attempts of each, versions kept → what each writer claims."""

_RACES = [(_in_threads, 8, 10), (_in_processes, 4, 15)]


def _check(claims: list[Claims], url: str, keep: int | None) -> dict[int, str]:
    """At most one claim a version, each true to what is there; returns who claims what."""
    claimed: dict[int, str] = {}
    for one in claims:
        for version, value in one.items():
            assert version not in claimed, f"{claimed[version]} and {value['is']} both won version {version}"
            claimed[version] = value["is"]
    standing = ledger_at(url, keep).history()
    assert standing
    for found in standing:
        assert found.value is not None
        assert claimed.get(found.number, found.value["is"]) == found.value["is"]
    for before, after in itertools.pairwise(standing):
        assert before.value is not None
        assert after.value is not None
        assert after.value["after"] == before.value["is"], "a version was not built on the one before"
    return claimed


@slow_but_on_a_folder
@pytest.mark.parametrize(("race", "writers", "attempts"), _RACES, ids=["threads", "processes"])
def test_every_version_has_exactly_one_winner(bucket_url: str, race: Race, writers: int, attempts: int) -> None:
    claimed = _check(race(bucket_url, writers, attempts, None), bucket_url, None)
    versions = {v.number: v.value["is"] for v in ledger_at(bucket_url, None).history() if v.value}
    assert claimed == versions, "with all versions kept, every one has a writer that knows it"
    assert len(versions) >= attempts


@slow_but_on_a_folder
@pytest.mark.parametrize(("race", "writers", "attempts"), _RACES, ids=["threads", "processes"])
def test_no_version_has_two_winners_while_old_ones_are_pruned(
    bucket_url: str, race: Race, writers: int, attempts: int
) -> None:
    claimed = _check(race(bucket_url, writers, attempts, 6), bucket_url, 6)
    assert len(claimed) > 6


@pytest.mark.slow
def test_no_version_has_two_winners_while_s3_stumbles(proxy: Proxy, s3_url: str, s3_endpoint: str) -> None:
    url = s3_url.replace(s3_endpoint, proxy.url)
    spoils = itertools.cycle(("land-refuse", "land-reset", "refuse", "reset"))
    for version, spoil in zip(range(1, 13), spoils, strict=False):
        key = f"race/{version:012d}"
        proxy.plan(spoil, "PUT", key)  # type: ignore[arg-type]
        proxy.plan("refuse", "PUT", key, status=409, code="ConditionalRequestConflict")
        proxy.plan("land-cut", "GET", key)
    proxy.plan("land-hold", "PUT", f"race/{13:012d}")
    proxy.plan("hold", "PUT", f"race/{14:012d}")
    claimed = _check(_in_processes(url, 3, 20, None), s3_url, None)
    assert len(claimed) >= 15


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "is not a LedgerEntry: Input data was truncated"),
        (b"\xff", "is not a LedgerEntry"),
        (b'{"value":{}}', "is not a LedgerEntry: Object missing required field `mark`"),
        (b'{"mark":"m","value":{"node":"n"}}', "is not a Rank0: Object missing required field `incarnation`"),
        (
            b'{"mark":"m","value":{"node":"n","incarnation":"i","address":"a","port":"p"}}',
            r"is not a Rank0: Expected `int`, got `str` - at `\$.port`",
        ),
    ],
)
def test_a_damaged_version_is_named(data: bytes, word: str) -> None:
    bucket = open_bucket("memory://")
    bucket.put("rank0/000000000007", data)
    with pytest.raises(CorruptRecord, match=f"rank0/000000000007 {word}"):
        Ledger(bucket, "rank0", Rank0).read()


def test_a_put_that_meets_damage_is_not_a_crash(store: FaultyStore) -> None:
    store.put("ledger/000000000001", b"not JSON")
    with pytest.raises(CorruptRecord, match="ledger/000000000001"):
        _ledger(store).commit("mine", 0)
