"""``gpuctl offers``, as it is printed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


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
    assert done.stderr.startswith("prices of 20")


def test_offers_as_json_have_all_that_is_known() -> None:
    told = json.loads(run("--gpu", "A100", "-o", "json").stdout)
    (p4d,) = [one for one in told["offers"] if one["name"] == "p4d.24xlarge" and one["region"] == "us-east-1"]
    assert (p4d["gpus"], p4d["fabric"], p4d["fabric_cards"]) == (8, "efa", 4)
    assert p4d["on_demand_usd_per_gpu_hour"] == pytest.approx(p4d["on_demand_usd_per_hour"] / 8)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--provider", "ibm"), "error: 'ibm' is no cloud; use one of: aws, gcp, azure\n"),
        (("--gpus", "0"), "error: --gpus 0 is too few; use 1 or more\n"),
        (("--max-price", "cheap"), "error: --max-price cheap is not an amount; use one such as 12.50\n"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], said: str) -> None:
    assert run(*args, code=2).stderr == said


def test_nothing_that_fits_is_said() -> None:
    done = run("--gpu", "none such")
    assert (done.stdout, done.stderr) == ("", "nothing fits; gpuctl offers shows all\n")
