"""The cluster's name in the commands that a message proposes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cli.main import run
from gpuctl.cli.render.hints import name_cluster
from gpuctl.cli.verbs import _verb_with_cluster
from gpuctl.cluster.errors import GpuctlError


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        ("run `gpuctl down` first", "run `gpuctl down --cluster big` first"),
        ("see its output: gpuctl logs a-1", "see its output: gpuctl logs --cluster big a-1"),
        ("see `gpuctl logs --boot node-0`", "see `gpuctl logs --cluster big --boot node-0`"),
        ("take a step of `gpuctl ckpt ls JOB`", "take a step of `gpuctl ckpt ls --cluster big JOB`"),
        ("`gpuctl down --cluster other` and `gpuctl up -c x`", "`gpuctl down --cluster other` and `gpuctl up -c x`"),
        ("gpuctl down --by-tag big --provider aws", "gpuctl down --by-tag big --provider aws"),
        ("see `gpuctl --help`, or `gpuctl offers`", "see `gpuctl --help`, or `gpuctl offers`"),
        ("gpuctl is not there", "gpuctl is not there"),
    ],
)
def test_commands_are_about_the_cluster_that_was_named(hint: str, told: str) -> None:
    error = GpuctlError("no `gpuctl net`", hint)
    name_cluster(error, "big", _verb_with_cluster)
    assert (error.message, error.hint) == ("no `gpuctl net --cluster big`", told)


def test_a_verb_names_it_and_only_if_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "empty").mkdir()
    url = f"file://{tmp_path}/empty"
    assert run(["status", "--bucket", url]) == 2
    assert capsys.readouterr().err == "error: there is no cluster in this bucket; create one with `gpuctl up`\n"
    assert run(["status", "--bucket", url, "-c", "big"]) == 2
    assert capsys.readouterr().err.endswith("create one with `gpuctl up --cluster big`\n")
