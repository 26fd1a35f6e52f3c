"""A kill at every point of a restore and a save: of one rank, of the other, of both, and of the store's server.

The points are enumerated by a run that nothing befalls, and then each one is tried. After each, whoever comes next
finds the newest committed step, whole and as it was, and saves the next; and nobody who reads meanwhile is ever shown a
checkpoint that is not whole.
"""

from __future__ import annotations

import itertools
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from gpuctl import Checkpointer
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.fakes.faults import Fault, Proxy, Spoil
from tests.fakes.stores import gcs
from tests.fakes.stores.serving import Restarted
from tests.trainers.checkpoint_checks import copied, goes_on, read_meanwhile, torn
from tests.trainers.rank_scripts import named_steps
from tests.trainers.rank_scripts.named_steps import Who, anonymous, at_step
from tests.trainers.ranks import Ranks, run

_LAUNCHER_LOOKS_EVERY_S = 0.1
_MOST_STEPS = 30


@pytest.fixture(scope="module")
def first_step(tmp_path_factory: pytest.TempPathFactory) -> Bucket:
    """A bucket in which two ranks have saved step 1."""
    url = (tmp_path_factory.mktemp("faults") / "first").as_uri()
    run(2, named_steps.save_steps, url, [1])
    return open_bucket(url)


# -- ranks ------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    rank: int
    point: str
    who: Who


@pytest.mark.slow
def test_killed_at_any_point_ranks_leave_the_newest_step_whole(first_step: Bucket, tmp_path: Path) -> None:
    """Of two ranks each one and both, at each of its points; and the other one, once both have begun to save."""
    calm = copied(first_step, (tmp_path / "calm").as_uri())
    points = run(2, named_steps.go_on, [calm, calm])
    assert {name.split()[1] for of_rank in points for name in of_rank} >= {*named_steps.VERBS, *named_steps.MEETINGS}
    whos: tuple[Who, ...] = ("itself", "all")
    cases = [Case(rank, name, who) for rank, names in enumerate(points) for name in names for who in whos]
    cases += [Case(rank, name, "others") for rank, names in enumerate(points) for name in names[_saving(names) :]]

    def tried(numbered: tuple[int, Case]) -> Case:
        number, case = numbered
        place, mark = tmp_path / f"{number}", tmp_path / f"{number}.met"
        url, struck = copied(first_step, place.as_uri()), 1 - case.rank if case.who == "others" else case.rank
        with read_meanwhile(url), Ranks(2, named_steps.go_on, [url, url], *case, str(mark)) as ranks:
            ended = ranks.wait(first=struck, notices_after_s=_LAUNCHER_LOOKS_EVERY_S)
        assert mark.read_text() == case.point
        # Another rank may have ended by itself by then.
        assert ended[struck].code in (-signal.SIGKILL, *([0] if case.who == "others" else [])), (case, ended)
        goes_on(url, steps_after(points[case.rank], case), case)
        shutil.rmtree(place)
        return case

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(tried, enumerate(cases))) == cases


def steps_after(points: Sequence[str], case: Case) -> set[int]:
    """Which step may be the newest when ``case`` is over. Rank 0 commits once it has the report of rank 1."""
    at = points.index(case.point)
    if case.rank == 0:
        committed_at = _last(points, "after create ledger/")
        either = at > _saving(points) and case.who == "others"
    else:
        committed_at = _last(points, "after StoreGather.outcome")
        either = at > _last(points, "before StoreGather.exchange")
    return {2} if at >= committed_at else {1, 2} if either else {1}


def _saving(points: Sequence[str]) -> int:
    """Where the ranks meet to save."""
    return _last(points, "before all_gather")


def _last(points: Sequence[str], kind: str) -> int:
    return max(number for number, name in enumerate(points) if name.startswith(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["az", "gs"])
def test_killed_before_and_after_they_write_ranks_leave_the_newest_step_whole(
    first_step: Bucket, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """Of all points on a folder and all requests to S3, these on the other stores too."""
    base, _, options = str(request.getfixturevalue(f"{kind}_url")).partition("?")
    cases = [
        (1, "before put 2-r2.*-0/00001-0000 #1", {1}),
        (0, "before put 2-r2.*-0/manifest.json #1", {1}),
        (0, "before create ledger/000000000004 #1", {1}),
        (0, "after create ledger/000000000004 #1", {2}),
        (0, "after delete 1-r1.*-0/00000-0000 #1", {2}),
    ]
    for number, (rank, point, steps) in enumerate(cases):
        url, mark = copied(first_step, f"{base}/{number}?{options}"), tmp_path / f"{number}"
        with read_meanwhile(url), Ranks(2, named_steps.go_on, [url, url], rank, point, "all", str(mark)) as ranks:
            ranks.wait(first=rank)
        assert mark.read_text() == point
        goes_on(url, steps, point)


# -- requests ---------------------------------------------------------------------------------------------------------

ENDS: tuple[Spoil, ...] = ("reset", "land-reset")
"""Before a request arrives, and once it has landed but is not answered."""


def named(method: str, path: str) -> str:
    """A request, without what differs from bucket to bucket and from run to run."""
    there, query = urlsplit(path)[2:4]
    _, key = re.split(r"bucket-\w+", unquote(there))
    options = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items() if name != "sig"}
    told = [method, key, *(f"{name}={value}" for name, value in options.items())]
    return anonymous(re.sub(r"/?prefix/(case-\d+/)?", "", " ".join(filter(None, told))))


class Striking(Proxy):
    """Numbers requests by name, as points are. The one named ``fatal`` meets ``spoil`` and ``strike``."""

    def __init__(self, upstream: str, fatal: str, spoil: Spoil, strike: Callable[[], object]) -> None:
        super().__init__(upstream)
        self.numbered: list[str] = []
        self._fatal = fatal
        self._fault = Fault(spoil, "", strike=strike)

    def take(self, method: str, path: str) -> Fault | None:
        name = named(method, path)
        with self._lock:
            number = 1 + sum(known.rpartition(" #")[0] == name for known in self.numbered)
            self.numbered.append(f"{name} #{number}")
        return self._fault if f"{name} #{number}" == self._fatal else None


class Sent(NamedTuple):
    """A rank's request, and what becomes of it when the rank is killed."""

    rank: int
    name: str
    spoil: Spoil


@pytest.mark.slow
def test_killed_with_a_request_on_its_way_a_rank_leaves_the_newest_step_whole(
    first_step: Bucket, s3_endpoint: str, s3_url: str
) -> None:
    """At each request to S3 before it arrives, at each part in its middle, and at each write once it has landed but is
    not answered."""
    base, _, options = s3_url.partition("?")

    def tried(number: int, sent: Sent) -> list[list[str]]:
        """The requests of both ranks. Each has a proxy of its own, so that it is known who asks."""
        url = copied(first_step, f"{base}/case-{number}?{options}")
        ranks: Ranks | None = None

        def strike() -> None:
            assert ranks is not None
            ranks.send(sent.rank, signal.SIGKILL)

        with ExitStack() as stack:
            fatal = [sent.name if rank == sent.rank else "" for rank in range(2)]
            proxies = [Striking(s3_endpoint, name, sent.spoil, strike) for name in fatal]
            urls = [url.replace(s3_endpoint, stack.enter_context(proxy.running()).url) for proxy in proxies]
            stack.enter_context(read_meanwhile(url, every_s=0.2))
            ranks = stack.enter_context(Ranks(2, named_steps.go_on, urls))
            ended = ranks.wait(first=sent.rank, notices_after_s=_LAUNCHER_LOOKS_EVERY_S)
        assert ended[sent.rank].code == (-signal.SIGKILL if sent.name else 0), (sent, ended)
        return [proxy.numbered for proxy in proxies]

    def checked(number: int, sent: Sent) -> Sent:
        assert sent.name in tried(number, sent)[sent.rank]
        at, commit = requests[sent.rank].index(sent.name), _last(requests[0], "PUT ledger/")
        landed = sent.rank == 0 and (at > commit or (at == commit and sent.spoil == "land-reset"))
        goes_on(f"{base}/case-{number}?{options}", {2} if landed else {1}, sent)
        return sent

    requests = tried(0, Sent(0, "", "reset"))
    assert {name.split()[0] for names in requests for name in names} == {"GET", "PUT", "POST"}
    sent = [(rank, name) for rank, names in enumerate(requests) for name in names]
    parts = [(rank, name) for rank, name in sent if re.match(r"PUT 2-.*-\d+ #", name)]
    assert len(parts) == 3
    cases = [Sent(*each, "reset") for each in sent]
    cases += [Sent(rank, name, "land-reset") for rank, name in sent if not name.startswith("GET")]
    cases += [Sent(*each, "break") for each in parts]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(checked, range(1, len(cases) + 1), cases)) == cases


# -- the store's server -----------------------------------------------------------------------------------------------


class Relentless(Proxy):
    """Each write meets ``strike`` twice, before it arrives and once it has landed, and is answered when it is tried for
    the third time. Of reads only the first of a kind does; of writes too, when it is ``once`` for them. A read is also
    cut off in the middle of its answer."""

    def __init__(self, upstream: str, strike: Callable[[], object]) -> None:
        super().__init__(upstream, in_turn=True)
        self.struck: set[tuple[str, Spoil]] = set()
        self.once = False
        self._tries: Counter[str] = Counter()
        self._strike = strike

    def take(self, method: str, path: str) -> Fault | None:
        name = named(method, path)
        spoils = (*ends_of(name), None)
        spoil = spoils[self._tries[name] % len(spoils)]
        self._tries[name] += 1
        known = (kind(name), spoil) in self.struck and (self.once or method == "GET")
        if spoil is None or known:
            return None
        self.struck.add((kind(name), spoil))
        return Fault(spoil, "", strike=self._strike if spoil in ENDS else lambda: None)


def ends_of(name: str) -> tuple[Spoil, ...]:
    return (*ENDS, "land-cut") if name.startswith("GET") else ENDS


def kind(name: str) -> str:
    """Of requests that do the same for one step or another."""
    return re.sub(r"\d+-r\d+\.\*-\d+|\d{12}", "*", name)


@pytest.mark.slow
def test_killed_at_every_request_the_stores_server_only_delays(first_step: Bucket, tmp_path: Path) -> None:
    """Google's, as ours speaks it: it writes down what it answers, and is back at once."""
    copies = itertools.count()

    def strike(url: str) -> None:
        server.restart()
        store = open_bucket(url)
        assert not torn(store)
        goes_on(copied(store, (tmp_path / f"{next(copies)}").as_uri()), {*range(1, _MOST_STEPS)}, "it is back")

    with Restarted(lambda port: gcs.serving(tmp_path / "journal", port)) as server:
        gcs.create(server.endpoint, "bucket-1")
        tried_at_every_request(first_step, gcs.url(server.endpoint, "bucket-1"), server.endpoint, strike)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "az"])
def test_away_at_every_request_a_store_only_delays(
    first_step: Bucket, request: pytest.FixtureRequest, store: str
) -> None:
    """What these servers answer they have in memory, Azurite for some seconds even when it has a disk. So they live on,
    and only their connections break."""
    endpoint = request.getfixturevalue({"s3": "s3_endpoint", "az": "azurite_endpoint"}[store])
    tried_at_every_request(first_step, request.getfixturevalue(f"{store}_url"), endpoint, lambda _: None)


def tried_at_every_request(first_step: Bucket, url: str, endpoint: str, strike: Callable[[str], object]) -> None:
    base, _, options = url.partition("?")
    calm = Striking(endpoint, "", "reset", lambda: None)
    with calm.running():
        behind = through(copied(first_step, f"{base}/case-0?{options}"), endpoint, calm)
        run(2, named_steps.go_on, [behind, behind])
    expected = {(kind(name.rpartition(" #")[0]), spoil) for name in calm.numbered for spoil in ends_of(name)}
    place = copied(first_step, f"{base}/case-1?{options}")
    proxy = Relentless(endpoint, lambda: strike(place))
    with proxy.running(), read_meanwhile(place):
        behind = through(place, endpoint, proxy)
        run(2, named_steps.go_on, [behind, behind])
        # What could not be deleted then is deleted after a later save.
        proxy.once = True
        checkpointer, state = Checkpointer(store=open_bucket(behind), keep=1), at_step(0)
        step = checkpointer.restore(state) or 0
        assert (step, named_steps.is_at(2, state)) == (2, True)
        while not proxy.struck >= expected:
            step += 1
            assert step < _MOST_STEPS, expected - proxy.struck
            checkpointer.save(step, at_step(step))
            checkpointer.wait()
    assert step > 2
    goes_on(place, {step}, "at last")


def through(url: str, endpoint: str, proxy: Proxy) -> str:
    return url.replace(endpoint, proxy.url + urlsplit(endpoint).path)
