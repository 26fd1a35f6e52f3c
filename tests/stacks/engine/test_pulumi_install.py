"""Pulumi's CLI and plug-ins: real downloads from a server on loopback, installed by the real code."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from pulumi.automation import PulumiCommand

from gpuctl.stacks.clouds.extras import NotInstalled
from gpuctl.stacks.engine import pulumi_install
from gpuctl.stacks.engine.errors import FailureKind, StackFailed
from gpuctl.stacks.engine.pulumi_install import (
    CLI,
    checks,
    cli_folder,
    ensure_cli,
    ensure_plugin,
    find_plugin,
    found_cli,
)
from gpuctl.stacks.engine.pulumi_release import Release
from tests.fakes.pulumi.releases import (
    AWS,
    CLI_ARCHIVE,
    PLUGIN_ARCHIVE,
    PLUGIN_SUMS,
    PROGRAM,
    Releases,
    archive,
    serving,
)
from tests.paths import ROOT
from tests.waiting import PATIENCE_S, until

EVERYDAY_PATH = "/usr/bin:/bin"


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Releases]:
    """Of a user who has nothing of Pulumi yet."""
    with serving() as server:
        server.publish_cli()
        server.publish_plugin()
        for name, value in {
            "GPUCTL_PULUMI_RELEASES": server.url,
            "GPUCTL_STATE_DIR": str(tmp_path / "state"),
            "PULUMI_HOME": str(tmp_path / "home"),
            "PATH": EVERYDAY_PATH,
        }.items():
            monkeypatch.setenv(name, value)
        yield server


class Shown:
    """What a person would have seen."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.waits = threading.Event()

    @contextmanager
    def __call__(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        del total
        self.begun.append(what)
        if what.startswith("waiting"):
            self.waits.set()
        yield lambda _: None


def yes(release: Release, missing: StackFailed) -> bool:
    del release, missing
    return True


def install(shown: Shown | None = None) -> PulumiCommand:
    return ensure_cli(yes, shown or Shown())


def refused(shown: Shown | None = None) -> StackFailed:
    with pytest.raises(StackFailed) as caught:
        install(shown)
    return caught.value


def kept() -> set[str]:
    """What there is in gpuctl's own folder, but for locks."""
    return {path.name for path in cli_folder().iterdir() if not path.name.endswith(".lock")}


def own_cli(version: str) -> None:
    (cli_folder() / "bin").mkdir(parents=True)
    (cli_folder() / "bin" / "pulumi").write_text(PROGRAM.replace("VERSION", version))
    (cli_folder() / "bin" / "pulumi").chmod(0o755)


# -- the CLI ----------------------------------------------------------------------------------------------------------


def test_what_is_installed_is_the_release_of_the_pinned_sdk() -> None:
    assert f"\npulumi=={CLI}\n" in (ROOT / "constraints.txt").read_text()


def test_a_cli_that_is_missing_is_installed_once(releases: Releases) -> None:
    asked: list[tuple[str, FailureKind]] = []

    def agree(release: Release, missing: StackFailed) -> bool:
        asked.append((release.what, missing.kind))
        return True

    shown = Shown()
    command = ensure_cli(agree, shown)
    assert command.command == str(cli_folder() / "bin" / "pulumi") and str(command.version) == CLI
    assert asked == [(f"Pulumi {CLI}", FailureKind.NO_CLI)] and shown.begun == [f"downloading Pulumi {CLI}"]
    assert kept() == {"bin"} and cli_folder().stat().st_mode & 0o777 == 0o700
    assert (cli_folder() / "bin" / "pulumi-language-python").is_file()
    releases.asked.clear()
    assert ensure_cli(agree, shown).command == command.command
    assert releases.asked == [] and len(asked) == 1


@pytest.mark.usefixtures("releases")
def test_a_cli_that_is_too_old_is_replaced() -> None:
    own_cli("3.100.0")
    (cli_folder() / "bin" / "old").touch()
    assert str(install().version) == CLI == str(found_cli().version)
    assert kept() == {"bin"} and not (cli_folder() / "bin" / "old").exists()


def test_an_old_cli_on_path_is_left_alone(releases: Releases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that does not run does not hide gpuctl's own."""
    program = tmp_path / "pulumi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{EVERYDAY_PATH}")
    for text in (PROGRAM.replace("VERSION", "3.100.0"), "#!/bin/sh\nexit 3\n"):
        program.write_text(text)
        program.chmod(0o755)
        assert install().command == str(cli_folder() / "bin" / "pulumi")
        assert program.read_text() == text
    assert len(releases.fetched(CLI_ARCHIVE)) == 1


def test_who_says_no_gets_nothing(releases: Releases) -> None:
    with pytest.raises(StackFailed, match="not installed; install") as caught:
        ensure_cli(lambda *_: False, Shown())
    assert caught.value.kind == FailureKind.NO_CLI and releases.asked == [] and not cli_folder().exists()


@pytest.mark.usefixtures("releases")
def test_without_a_network_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as gone:
        monkeypatch.setenv("GPUCTL_PULUMI_RELEASES", gone.url)
    failed = refused()
    assert failed.kind == FailureKind.NO_CLI and "does not respond" in failed.message and "\n" not in str(failed)
    assert "GPUCTL_PULUMI_RELEASES" in failed.hint and kept() == set()


@pytest.mark.parametrize("why", ["does not run", "is no archive", "holds no CLI"])
def test_what_does_not_run_here_is_never_taken_for_a_cli(releases: Releases, why: str) -> None:
    """Though its checksum is right. What was there stays."""
    own_cli("3.100.0")
    releases.files[CLI_ARCHIVE] = {
        "does not run": archive({"pulumi/pulumi": b"#!/bin/sh\nexit 3\n"}),
        "is no archive": archive({"pulumi/pulumi": os.urandom(90_000)})[:50_000],
        "holds no CLI": archive({"README": b"moved"}),
    }[why]
    releases.list_cli()
    failed = refused()
    assert failed.kind == FailureKind.OLD_CLI and "\n" not in str(failed)
    assert kept() == {"bin"} and _own_version() == "v3.100.0"


@pytest.mark.usefixtures("releases")
def test_a_full_disk_is_one_line() -> None:
    """A limit on a file's size stands for it: the same call fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))
    try:
        failed = refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.message.startswith(f"Pulumi {CLI} could not be installed in {cli_folder()}: File too large")
    assert all(name.endswith(".part") for name in kept())
    assert str(install().version) == CLI and kept() == {"bin"}


def test_an_installation_that_was_killed_is_no_cli_and_is_continued(releases: Releases) -> None:
    releases.hold_after = 1_200_000
    killed = subprocess.Popen(
        [sys.executable, "-c", "from tests.stacks.engine.test_pulumi_install import install; install()"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert releases.held.wait(PATIENCE_S)
    part = cli_folder() / f"{CLI_ARCHIVE.rpartition('/')[2]}.part"
    until(lambda: part.exists() and part.stat().st_size > 0, "a part of the archive")
    killed.send_signal(signal.SIGKILL)
    killed.wait(PATIENCE_S)
    with pytest.raises(StackFailed, match="not installed"):
        found_cli()
    releases.hold_after = -1
    (cli_folder() / ".unpacked-dead").mkdir()
    assert str(install().version) == CLI and kept() == {"bin"}
    assert re.fullmatch(r"bytes=[1-9]\d*-", releases.fetched(CLI_ARCHIVE)[-1])


def test_two_at_once_install_it_once(releases: Releases) -> None:
    releases.hold_after = 500_000
    second = Shown()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(install)
        assert releases.held.wait(PATIENCE_S)
        other = pool.submit(install, second)
        assert second.waits.wait(PATIENCE_S)
        releases.go.set()
        assert one.result(PATIENCE_S).command == other.result(PATIENCE_S).command
    assert second.begun == [f"waiting for another gpuctl that installs Pulumi {CLI}"]
    assert len(releases.fetched(CLI_ARCHIVE)) == 1 and kept() == {"bin"}


# -- plug-ins ---------------------------------------------------------------------------------------------------------


def plugin_folder() -> Path:
    return Path(os.environ["PULUMI_HOME"]) / "plugins" / f"resource-aws-v{AWS.version}"


def fetch_plugin(shown: Shown | None = None) -> None:
    ensure_plugin(found_cli(), "aws", shown or Shown())


@pytest.fixture
def with_cli(releases: Releases) -> Releases:
    own_cli(CLI)
    return releases


def test_a_plug_in_is_fetched_once_by_its_packages_version(with_cli: Releases) -> None:
    shown = Shown()
    fetch_plugin(shown)
    assert shown.begun == [f"downloading plug-in aws {AWS.version}"]
    assert (plugin_folder() / "pulumi-resource-aws").is_file() and kept() == {"bin"}
    with_cli.asked.clear()
    fetch_plugin(shown)
    assert with_cli.asked == [] and len(shown.begun) == 1


@pytest.mark.parametrize(("provider", "name"), [("aws", "aws"), ("gcp", "gcp"), ("azure", "azure-native")])
def test_each_provider_says_which_plug_in_it_needs(provider: str, name: str) -> None:
    needed = pulumi_install.needed_plugin(provider)  # type: ignore[arg-type]
    pinned = f"pulumi_{name.replace('-', '_')}=={needed.version}"
    assert needed.name == name and pinned in (ROOT / "constraints.txt").read_text()


def test_a_plug_in_on_path_is_enough(with_cli: Releases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pulumi-resource-aws").write_text("#!/bin/sh\n")
    (tmp_path / "pulumi-resource-aws").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{EVERYDAY_PATH}")
    fetch_plugin()
    assert with_cli.asked == []
    monkeypatch.setenv("PULUMI_IGNORE_AMBIENT_PLUGINS", "true")
    fetch_plugin()
    assert plugin_folder().is_dir()


def test_another_version_or_half_of_a_plug_in_is_not_enough(with_cli: Releases) -> None:
    plugin_folder().with_name("resource-aws-v6.0.0").mkdir(parents=True)
    assert find_plugin(AWS) is None
    plugin_folder().mkdir()
    assert find_plugin(AWS) is not None
    plugin_folder().with_name(f"{plugin_folder().name}.partial").touch()
    assert find_plugin(AWS) is None
    fetch_plugin()
    assert find_plugin(AWS) is not None and len(with_cli.fetched(PLUGIN_ARCHIVE)) == 1


def test_what_the_cli_says_no_to_is_one_line(with_cli: Releases) -> None:
    with_cli.files[PLUGIN_ARCHIVE] = with_cli.files[PLUGIN_ARCHIVE][:40_000]
    del with_cli.files[PLUGIN_SUMS]
    with pytest.raises(StackFailed) as caught:
        fetch_plugin()
    said = f"[resource plugin aws-{AWS.version}] unexpected EOF"
    by_hand = f"pulumi plugin install resource aws {AWS.version}"
    assert caught.value.message == f"Pulumi's plug-in aws {AWS.version} could not be installed: {said}"
    assert caught.value.hint == f"or run: {by_hand}"
    assert caught.value.kind == FailureKind.NO_PLUGIN and kept() == {"bin"} and find_plugin(AWS) is None


def test_who_overrides_where_plug_ins_come_from_is_obeyed(with_cli: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_PLUGIN_DOWNLOAD_URL_OVERRIDES", ".*=https://mirror.example")
    fetch_plugin()
    assert (plugin_folder() / "pulumi-resource-aws").read_text() == ".*=https://mirror.example\n"
    assert with_cli.asked == []


def test_a_provider_without_its_packages_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pulumi_install._PACKAGES, "aws", "pulumi_of_nobody")
    for ask in (pulumi_install.needed_plugin, checks):
        with pytest.raises(NotInstalled) as refused:
            ask("aws")
        said = "aws needs pulumi_of_nobody, which is not installed; pip install 'gpuctl-spot[aws]'"
        assert str(refused.value) == said


# -- check ------------------------------------------------------------------------------------------------------------


def test_check_says_what_is_missing_and_what_to_do(releases: Releases) -> None:
    cli, plugin = checks("aws")
    assert (cli.name, cli.status) == ("pulumi", "fail")
    assert cli.message.startswith("Pulumi's CLI is not installed; install 3.181.0 or newer")
    assert (plugin.name, plugin.status) == ("plug-in", "ok")
    assert plugin.message == f"aws {AWS.version} is not installed yet; `gpuctl up` downloads it"
    assert releases.asked == []


@pytest.mark.usefixtures("releases")
def test_check_names_version_and_size_of_what_is_there() -> None:
    install()
    fetch_plugin()
    cli, plugin = checks("aws")
    assert (cli.status, cli.message) == ("ok", f"{CLI} in {cli_folder() / 'bin'} (2 MB)")
    assert (plugin.status, plugin.message) == ("ok", f"aws {AWS.version} in {plugin_folder()} (2 MB)")


def _own_version() -> str:
    return subprocess.run([cli_folder() / "bin" / "pulumi", "version"], capture_output=True, text=True).stdout.strip()
