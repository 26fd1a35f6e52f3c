"""``gpuctl offers``, as it is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.person import at_a_terminal, plain


def run(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "offers", *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    return done


def test_offers_are_a_table_with_the_day_of_its_prices() -> None:
    done = run("--provider", "aws", "--gpu", "A100", "--gpus", "8")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["TYPE", "CLOUD", "REGION", "GPUS"]
    assert {line.split()[0] for line in lines[1:]} == {"p4d.24xlarge", "p4de.24xlarge"}
    assert " efa " in lines[1]
    assert done.stderr.startswith("on-demand prices of 2026-07-20, as of then; -: price not available;")


def test_every_offer_has_the_date_of_its_prices() -> None:
    told = json.loads(run("--gpu", "A100", "-o", "json").stdout)["offers"]
    dates = {one["provider"]: (one["on_demand_date"], one["spot_date"]) for one in told}
    assert dates == {"aws": ("2026-07-20", None), "gcp": ("2026-08-03",) * 2, "azure": ("2026-06-18", None)}


@pytest.mark.slow
def test_each_type_stands_once_unless_regions_are_named() -> None:
    def regions(*args: str) -> list[str]:
        told = json.loads(run("--provider", "gcp", "--gpu", "L4", "--gpus", "8", "-o", "json", *args).stdout)["offers"]
        assert {one["name"] for one in told} == {"g2-standard-96"}
        return [one["region"] for one in told]

    assert len(regions()) == 1
    assert set(regions("--region", "us-central1,europe-west4")) == {"us-central1", "europe-west4"}
    assert len(regions("--all-regions")) > 15


@pytest.mark.slow
def test_the_setting_names_regions_as_it_does_for_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_REGION", "europe-west4,us-central1")
    l4 = ("--gpu", "L4", "--gpus", "8", "-o", "json")
    done = run("--provider", "gcp", *l4)
    assert {one["region"] for one in json.loads(done.stdout)["offers"]} == {"us-central1", "europe-west4"}
    assert done.stderr == "region: europe-west4, us-central1 (GPUCTL_REGION)\n"
    assert len(json.loads(run("--provider", "gcp", "--all-regions", *l4).stdout)["offers"]) > 15
    assert json.loads(run("--provider", "aws", *l4).stdout)["offers"], "the setting is about another cloud"


def test_offers_as_json_have_all_that_is_known() -> None:
    told = json.loads(run("--gpu", "A100", "-o", "json").stdout)
    (p4d,) = [one for one in told["offers"] if one["name"] == "p4d.24xlarge" and one["region"] == "us-east-1"]
    assert (p4d["gpus"], p4d["fabric"], p4d["fabric_cards"]) == (8, "efa", 4)
    assert p4d["on_demand_usd_per_gpu_hour"] == pytest.approx(p4d["on_demand_usd_per_hour"] / 8)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--provider", "ibm"), "error: unknown provider 'ibm'; use one of: local, ssh, aws, gcp, azure\n"),
        (("--region", "us-esat-1"), "error: unknown region 'us-esat-1'; gpuctl offers --all-regions shows all\n"),
        (
            ("--region", "eastus", "--all-regions"),
            "error: --region and --all-regions exclude each other; leave one of them out\n",
        ),
        (("--gpus", "0"), "error: --gpus 0 is too few; use 1 or more\n"),
        (("--max-price", "cheap"), "error: --max-price cheap is not an amount; use, for example, 12.50\n"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], said: str) -> None:
    assert run(*args, code=2).stderr == said


def test_a_gpu_that_is_not_sold_is_refused_with_those_that_are() -> None:
    said = run("--gpu", "none such", code=2).stderr
    assert said.startswith("error: unknown GPU 'none such'; there are: A100-40GB, ")


def test_nothing_that_fits_is_said() -> None:
    done = run("--max-price", "0")
    assert (done.stdout, done.stderr) == ("", "nothing fits; gpuctl offers shows all\n")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 100, 130, 200])
def test_on_a_terminal_no_row_wraps_and_each_type_is_whole(columns: int, tmp_path: Path) -> None:
    code, shown = at_a_terminal(["offers"], tmp_path, {**os.environ, "TERM": "xterm"}, columns=columns)
    rows = [line for line in plain(shown).splitlines() if re.match(r"[A-Za-z0-9_+.-]+  ", line)]
    told = json.loads(run("-o", "json").stdout)["offers"]
    assert code == 0
    assert [row.split()[0] for row in rows] == ["TYPE", *(one["name"] for one in told)]
    assert max(map(len, rows)) <= columns
    assert ("no room for " in shown) == (columns < 130)
