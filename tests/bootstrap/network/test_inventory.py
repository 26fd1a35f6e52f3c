"""What a machine says of its network, beside what it was made of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.network import inventory
from tests.bench.network import entering, is_possible, namespace
from tests.waiting import until

_ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t00000000\t0102000A\t0003\t0\t0\t200\t00000000\t0\t0\t0
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth2\t00000000\t00000000\t0201\t0\t0\t0\t00000000\t0\t0\t0
"""
_ZEROS = "0" * 32
_ROUTES6 = f"""\
fd00000000000000{"0" * 16} 40 {_ZEROS} 00 {_ZEROS} 00000100 00000001 00000000 00000001 eth0
{_ZEROS} 00 {_ZEROS} 00 fe80000000000000{"0" * 15}1 00000400 00000001 00000000 00000003 eth0
{_ZEROS} 00 {_ZEROS} 00 {_ZEROS} ffffffff 00000001 00000000 00200200 lo
"""
_ARP = """\
IP address       HW type     Flags       HW address            Mask     Device
10.0.0.1         0x1         0x2         02:fc:00:00:00:05     *        eth0
10.0.0.9         0x1         0x0         00:00:00:00:00:00     *        eth0
"""
_WITH_EFA = """\
mount -t tmpfs tmpfs /sys/class && mkdir -p /sys/class/infiniband/rdmap0/device /sys/class/drivers/efa &&
ln -s /sys/class/drivers/efa /sys/class/infiniband/rdmap0/device/driver && exec "$@"
"""
"""What runs the rest of a command where the kernel lists one card of EFA's."""


@pytest.fixture
def machine() -> Iterator[list[str]]:
    """What a command begins with to run on a machine that has: ``eth0`` on a network with somebody at 10.77.0.1, which
    leads out; ``eth1``, which nobody has switched on; ``eth2``, switched on, with its cable pulled; a public address on
    ``eth3``; and the bridge of a container engine."""
    if not is_possible():
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    switch, holder = namespace(), namespace()
    try:
        at, inside = entering(switch), entering(holder)
        for number in range(4):
            peer = f"peer name eth{number} address 02:00:00:00:00:0{number} netns {holder.pid}"
            _run(at, f"ip link add port{number} type veth {peer}")
            if number != 2:
                _run(at, f"ip link set port{number} up")
        _run(at, "ip addr add 10.77.0.1/24 dev port0")
        for command in (
            "ip link set lo up",
            "ip addr add 10.77.0.10/24 dev eth0",
            "ip -6 addr add fd77::10/64 dev eth0 nodad",
            "ip link set eth0 mtu 9000 up",
            "ip link set eth2 up",
            "ip addr add 52.95.110.1/28 dev eth3",
            "ip link set eth3 up",
            "ip link add docker0 type bridge",
            "ip addr add 172.17.0.1/16 dev docker0",
            "ip link set docker0 up",
            "ip route add default via 10.77.0.1 dev eth0",
        ):
            _run(inside, command)
        # The kernel needs a moment to see that there is somebody at the other end.
        until(lambda: _carriers(inside) >= {"eth0", "eth3"}, "carriers")
        yield inside
    finally:
        for process in (holder, switch):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_every_interface_is_told_as_it_is(machine: list[str]) -> None:
    told = {one["name"]: one for one in _said(machine)["interfaces"]}
    assert told.keys() >= {"lo", "eth0", "eth1", "eth2", "eth3", "docker0"}
    assert {name: told[name]["up"] for name in ("lo", "eth0", "eth1", "eth2", "eth3")} == {
        "lo": True,
        "eth0": True,
        "eth1": False,
        "eth2": False,  # switched on, but with no carrier
        "eth3": True,
    }
    assert {name: told[name]["kind"] for name in ("lo", "eth0", "docker0")} == {
        "lo": "loopback",
        "eth0": "veth",
        "docker0": "bridge",
    }
    assert all(told[name]["virtual"] for name in ("lo", "eth0", "docker0"))
    assert [told[f"eth{number}"]["mac"] for number in range(4)] == [f"02:00:00:00:00:0{number}" for number in range(4)]
    assert (told["eth0"]["mtu"], told["eth1"]["mtu"]) == (9000, 1500)
    assert told["eth0"]["speed_mbps"] == 10_000 and told["lo"]["speed_mbps"] is None
    addresses = {(a["address"], a["prefix"], a["scope"]) for a in told["eth0"]["addresses"]}
    assert {("10.77.0.10", 24, "private"), ("fd77::10", 64, "private")} < addresses
    assert {scope for address, _, scope in addresses if address.startswith("fe80:")} == {"link"}
    assert {"address": "52.95.110.1", "prefix": 28, "scope": "public"} in told["eth3"]["addresses"]
    assert {"address": "127.0.0.1", "prefix": 8, "scope": "loopback"} in told["lo"]["addresses"]


@pytest.mark.slow
def test_training_goes_where_the_default_route_goes_or_where_the_address_is(machine: list[str]) -> None:
    told = _said(machine)
    assert told["gateways"] == [{"address": "10.77.0.1", "interface": "eth0"}]
    assert (told["interface"], told["address"]) == ("eth0", "10.77.0.10")
    env = _said(machine, "--env")
    assert env == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert _said(machine, "--env", "--address", "52.95.110.1")["GLOO_SOCKET_IFNAME"] == "eth3"
    why = _said(machine, "--env", "--why", "--address", "fd77::10")
    assert {one["name"]: one["value"] for one in why}["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    assert all(one["why"] for one in why)


@pytest.mark.slow
def test_a_neighbour_that_answers_is_told_from_one_that_does_not(machine: list[str]) -> None:
    knock = "import socket, sys\ntry: socket.create_connection((sys.argv[1], 9), 4)\nexcept OSError: pass"
    for address in ("10.77.0.1", "10.77.0.99"):
        subprocess.run([*machine, sys.executable, "-c", knock, address], check=True, timeout=20)
    near = {one["address"]: one for one in _said(machine)["neighbours"]}
    assert near["10.77.0.1"]["answers"] and near["10.77.0.1"]["interface"] == "eth0" and near["10.77.0.1"]["mac"]
    assert not near["10.77.0.99"]["answers"] and near["10.77.0.99"]["mac"] == ""


@pytest.mark.slow
def test_what_the_machine_was_told_decides_unless_the_command_line_does(machine: list[str], tmp_path: Path) -> None:
    spec = tmp_path / "node.json"
    package = {"wheel": "w", "sha256": "0", "constraints": "c", "constraints_sha256": "0"}
    told = {"cluster": "c", "provider": "aws", "bucket": "s3://b/c", "package": package, "address": "52.95.110.1"}
    spec.write_text(json.dumps(told))
    assert _said(machine, "--env", "--spec", str(spec))["NCCL_SOCKET_IFNAME"] == "=eth3"
    assert _said(machine, "--env", "--spec", str(spec), "--address", "10.77.0.10")["NCCL_SOCKET_IFNAME"] == "=eth0"
    spec.write_text(json.dumps({**told, "type": "p4d.24xlarge"}))
    with_efa = [*machine, "unshare", "--mount", "sh", "-c", _WITH_EFA, "sh"]
    assert _said(with_efa, "--env", "--spec", str(spec))["FI_PROVIDER"] == "efa"
    assert "FI_PROVIDER" not in _said(with_efa, "--env", "--spec", str(spec), "--provider", "gcp")


def test_gateways_come_in_the_order_of_their_use(tmp_path: Path) -> None:
    (tmp_path / "route").write_text(_ROUTES)
    (tmp_path / "ipv6_route").write_text(_ROUTES6)
    assert [(g.address, g.interface) for g in inventory.gateways(tmp_path)] == [
        ("10.0.0.1", "eth0"),
        ("10.0.2.1", "eth1"),
        ("fe80::1", "eth0"),
    ]
    assert inventory.gateways(tmp_path / "nowhere") == ()


def test_without_the_ip_program_neighbours_come_from_the_kernels_own_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "arp").write_text(_ARP)
    found = inventory.neighbours(tmp_path)
    assert [(n.address, n.interface, n.answers, n.mac) for n in found] == [
        ("10.0.0.1", "eth0", True, "02:fc:00:00:00:05"),
        ("10.0.0.9", "eth0", False, ""),
    ]
    assert all(one.virtual for one in inventory.interfaces() if one.name == "lo")


def test_of_the_workers_variables_those_that_choose_a_network_are_shown(tmp_path: Path) -> None:
    identity = tmp_path / "identity.json"
    env = {"NCCL_SOCKET_IFNAME": "=eth0", "FI_PROVIDER": "efa", "HF_TOKEN": "secret"}
    identity.write_text(json.dumps({"node": "a", "address": "10.0.0.4", "bucket": "s3://b/c", "env": env}))
    assert inventory.workers_env(identity) == {"FI_PROVIDER": "efa", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert inventory.workers_env(tmp_path / "nothing") is None


def test_the_environment_needs_no_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['net', '--env']; "
        "runpy.run_module('gpuctl.bootstrap.network.inventory', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def _carriers(at: list[str]) -> set[str]:
    listed = subprocess.run([*at, "ip", "-j", "link"], check=True, timeout=20, stdout=subprocess.PIPE).stdout
    return {one["ifname"] for one in json.loads(listed) if one["operstate"] == "UP"}


def _run(at: list[str], command: str) -> None:
    subprocess.run([*at, *command.split()], check=True, timeout=20)


def _said(at: list[str], *options: str) -> Any:
    command = [*at, sys.executable, "-m", "gpuctl.bootstrap.network.inventory", *options]
    return json.loads(subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE).stdout)
