"""Preemption on this machine: what a cloud does to a spot machine, and what its group does then.

``python -m gpuctl.stacks.providers.local_preemption CLUSTER NODE NOTICE_S REPLACE_AFTER_S|never``: a process of its own
does it, so that closing a terminal half-way does not save the node.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from gpuctl.bootstrap.gpus import found_devices
from gpuctl.stacks.providers import processes
from gpuctl.stacks.providers.interface import Say
from gpuctl.stacks.providers.local_nodes import (
    cluster_of,
    end_nodes,
    give_notice,
    is_up,
    locked,
    new_node_dir,
    node_count,
    node_dirs,
    root_of,
    start_agent,
    wait_until_live,
    write_identities,
)


def start(cluster: str, node: str, notice_s: float, replace_after_s: float | None, say: Say) -> None:
    """Preempt ``node`` in a process of its own; returns when it is over.

    Args:
        cluster: name of a cluster of provider ``local``.
        node: name of a node of it that runs.
        notice_s: see ``CanPreempt.preempt``.
        replace_after_s: see ``CanPreempt.preempt``.
        say: gets the lines that that process prints.
    """
    events = root_of(cluster) / "preemptions"
    events.mkdir(exist_ok=True)
    args = [cluster, node, str(notice_s), "never" if replace_after_s is None else str(replace_after_s)]
    doer = events / f"{node}-{time.time_ns()}"
    doer.mkdir()
    processes.start(doer, "gpuctl.stacks.providers.local_preemption", args, os.environ, "log")
    _follow(doer, say)


def take_away(name: str, node: str, notice_s: float, replace_after_s: float | None, say: Say) -> None:
    """Take a node of cluster ``name`` away, and start another one in its place.

    Args:
        name: of a cluster of provider ``local``.
        node: name of its node, which may have ended by itself.
        notice_s: seconds from the notice to SIGKILL; 0: no notice.
        replace_after_s: seconds from the end to the other node's start; ``None``: none is started.
        say: is told of each step.
    """
    folder = root_of(name) / "nodes" / node
    given = time.monotonic()
    agents = give_notice([folder], notice_s)
    if agents:
        say(f"{node}: notice given, {notice_s:.10g} s")
        if not processes.wait_until_ended(agents, notice_s):
            say(f"{node} exited by itself after {time.monotonic() - given:.1f} s")
    left = end_nodes([folder], 0)
    say(f"{node}: preempted" + (f", but {len(left)} processes still run" if left else ""))
    if replace_after_s is None:
        return
    time.sleep(replace_after_s)
    with locked(name):
        bucket, spec = cluster_of(folder)
        if sum(map(is_up, node_dirs(name))) >= spec.nodes_max:
            say(f"{node}: not replaced, there are {node_count(spec.nodes_max)} by now")
            return
        others = [folder for folder in node_dirs(name) if is_up(folder)]
        replacement = new_node_dir(name, reserved=[])
        write_identities([replacement], bucket.url, spec, len(found_devices()), beside=others)
        start_agent(replacement, bucket)
        wait_until_live([replacement], bucket)
    say(f"{replacement.name}: started in its place")


def _follow(doer: Path, say: Say) -> None:
    """Pass on what a preemption in another process says, until it is over."""
    said = 0
    over = False
    while not over:
        over = not is_up(doer)
        lines = (doer / "log").read_text(errors="replace").splitlines()
        for line in lines[said:]:
            say(line)
        said = len(lines)
        if not over:
            time.sleep(0.05)


def main(name: str, node: str, notice_s: str, replace_after_s: str) -> None:
    """Take a node away, as this module's command line says; see ``take_away``.

    Args:
        name: of a cluster of provider ``local``.
        node: name of its node.
        notice_s: a number of seconds.
        replace_after_s: a number of seconds, or ``never``.
    """
    after = None if replace_after_s == "never" else float(replace_after_s)
    take_away(name, node, float(notice_s), after, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
