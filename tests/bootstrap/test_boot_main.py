"""The boot program from its first step to its last, as user-data starts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bootstrap.bare import NODE, BareMachine
from tests.metadata import Service


@pytest.fixture
def service() -> Iterator[Service]:
    with Service("aws").running() as service:
        yield service


@pytest.fixture
def machine(tmp_path: Path, service: Service) -> BareMachine:
    return BareMachine(tmp_path, service.url)


def test_a_bare_machine_becomes_a_node(machine: BareMachine) -> None:
    said = machine.boot()
    report = machine.report()
    assert (report["state"], report["node"], report["reason"]) == ("ready", NODE, ""), said + machine.log()
    assert machine.calls()[-1] == "systemctl start gpuctl-agent.service"
    identity = machine.root / "var/lib/gpuctl/node/identity.json"
    told = json.loads(identity.read_text())
    assert (told["node"], told["provider"], told["address"]) == (NODE, "aws", "127.0.0.1")
    assert identity.stat().st_mode & 0o777 == 0o600
    assert (machine.root / "opt/gpuctl/venv/bin/python").exists()
