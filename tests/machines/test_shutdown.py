"""A machine that is shut down while it trains: what the agent still needs is there until it has left."""

from __future__ import annotations

import time

from gpuctl.bootstrap.user_data.render import NEEDED_TO_THE_END
from tests.e2e.scripts import COUNTING
from tests.machines.cloud import Cloud

_KILLS_WORKERS = """[Unit]
Description=stands in for what takes the workers along when it stops
[Service]
ExecStart=/bin/sleep infinity
ExecStop=/bin/sh -c 'for file in $(grep -l gpuctl-agent.service /proc/[0-9]*/cgroup); do \\
    pid=$${file#/proc/}; pid=$${pid%%/*}; grep -q gpuctl.bootstrap.agent /proc/$$pid/cmdline || kill -9 $$pid; done'
"""
# LVM's, which has no place in the order by itself, and is the first to stop.
_EARLY = _KILLS_WORKERS.replace("[Service]", "DefaultDependencies=no\nConflicts=shutdown.target\n[Service]")
_STAND_INS = (
    "docker.service",
    "nvidia-fabricmanager.service",
    "sku-customizations.service",
    "blk-availability.service",
)
_FILES = {
    **{f"/etc/systemd/system/{unit}": _EARLY if "blk" in unit else _KILLS_WORKERS for unit in _STAND_INS},
    "/etc/systemd/system/multi-user.target.d/stand-ins.conf": f"[Unit]\nWants={' '.join(_STAND_INS)}\n",
}


def test_a_shutdown_is_a_notice_the_last_checkpoint_is_kept_and_no_step_is_done_twice(cloud: Cloud) -> None:
    """Addresses come by DHCP, and a lease that is given back takes the network away: see ``NEEDED_TO_THE_END``."""
    cloud.create(2, files=_FILES)
    cloud.await_ready(timeout=180)
    job = cloud.train(cloud.write("count.py", COUNTING), "--", "--steps", "600", "--every", "100000", "--rest", "0.05")
    cloud.wait_for_step(job, 20)
    off = cloud.instance(cloud.rank0())
    machine = off.machine
    after = machine.run("systemctl", "show", "--property=After", "--value", "gpuctl-agent").stdout.split()
    assert set(NEEDED_TO_THE_END) <= set(after)
    active = machine.run("systemctl", "is-active", *_STAND_INS, check=False).stdout.split()
    assert active == ["active"] * len(_STAND_INS)
    assert "dhcp" in machine.run("ip", "route", "show", "default").stdout
    machine.run("systemctl", "poweroff", "--no-block")
    saved = cloud.wait(lambda: cloud.checkpoints(job).entries, "a last checkpoint")
    assert saved[-1].reason == "notice"
    machine.await_end()
    outcome = cloud.wait_for_end(job, timeout=200).outcome
    assert outcome and outcome.result == "succeeded", outcome
    done = [line["step"] for line in cloud.metrics(job) if "loss" in line]
    assert sorted(done) == sorted(set(done))


_BALLAST_MB = 3
_SLOW_MBIT_PER_S = 0.5
_BALLAST = f"""big = torch.nn.Module()
    big.register_buffer("ballast", torch.rand({_BALLAST_MB * 250_000}))
    """
_WITH_BALLAST = COUNTING.replace("checkpointer = ", f"{_BALLAST}checkpointer = ").replace(
    '"optimizer": optimizer}', '"optimizer": optimizer, "big": big}'
)


def test_a_last_checkpoint_may_take_as_long_as_the_cloud_waits(cloud: Cloud) -> None:
    """AWS waits for minutes, and 30 s, as of a notice, are not enough here: see ``Cloud.shutdown_s``."""
    cloud.create(2, spec=cloud.spec(shutdown_s=140.0))
    cloud.await_ready(timeout=180)
    script = cloud.write("count.py", _WITH_BALLAST)
    job = cloud.train(script, "--", "--steps", "600", "--every", "100000", "--rest", "0.05")
    cloud.wait_for_step(job, 20)
    machine = cloud.instance(cloud.rank0()).machine
    shape = f"tbf rate {_SLOW_MBIT_PER_S}mbit burst 16kb latency 400ms"  # of what it sends
    machine.run("tc", "qdisc", "replace", "dev", "host0", "root", *shape.split())
    began = time.monotonic()
    machine.run("systemctl", "poweroff", "--no-block")
    saved = cloud.wait(lambda: cloud.checkpoints(job).entries, "a last checkpoint")
    assert time.monotonic() - began > 30, "or the link was not slow"
    assert saved[-1].reason == "notice"
    machine.await_end()
    outcome = cloud.wait_for_end(job, timeout=200).outcome
    assert outcome and outcome.result == "succeeded", outcome
    done = [line["step"] for line in cloud.metrics(job) if "loss" in line]
    assert sorted(done) == sorted(set(done))
