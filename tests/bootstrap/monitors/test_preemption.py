"""The cloud's notice reaches the agent, whatever becomes of the metadata service in between."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpuctl.bootstrap.boot.metadata import Metadata
from gpuctl.bootstrap.monitors.preemption import PreemptionWatcher
from tests.fakes.metadata import PROVIDERS, Provider, Service, event_id

NOTICE = {"aws": "aws: terminate", "gcp": "gcp: preempted", "azure": "azure: Preempt"}


class Heard:
    """What a watcher has told."""

    def __init__(self) -> None:
        self.notices: queue.Queue[tuple[float, str]] = queue.Queue()
        self.risks: queue.Queue[str] = queue.Queue()
        self.said: queue.Queue[str] = queue.Queue()

    def notice(self) -> tuple[float, str]:
        return self.notices.get(timeout=20)


@contextmanager
def _watching(service: Service, metadata: Metadata | None = None) -> Iterator[tuple[PreemptionWatcher, Heard]]:
    heard = Heard()
    watcher = PreemptionWatcher(
        metadata or Metadata(service.provider, endpoint=service.url),
        lambda lead_s, source: heard.notices.put((lead_s, source)),
        heard.risks.put,
        heard.said.put,
        every_s=0.02,
        long_poll_s=60,
    )
    watcher.start()
    try:
        yield watcher, heard
    finally:
        watcher.stop()


@pytest.fixture(params=PROVIDERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    provider: Provider = request.param
    with Service(provider).running() as service:
        yield service


def _polls(service: Service) -> int:
    """Questions about notices so far."""
    return sum("spot/instance-action" in q or "preempted" in q or "scheduledevents" in q for q in service.seen)


def _await_the_end_of_watching() -> None:
    deadline = time.monotonic() + 20
    while any(thread.name == "notices" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "it asks on"
        time.sleep(0.01)


def test_a_notice_is_told_once_with_the_time_that_is_left(service: Service) -> None:
    with _watching(service) as (_, heard):
        service.await_(lambda: _polls(service) >= 2)
        assert heard.notices.empty()
        service.take(lead_s=100)
        lead_s, source = heard.notice()
        _await_the_end_of_watching()
    assert source == NOTICE[service.provider]
    assert lead_s == pytest.approx(30 if service.provider == "gcp" else 100, abs=2.5), "Google promises 30 s"
    assert heard.notices.empty() and heard.said.qsize() == (service.provider == "azure")


def test_a_notice_that_came_before_the_watcher_did_is_heard(service: Service) -> None:
    service.take(lead_s=50)
    with _watching(service) as (_, heard):
        assert heard.notice()[1] == NOTICE[service.provider]


@pytest.mark.parametrize("skew_s", [-86400.0, 3600.0])
@pytest.mark.parametrize("provider", ["aws", "azure"])
def test_what_is_left_is_reckoned_by_the_clouds_clock(provider: Provider, skew_s: float) -> None:
    with Service(provider).running() as service:
        service.skew_s = skew_s
        service.take(lead_s=60)
        with _watching(service) as (_, heard):
            assert heard.notice()[0] == pytest.approx(60, abs=2.5)


@pytest.mark.parametrize(("lead_s", "told_s"), [(-30.0, 5.0), (1e6, 120.0)])
def test_a_time_that_cannot_be_is_not_believed(lead_s: float, told_s: float) -> None:
    with Service("aws").running() as service:
        service.take(lead_s=lead_s)
        with _watching(service) as (_, heard):
            assert heard.notice()[0] == told_s


@pytest.mark.parametrize("trouble", ["away", "garbage", "empty"])
def test_a_service_that_is_away_or_mad_is_asked_until_it_answers(service: Service, trouble: str) -> None:
    with _watching(service) as (_, heard):
        service.await_(lambda: _polls(service) >= 1)
        if trouble == "away":
            service.be_down()
        else:
            service.garble("<html>" if trouble == "garbage" else "{}")
        assert "trying again" in heard.said.get(timeout=20)
        service.take(lead_s=90)
        asked = len(service.seen)
        service.await_(lambda: len(service.seen) >= asked + 5)
        assert heard.notices.empty()
        service.be_down(False)
        service.garble(None)
        assert heard.notice()[1] == NOTICE[service.provider]
    assert heard.said.qsize() <= 2, "the same trouble is said once"


def test_google_names_no_time_so_what_it_was_asked_for_counts() -> None:
    with Service("gcp").running() as service:
        service.take()
        heard = Heard()
        watcher = PreemptionWatcher(
            Metadata("gcp", endpoint=service.url),
            lambda lead_s, source: heard.notices.put((lead_s, source)),
            heard.risks.put,
            heard.said.put,
            promised_s=120,
        )
        watcher.start()
        assert heard.notice()[0] == 120
        watcher.stop()


def test_a_session_that_has_ended_is_no_trouble() -> None:
    with Service("aws").running() as service, _watching(service) as (_, heard):
        service.await_(lambda: _polls(service) >= 1)
        service.expire_sessions()
        service.take(lead_s=90)
        assert heard.notice()[0] == pytest.approx(90, abs=2.5)
    assert heard.said.empty() and service.seen.count("PUT /latest/api/token") == 2


def test_a_recommendation_is_shown_and_taken_back_and_is_no_notice() -> None:
    with Service("aws").running() as service, _watching(service) as (_, heard):
        service.recommend()
        assert heard.risks.get(timeout=20).startswith("at risk since 20")
        service.withdraw()
        assert heard.risks.get(timeout=20) == ""
        assert heard.notices.empty()
        service.take()
        assert heard.notice()[1] == "aws: terminate"


def test_what_happens_to_another_machine_of_the_set_is_not_for_this_one() -> None:
    with Service("azure").running() as service:
        service.add(id="demo_7", address="127.0.0.1")
        service.add(id="demo_8", address="127.0.0.9")
        with _watching(service) as (_, heard):
            service.take(id="demo_8")
            asked = _polls(service)
            service.await_(lambda: _polls(service) >= asked + 3)
            assert heard.notices.empty()
            service.take(id="demo_7")
            assert heard.notice()[1] == "azure: Preempt"


def test_azure_hears_that_it_may_take_the_machine_only_once_the_node_has_left() -> None:
    with Service("azure").running() as service, _watching(service) as (watcher, heard):
        service.take(lead_s=30)
        heard.notice()
        assert service.acknowledged == []
        watcher.stop()
        assert service.acknowledged == [event_id(service.machine)]


def test_an_event_that_takes_other_machines_too_is_not_acknowledged() -> None:
    """They would all be taken at once, and some of them are still saving."""
    with Service("azure").running() as service, _watching(service) as (watcher, heard):
        service.machine.taken_with = ("demo_8", "demo_9")
        service.take(lead_s=30)
        assert heard.notice()[1] == "azure: Preempt"
        watcher.stop()
        assert service.acknowledged == []


def test_an_acknowledgement_that_does_not_arrive_is_said() -> None:
    with Service("azure").running() as service, _watching(service) as (watcher, heard):
        service.take(lead_s=30)
        heard.notice()
        service.be_down()
        watcher.stop()
        assert "could not be acknowledged" in heard.said.get(timeout=5)


@pytest.mark.timing
def test_azures_first_answer_may_take_its_time() -> None:
    with Service("azure", warming_s=3.0).running() as service:
        service.take(lead_s=60)
        with _watching(service) as (_, heard):
            assert heard.notice()[1] == "azure: Preempt"
        assert heard.said.qsize() <= 1 and _polls(service) == 2, "one question, which waited, and the acknowledgement"


def test_google_is_asked_with_a_long_poll_and_answers_at_once() -> None:
    with Service("gcp").running() as service, _watching(service) as (_, heard):
        service.await_(lambda: any("wait_for_change=true" in asked for asked in service.seen))
        service.take()
        heard.notice()
        assert _polls(service) == 2


class _Between(Metadata):
    """``happens`` after each answer, when nobody is asking."""

    def __init__(self, service: Service, happens: Callable[[], object]) -> None:
        super().__init__("gcp", endpoint=service.url)
        self._happens = happens
        self.asked: list[tuple[float, float]] = []
        """When each question began and ended, in monotonic seconds."""

    def need(self, path: str, timeout_s: float = 0.0) -> str:
        began = time.monotonic()
        told = super().need(path, timeout_s)
        self.asked.append((began, time.monotonic()))
        self._happens()
        return told


def test_what_google_says_while_nobody_asks_is_heard_by_the_next_question_at_once() -> None:
    """Which else would be answered after a minute."""
    with Service("gcp").running() as service, _watching(service, _Between(service, service.take)) as (_, heard):
        assert heard.notice()[1] == "gcp: preempted"
        assert _polls(service) == 2


@pytest.mark.timing
def test_a_long_poll_that_ends_is_followed_by_the_next_without_a_pause() -> None:
    with Service("gcp").running() as service:
        metadata, heard = _Between(service, lambda: None), Heard()
        watcher = PreemptionWatcher(
            metadata,
            lambda lead_s, source: heard.notices.put((lead_s, source)),
            heard.risks.put,
            heard.said.put,
            every_s=1.5,
            long_poll_s=1.6,
        )
        watcher.start()
        service.await_(lambda: _polls(service) >= 3)
        service.take()
        heard.notice()
        watcher.stop()
    (_, _), (began, ended), (again, _) = metadata.asked
    assert ended - began > 1.5 and again - ended < 1
