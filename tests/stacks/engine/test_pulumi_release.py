"""Downloads, from a server on loopback that breaks off, forgets, lies and knows less than others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.engine import pulumi_release
from gpuctl.stacks.engine.pulumi_install import CLI
from gpuctl.stacks.engine.pulumi_release import DownloadFailed, download
from tests.fakes.pulumi.releases import AWS, CLI_ARCHIVE, CLI_SUMS, PLUGIN_ARCHIVE, PLUGIN_SUMS, Releases, serving

PART = f"{CLI_ARCHIVE.rpartition('/')[2]}.part"


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Iterator[Releases]:
    with serving() as server:
        server.publish_cli()
        server.publish_plugin()
        monkeypatch.setenv("GPUCTL_PULUMI_RELEASES", server.url)
        yield server


class Shown:
    """What a person would have seen."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int | None]] = []
        self.counts: list[int] = []

    @contextmanager
    def __call__(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        self.begun.append((what, total))
        yield self.counts.append


def fetch(folder: Path, shown: Shown | None = None, pauses: list[float] | None = None) -> bytes:
    pause = (list[float]() if pauses is None else pauses).append
    whole = download(pulumi_release.cli(CLI), folder, shown or Shown(), pause)
    assert [path.name for path in folder.iterdir()] == [whole.name]
    return whole.read_bytes()


def test_an_archive_comes_with_its_bytes_counted(releases: Releases, tmp_path: Path) -> None:
    shown = Shown()
    data = releases.files[CLI_ARCHIVE]
    assert fetch(tmp_path, shown) == data
    assert shown.begun == [(f"downloading Pulumi {CLI}", len(data))]
    assert shown.counts == sorted(shown.counts) and len(shown.counts) > 2 and shown.counts[-1] == len(data)
    assert pulumi_release.cli(CLI).size() == len(data)


def test_a_lost_connection_is_taken_up_where_it_was(releases: Releases, tmp_path: Path) -> None:
    releases.cut[CLI_ARCHIVE] = [700_000, 100]
    shown, pauses = Shown(), list[float]()
    assert fetch(tmp_path, shown, pauses) == releases.files[CLI_ARCHIVE]
    assert releases.fetched(CLI_ARCHIVE) == ["", "bytes=700000-", "bytes=700100-"]
    assert (len(shown.begun), pauses) == (1, [1.0, 2.0])
    assert shown.counts == sorted(shown.counts)


def test_what_an_earlier_attempt_has_left_is_continued(releases: Releases, tmp_path: Path) -> None:
    data = releases.files[CLI_ARCHIVE]
    (tmp_path / PART).write_bytes(data[:1_000_000])
    shown = Shown()
    assert fetch(tmp_path, shown) == data
    assert releases.fetched(CLI_ARCHIVE) == ["bytes=1000000-"]
    assert (shown.begun[0][1], shown.counts[0]) == (len(data), 1_000_000)


def test_what_had_come_whole_is_not_fetched_again(releases: Releases, tmp_path: Path) -> None:
    data = releases.files[CLI_ARCHIVE]
    (tmp_path / PART).write_bytes(data)
    assert fetch(tmp_path) == data
    assert releases.fetched(CLI_ARCHIVE) == [f"bytes={len(data)}-"]


@pytest.mark.parametrize("size", [1_000, 9_000_000])
def test_a_part_of_another_archive_is_thrown_away(releases: Releases, tmp_path: Path, size: int) -> None:
    (tmp_path / PART).write_bytes(bytes(size))
    assert fetch(tmp_path) == releases.files[CLI_ARCHIVE]
    assert releases.fetched(CLI_ARCHIVE)[-1] == ""


def test_a_server_without_ranges_sends_all_of_it(releases: Releases, tmp_path: Path) -> None:
    releases.knows_ranges = False
    releases.cut[CLI_ARCHIVE] = [700_000]
    assert fetch(tmp_path) == releases.files[CLI_ARCHIVE]


def test_a_server_may_not_tell_how_much_it_is(releases: Releases, tmp_path: Path) -> None:
    releases.tells_length = False
    shown = Shown()
    assert fetch(tmp_path, shown) == releases.files[CLI_ARCHIVE]
    assert shown.begun[0][1] is None and pulumi_release.cli(CLI).size() is None


def test_what_does_not_match_its_checksum_is_not_kept(releases: Releases, tmp_path: Path) -> None:
    releases.files[CLI_ARCHIVE] = releases.files[CLI_ARCHIVE][:-1] + b"x"
    with pytest.raises(DownloadFailed, match=r"does not match its checksum in .*-checksums\.txt; "):
        fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_checksum_is_refused_before_it_comes(releases: Releases, tmp_path: Path) -> None:
    releases.files[CLI_SUMS] = b"<html>Log in to the guests' network</html>\n"
    with pytest.raises(DownloadFailed, match="has no checksum of pulumi-v"):
        fetch(tmp_path)
    del releases.files[CLI_SUMS]
    with pytest.raises(DownloadFailed, match=r"checksums of Pulumi .* are not at http.* \(403\); a mirror"):
        fetch(tmp_path)
    assert releases.fetched(CLI_ARCHIVE) == []


def test_a_release_that_is_not_there_is_one_line(releases: Releases, tmp_path: Path) -> None:
    del releases.files[CLI_ARCHIVE]
    with pytest.raises(
        DownloadFailed, match=r"^Pulumi \S+ is not at http\S+ \(403\); a mirror of https://get.pulumi.com"
    ):
        fetch(tmp_path)
    with pytest.raises(DownloadFailed, match="is not at"):
        pulumi_release.cli(CLI).size()


def test_a_server_that_is_ill_is_asked_five_times(releases: Releases, tmp_path: Path) -> None:
    releases.status[CLI_ARCHIVE] = 503
    pauses = list[float]()
    with pytest.raises(DownloadFailed, match="it answered 503; repeat it"):
        fetch(tmp_path, pauses=pauses)
    assert pauses == [1.0, 2.0, 4.0, 8.0]


def test_without_a_network_it_gives_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as gone:
        monkeypatch.setenv("GPUCTL_PULUMI_RELEASES", gone.url)
    pauses = list[float]()
    with pytest.raises(
        DownloadFailed, match=r"could not be downloaded: http\S+ does not respond \(.*refused\); a mirror"
    ):
        fetch(tmp_path, pauses=pauses)
    with pytest.raises(DownloadFailed, match="does not respond"):
        pulumi_release.cli(CLI).size()
    assert pauses == []


def test_a_connection_that_stays_away_keeps_what_came(releases: Releases, tmp_path: Path) -> None:
    releases.cut[CLI_ARCHIVE] = [500_000, 0, 0, 0, 0]
    with pytest.raises(DownloadFailed, match=r"closed after 500000 of .* repeat it to go on"):
        fetch(tmp_path)
    assert (tmp_path / PART).stat().st_size == 500_000
    assert fetch(tmp_path) == releases.files[CLI_ARCHIVE]


def test_a_plug_in_is_held_against_its_sha1_if_there_is_one(releases: Releases, tmp_path: Path) -> None:
    release = pulumi_release.plugin("aws", AWS.version)
    whole = download(release, tmp_path, Shown())
    assert whole.read_bytes() == releases.files[PLUGIN_ARCHIVE]
    good, releases.files[PLUGIN_ARCHIVE] = releases.files[PLUGIN_ARCHIVE], b"damaged"
    with pytest.raises(DownloadFailed, match="does not match its checksum"):
        download(release, tmp_path, Shown())
    del releases.files[PLUGIN_SUMS]
    releases.files[PLUGIN_ARCHIVE] = good
    assert download(release, tmp_path, Shown()).read_bytes() == good


@pytest.mark.parametrize("url", ["get.pulumi.com", "s3://mirror/pulumi"])
def test_a_mirror_that_is_no_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_PULUMI_RELEASES", url)
    with pytest.raises(BadInput, match=r"is not a URL; it replaces https://get.pulumi.com/releases"):
        pulumi_release.cli(CLI)
