"""A machine that is shut down while it trains: what the agent still needs is there until it has left."""

from __future__ import annotations

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
