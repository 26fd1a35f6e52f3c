"""Stores that stumble while a checkpoint is on its way: away, slow, cut off, garbling, not taking our keys any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuctl import Checkpointer
from gpuctl.cluster.checkpoints.manifest import read_manifest
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket
from tests.fakes.faults import Fault, Proxy
from tests.fakes.stores.identity import Identity
from tests.trainers.checkpoint_checks import committed, goes_on, torn
from tests.trainers.rank_scripts import named_steps
from tests.trainers.rank_scripts.named_steps import at_step, is_at
from tests.trainers.ranks import Ranks, run

_METHODS = ("GET", "PUT", "POST", "DELETE")
_PATIENCE_S = 0.3


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[Proxy]:
    with Proxy(s3_endpoint).running() as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: Proxy, s3_url: str, s3_endpoint: str) -> str:
    """A bucket on S3, seen through ``proxy``."""
    return s3_url.replace(s3_endpoint, proxy.url)


def everything(proxy: Proxy, spoil: Any, **details: Any) -> None:
    for method in _METHODS:
        proxy.plan(spoil, method, times=1 << 30, **details)


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, at_step(step))
    checkpointer.wait()


def restored(url: str) -> tuple[int | None, dict[str, Any]]:
    state = at_step(0)
    return Checkpointer(store=open_bucket(url)).restore(state), state


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- away -------------------------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize(
    ("patience_s", "away_s"), [(60.0, 20.0), (_PATIENCE_S, 3.0)], ids=["20 s", "ten times a client's patience"]
)
def test_a_store_that_answers_503_for_a_while_makes_a_save_late_and_nothing_else(
    proxy: Proxy, behind: str, s3_url: str, patience_s: float, away_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = Checkpointer(store=open_bucket(behind, patience_s=patience_s), keep=None)
    save(checkpointer, 1)
    everything(proxy, "refuse", status=503, code="SlowDown")
    began, before = time.monotonic(), len(proxy.seen)
    checkpointer.save(2, at_step(2))
    wait_until(lambda: len(proxy.seen) > before)
    checkpointer.save(3, at_step(3))
    assert time.monotonic() - began < min(2.0, away_s), "the training goes on, and two saves are on their way"
    with pytest.raises(TimeoutError):
        checkpointer.wait(away_s - (time.monotonic() - began))
    assert [entry.step for entry in committed(open_bucket(s3_url))] == [1]
    assert not checkpointer.should_stop(4)
    proxy.heal()
    checkpointer.wait(15)
    assert [entry.step for entry in committed(open_bucket(s3_url))] == [1, 2, 3]
    assert not torn(open_bucket(s3_url))
    step, state = restored(s3_url)
    assert step == 3
    assert is_at(3, state)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (0 if patience_s > away_s else 1), "one line for an outage that is longer than one's patience"
    assert all(line.startswith("gpuctl: the checkpoint of step 2 has to wait: the bucket s3://") for line in said)
    assert all("did not answer" in line and "SlowDown" in line for line in said)


@pytest.mark.slow
def test_a_restore_waits_for_a_store_that_answers_503(proxy: Proxy, behind: str) -> None:
    save(Checkpointer(store=open_bucket(behind)), 1)
    everything(proxy, "refuse", status=503, code="SlowDown")
    healer = threading.Timer(3.0, proxy.heal)
    healer.start()
    began = time.monotonic()
    assert restored(behind)[0] == 1
    assert time.monotonic() - began > 2.5
    healer.join()


# -- slow, and cut ----------------------------------------------------------------------------------------------------


def large(step: int) -> dict[str, Any]:
    """36 MiB: three parts of tensors and one of values."""
    return {"weights": torch.arange(step, step + (9 << 20), dtype=torch.int32), "step": step}


def parts_of(url: str) -> list[str]:
    """The names of the parts of the newest checkpoint, as they stand in a request."""
    store = open_bucket(url)
    entry = committed(store)[-1]
    return [part.key.removeprefix(entry.path) for part in read_manifest(store, entry).parts]


@pytest.mark.slow
def test_a_connection_lost_in_every_part_costs_a_second_try_of_each(proxy: Proxy, behind: str, s3_url: str) -> None:
    checkpointer = Checkpointer(store=open_bucket(behind), keep=None)
    checkpointer.save(1, large(1))
    checkpointer.wait()
    names = parts_of(s3_url)
    assert len(names) == 4
    broken = [proxy.plan("break", "PUT", f"/2-.*{name}") for name in names]
    checkpointer.save(2, large(2))
    checkpointer.wait()
    assert all(fault.met.is_set() for fault in broken)
    cut = [proxy.plan("land-cut", "GET", f"/2-.*{name}") for name in names]
    state = large(0)
    assert Checkpointer(store=open_bucket(behind)).restore(state) == 2
    assert all(fault.met.is_set() for fault in cut)
    assert torch.equal(state["weights"], large(2)["weights"])
    assert state["step"] == 2


@pytest.mark.timing
def test_a_slow_store_holds_up_no_step(proxy: Proxy, behind: str, s3_url: str) -> None:
    checkpointer = Checkpointer(store=open_bucket(behind))
    save(checkpointer, 1)
    slow = threading.Event()
    slow.set()
    everything(proxy, "hold", gate=slow, strike=lambda: time.sleep(0.3))
    began = time.monotonic()
    checkpointer.save(2, at_step(2))
    blocked_s = time.monotonic() - began
    checkpointer.wait()
    took_s = time.monotonic() - began
    assert took_s > 4 * 0.3, "parts, manifest, commit, answer"
    assert blocked_s < 0.3
    step, state = restored(behind)
    assert (step, is_at(2, state)) == (2, True)
    assert [entry.step for entry in committed(open_bucket(s3_url))] == [1, 2]


# -- garbled ----------------------------------------------------------------------------------------------------------

BAD = {"status": 400, "code": "BadDigest", "message": "The Content-MD5 you specified did not match what we received."}


def test_a_part_whose_checksum_is_rejected_once_is_sent_again(
    proxy: Proxy, behind: str, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rejected = [proxy.plan("refuse", "PUT", where, **BAD) for where in ("00000-0000", "00000-0001", "manifest")]
    save(Checkpointer(store=open_bucket(behind)), 1)
    assert all(fault.met.is_set() for fault in rejected)
    step, state = restored(s3_url)
    assert (step, is_at(1, state)) == (1, True)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_part_whose_checksum_is_always_rejected_fails_the_save_by_its_name_and_earlier_ones_stay(
    proxy: Proxy, behind: str, s3_url: str
) -> None:
    """Told on both ranks, and with the next step the training ends: what it makes cannot be kept."""
    run(2, named_steps.save_steps, behind, [1])
    proxy.plan("refuse", "PUT", "/2-.*/00001-0000", times=1 << 30, **BAD)
    with Ranks(2, named_steps.save_steps, behind, [2]) as ranks:
        ended = ranks.wait()
    for end in ended:
        assert isinstance(end.error, GpuctlError)
        told = str(end.error)
        assert told.startswith("the checkpoint of step 2 was not written: rank 1: the bucket s3://")
        assert "rejects '2-r2." in told and "/00001-0000' each time" in told and "BadDigest, The Content-MD5" in told
        assert "\n" not in told
    assert not torn(open_bucket(s3_url))
    goes_on(s3_url, {1}, "earlier ones stay")


# -- credentials that expire ------------------------------------------------------------------------------------------


def hold_a_part(front: Proxy) -> Fault:
    """The next part of step 2 of rank 1 waits before S3."""
    return front.plan("hold", "PUT", "/2-.*/00001-0000")


@pytest.mark.slow
def test_keys_of_the_machine_that_expire_in_mid_save_are_renewed_and_no_part_is_lost(
    s3_endpoint: str, s3_url: str, tmp_path: Path
) -> None:
    with Identity().running() as identity, Proxy(s3_endpoint, admits=identity.admits).running() as front:
        url = f"{s3_url.partition('?')[0]}?endpoint={front.url}&region=us-east-1"
        env = identity.env("ec2", tmp_path)
        run(2, named_steps.save_steps, url, [1], env=env)
        held, keys = hold_a_part(front), len(identity.given)
        with Ranks(2, named_steps.save_steps, url, [2], env=env) as ranks:
            assert held.met.wait(60)
            identity.expire()
            held.gate.set()
            ended = ranks.wait()
        assert [(end.code, end.said) for end in ended] == [(0, "")] * 2
        assert len(identity.given) == keys + 2 * 2, "each rank asked at its begin, and once more"
        assert sum("PUT" in request and "/00001-0000" in request for request in front.seen) == 2 + 1
    goes_on(s3_url, {2}, "renewed")


@pytest.mark.timing
@pytest.mark.parametrize("renewed", [True, False])
def test_keys_that_nobody_renews_hold_a_save_up_for_a_while_with_one_line_that_says_so(
    proxy: Proxy, behind: str, s3_url: str, renewed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Renewed: the account that had them takes them again. If it never does, the training ends, and says why."""
    checkpointer = Checkpointer(store=open_bucket(behind, patience_s=_PATIENCE_S))
    save(checkpointer, 1)
    proxy.admits = lambda _: False
    before = len(proxy.seen)
    checkpointer.save(2, at_step(2))
    wait_until(lambda: len(proxy.seen) > before + 8)
    why = f"the credentials for the bucket {s3_url.partition('?')[0]} have expired"
    if renewed:
        proxy.admits = lambda _: True
        checkpointer.wait(30)
    else:
        with pytest.raises(GpuctlError, match=f"step 2 was not written: {why}, and 2 s brought no new ones: Expired"):
            checkpointer.wait(30)
        with pytest.raises(GpuctlError, match=why):
            checkpointer.should_stop(3)
        proxy.admits = lambda _: True
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gpuctl: the checkpoint of step 2 has to wait: {why}: ExpiredToken, The provided token has")
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and start this again" in line
    step, state = restored(s3_url)
    assert step == (2 if renewed else 1)
    assert is_at(step, state)
