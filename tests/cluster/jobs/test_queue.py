"""Getting in line, and the end of a job."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.errors import BadInput, StoreUnavailable
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.jobs import CancelRequest, JobSpec
from gpuctl.cluster.records.rounds import JobOutcome, Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

CLUSTER = ClusterSpec(name="default", provider="local", nodes_min=2, nodes_max=4)


def request(script: str = "digits.py", **fields: object) -> queue.JobRequest:
    return queue.JobRequest(script=script, **fields)  # type: ignore[arg-type]


def line_of(bucket: Bucket) -> list[str | None]:
    return [version.value for version in ledgers.queue(bucket).history()]


def spec_of(bucket: Bucket, job: str) -> JobSpec:
    data = bucket.get(layout.job_spec(job))
    assert data is not None
    return decode(data, JobSpec, job)


def test_jobs_are_numbered_as_they_come(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    assert queue.newest(bucket) is None
    first = queue.submit(bucket, CLUSTER, request(args=("--lr", "0.1"), env=(("A", "1"),), code="ab12"))
    second = queue.submit(bucket, CLUSTER, request("src/Char_LM.py"))
    assert (first.job, first.number, second.job, second.number) == ("digits-1", 1, "char-lm-2", 2)
    assert line_of(bucket) == ["digits-1", "char-lm-2"]
    assert queue.newest(bucket) == "char-lm-2"
    assert spec_of(bucket, "digits-1") == first
    assert (first.args, first.env, first.code) == (("--lr", "0.1"), {"A": "1"}, "ab12")


def test_many_who_submit_at_once_each_get_a_number_and_keep_their_spec(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    together = threading.Barrier(8)

    def submit(index: int) -> JobSpec:
        together.wait(timeout=30)
        return queue.submit(bucket, CLUSTER, request(args=(str(index),)))

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(submit, range(8)))
    assert sorted(spec.number for spec in made) == list(range(1, 9))
    assert line_of(bucket) == [spec.job for spec in sorted(made, key=lambda spec: spec.number)]
    for spec in made:
        assert spec_of(bucket, spec.job) == spec
    there = [entry.key for entry in bucket.list(layout.JOBS)]
    assert there == sorted(layout.job_spec(spec.job) for spec in made), "losers leave nothing behind"


def test_a_submitter_that_died_before_its_turn_holds_up_nobody(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    leftover = encode(JobSpec(job="digits-1", number=1, script="other.py"))
    bucket.put(layout.job_spec("digits-1"), leftover)
    made = queue.submit(bucket, CLUSTER, request())
    assert (made.job, made.number) == ("digits-1b", 1)
    assert bucket.get(layout.job_spec("digits-1")) == leftover
    assert queue.submit(bucket, CLUSTER, request()).job == "digits-2"


@dataclass
class Spy(Bucket):
    """Notes the order of writes; loses the answer to the put of a key that ``lost`` names, once."""

    inner: Bucket
    deaf: bool = False
    """Nothing can be read just after."""
    written: list[str] = field(default_factory=list)
    lost: str = ""
    refuse: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.inner.raw, self.inner.url)

    def create(self, key: str, data: bytes) -> bool:
        if self.refuse and key.startswith(self.refuse):
            raise StoreUnavailable("no answer")
        won = super().create(key, data)
        self.written.append(key)
        if self.lost and key.startswith(self.lost):
            self.lost = ""
            self.deaf = True
            raise StoreUnavailable("no answer")
        return won

    def get(self, key: str) -> bytes | None:
        if self.deaf:
            self.deaf = False
            raise StoreUnavailable("no answer")
        return super().get(key)


def test_the_spec_is_written_before_the_line_names_it(file_url: str) -> None:
    spy = Spy(open_bucket(file_url))
    queue.submit(spy, CLUSTER, request())
    assert spy.written == [layout.job_spec("digits-1"), f"{layout.QUEUE}/000000000001"]


def test_a_lost_answer_of_the_line_puts_nobody_in_it_twice(file_url: str) -> None:
    spy = Spy(open_bucket(file_url), lost=layout.QUEUE)
    assert queue.submit(spy, CLUSTER, request()).job == "digits-1"
    assert line_of(spy) == ["digits-1"]


def test_a_line_that_does_not_answer_is_told_and_the_spec_stays(file_url: str) -> None:
    """The put may still land: a job in line without a spec would be worse than a spec without a job."""
    spy = Spy(open_bucket(file_url), refuse=layout.QUEUE)
    with pytest.raises(StoreUnavailable):
        queue.submit(spy, CLUSTER, request())
    assert spy.get(layout.job_spec("digits-1")) is not None


def test_a_job_gets_the_clusters_nodes_or_fewer_of_them(file_url: str) -> None:
    bucket = open_bucket(file_url)
    assert queue.check_nodes(CLUSTER, None) == (2, 4)
    made = queue.submit(bucket, CLUSTER, request(nodes=(1, 3)))
    assert (made.nodes_min, made.nodes_max) == (1, 3)
    with pytest.raises(BadInput, match="needs 5 nodes, but cluster default has at most 4"):
        queue.submit(bucket, CLUSTER, request(nodes=(2, 5)))
    assert line_of(bucket) == ["digits-1"]


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("digits.py", "digits"),
        ("src/Train_GPT.v2.py", "train-gpt-v2"),
        ("ünï.py", "n"),
        ("__main__.py", "main"),
        ("...py", "job"),
        ("x" * 90 + ".py", "x" * 40),
    ],
)
def test_a_script_gives_its_job_a_name_that_is_safe_in_a_key(script: str, name: str) -> None:
    assert queue.stem(script) == name


def test_a_job_is_found_by_id_or_as_the_newest(file_url: str) -> None:
    bucket = open_bucket(file_url)
    with pytest.raises(BadInput, match="no job has been started"):
        queue.find(bucket, None)
    for _ in range(3):
        queue.submit(bucket, CLUSTER, request())
    assert queue.find(bucket, None).job == "digits-3"
    assert queue.find(bucket, "digits-1").number == 1
    with pytest.raises(BadInput, match="unknown job 'digits-9'; the last ones: digits-1, digits-2, digits-3"):
        queue.find(bucket, "digits-9")
    for odd in ("../cluster", "Digits-1", "", "a/b"):
        with pytest.raises(BadInput, match="unknown job"):
            queue.find(bucket, odd)


def test_the_outcome_is_that_of_the_newest_round(file_url: str) -> None:
    bucket = open_bucket(file_url)
    ledger = ledgers.rounds(bucket, "digits-1")
    assert queue.outcome(bucket, "digits-1") is None
    ledger.commit(Round(job="digits-1", number=1, phase="run", epoch=1), 0)
    assert queue.outcome(bucket, "digits-1") is None
    bad = JobOutcome(result="failed", exit_code=3, message="rank 2 on node-1 exited with code 3")
    ledger.commit(Round(job="digits-1", number=1, phase="ended", epoch=1, outcome=bad), 1)
    assert queue.outcome(bucket, "digits-1") == bad
    error = queue.JobFailed("digits-1", bad)
    assert error.exit_code == 3
    assert error.message == "job digits-1 failed: rank 2 on node-1 exited with code 3"


def test_a_job_can_be_ended_without_rank_0_and_only_once(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    ledger = ledgers.rounds(bucket, "digits-1")
    ledger.commit(Round(job="digits-1", number=4, phase="run", epoch=2), 0)
    assert queue.end_as_cancelled(bucket, "digits-1", "the cluster was taken down")
    ended = ledger.read()
    assert ended.number == 2
    assert ended.value is not None
    assert (ended.value.number, ended.value.phase) == (4, "ended")
    assert ended.value.outcome == JobOutcome(result="cancelled", exit_code=130, message="the cluster was taken down")
    assert not queue.end_as_cancelled(bucket, "digits-1", "again")
    assert ledger.read().number == 2


def test_a_job_that_never_ran_can_be_ended_too(file_url: str) -> None:
    bucket = open_bucket(file_url)
    assert queue.end_as_cancelled(bucket, "digits-1", "down")
    assert queue.outcome(bucket, "digits-1") is not None


def test_asking_to_cancel_leaves_a_mark_for_rank_0(file_url: str) -> None:
    bucket = open_bucket(file_url)
    queue.ask_to_cancel(bucket, "digits-1")
    queue.ask_to_cancel(bucket, "digits-1")
    assert queue.cancel_request(bucket, "digits-1") == CancelRequest(now=False)


def test_asking_to_cancel_now_tells_so_also_after_a_patient_word(file_url: str) -> None:
    bucket = open_bucket(file_url)
    assert queue.cancel_request(bucket, "digits-1") is None
    queue.ask_to_cancel(bucket, "digits-1")
    queue.ask_to_cancel(bucket, "digits-1", now=True)
    queue.ask_to_cancel(bucket, "digits-1")
    assert queue.cancel_request(bucket, "digits-1") == CancelRequest(now=True)


def test_a_word_of_an_older_version_cancels_with_patience(file_url: str) -> None:
    bucket = open_bucket(file_url)
    bucket.put(layout.cancel("digits-1"), b"{}")
    assert queue.cancel_request(bucket, "digits-1") == CancelRequest()


def test_where_there_is_no_cluster_it_says_so(file_url: str) -> None:
    with pytest.raises(BadInput, match="no cluster in this bucket; create one with `gpuctl up`"):
        queue.cluster_spec(open_bucket(file_url))
