"""Pulumi comes to a machine that has none: what a person sees of it, and a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.stacks.engine.pulumi_install import CLI
from tests.fakes import person
from tests.fakes.pulumi.releases import AWS, CLI_ARCHIVE, PLUGIN_ARCHIVE, Releases, serving

UP = ("up", "--provider", "aws", "--type", "g5.xlarge", "--nodes", "1")


@pytest.fixture
def releases() -> Iterator[Releases]:
    with serving() as server:
        server.publish_cli()
        server.publish_plugin()
        yield server


@pytest.fixture
def env(releases: Releases, tmp_path: Path) -> dict[str, str]:
    """Of somebody without Pulumi, and without credentials: what comes after it stops there."""
    return os.environ | {
        "PATH": "/usr/bin:/bin",
        "GPUCTL_PULUMI_RELEASES": releases.url,
        "GPUCTL_STATE_DIR": str(tmp_path / "state"),
        "PULUMI_HOME": str(tmp_path / "home"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "TERM": "xterm-256color",
    }


def run(env: dict[str, str], folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuctl.cli.main", *args]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=150)


def megabytes(data: bytes) -> str:
    return f"{len(data) / 1e6:.1f}"


@pytest.mark.slow
def test_a_person_is_asked_and_sees_the_bytes_come(releases: Releases, env: dict[str, str], tmp_path: Path) -> None:
    releases.cut[CLI_ARCHIVE] = [900_000]
    code, shown = person.at_a_terminal(UP, tmp_path, env, columns=120, typed="y\n")
    shown = person.plain(shown)
    cli = megabytes(releases.files[CLI_ARCHIVE])
    own = tmp_path / "state" / "pulumi-cli"
    question = f"Pulumi's CLI is not installed\nInstall Pulumi {CLI} into {own} ({cli} MB)? [y/N]"
    assert question in shown.replace("\r", "")
    assert re.search(rf"downloading Pulumi {re.escape(CLI)} .*0\.9/{cli} MB", shown)
    assert re.search(rf"downloading Pulumi {re.escape(CLI)} .*{cli}/{cli} MB", shown)
    plugin = megabytes(releases.files[PLUGIN_ARCHIVE])
    assert re.search(rf"downloading plug-in aws {re.escape(AWS.version)} .*{plugin}/{plugin} MB", shown)
    # Then it goes on, before anything was rented or asked for.
    assert code == 2 and "no AWS credentials found" in shown and "Rent them?" not in shown
    assert (own / "bin" / "pulumi").is_file()


@pytest.mark.slow
def test_a_person_who_says_no_gets_nothing(releases: Releases, env: dict[str, str], tmp_path: Path) -> None:
    code, shown = person.at_a_terminal(UP, tmp_path, env, typed="n\n")
    last = person.plain(shown).splitlines()[-1]
    assert code == 1 and last.startswith("error: Pulumi's CLI is not installed; install 3.181.0 or newer")
    assert releases.fetched(CLI_ARCHIVE) == [] and not (tmp_path / "state" / "pulumi-cli").exists()


@pytest.mark.slow
def test_a_script_is_told_to_add_y(releases: Releases, env: dict[str, str], tmp_path: Path) -> None:
    done = run(env, tmp_path, *UP)
    folder = tmp_path / "state" / "pulumi-cli"
    line = (
        f"error: Pulumi's CLI is not installed; add -y to have Pulumi {CLI} installed in {folder}, or install 3.181.0"
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(line)
    assert releases.asked == []


@pytest.mark.slow
def test_a_script_with_y_gets_a_line_before_and_after(releases: Releases, env: dict[str, str], tmp_path: Path) -> None:
    done = run(env, tmp_path, *UP, "-y")
    sizes = [megabytes(releases.files[path]) for path in (CLI_ARCHIVE, PLUGIN_ARCHIVE)]
    told = [line for line in done.stderr.splitlines() if line.startswith("downloading")]
    whats = [f"downloading Pulumi {CLI}", f"downloading plug-in aws {AWS.version}"]
    pattern = "\n".join(
        rf"{re.escape(what)} \({size} MB\)\n{re.escape(what)}: {size} MB in \d+ s"
        for what, size in zip(whats, sizes, strict=True)
    )
    assert re.fullmatch(pattern, "\n".join(told))
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_check_names_pulumi_and_its_plug_in(env: dict[str, str], tmp_path: Path) -> None:
    done = run(env, tmp_path, "check", "--provider", "aws", "--type", "g5.xlarge")
    lines = done.stdout.splitlines()
    assert lines[-2].startswith("fail     pulumi       Pulumi's CLI is not installed; install 3.181.0 or newer")
    assert lines[-1].startswith(f"ok       plug-in      aws {AWS.version} is not installed yet")
    assert done.stderr == "region: us-east-1 (the default)\nerror: 2 checks failed: credentials, pulumi\n"
