"""A cluster whose nodes are on a network of their own: each has a network namespace, plugged into a switch, whose wires
can be made slow and whose ports can be shut. They share the disk, and so a folder as their bucket.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.stacks.providers import processes
from gpuctl.stacks.state.clusters import KnownCluster
from tests.bench.network import Network, entering, is_possible, namespace
from tests.e2e.machine import Cluster


def why_not() -> str:
    """Why this machine cannot have one; empty if it can."""
    if not is_possible():
        return "network namespaces need root, iproute2 and util-linux"
    shape = "tc qdisc add dev lo root tbf rate 1mbit burst 64kb latency 50ms"
    rule = "ip rule add pref 50 ipproto tcp dport 9 blackhole"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", f"{shape} && {rule}"], capture_output=True, text=True)
    return f"this kernel cannot slow a wire or shut a port: {tried.stderr.strip()}" if tried.returncode else ""


class WiredCluster(Cluster):
    """``add`` nodes to it."""

    def __init__(self, root: Path, net: Network, nodes_max: int) -> None:
        super().__init__(root / "state", root / "work")
        self.net = net
        self._agents: list[subprocess.Popen[bytes]] = []
        spec = ClusterSpec(
            name=self.name, provider="local", nodes_min=1, nodes_max=nodes_max, token=secrets.token_hex(16)
        )
        self.bucket.create(layout.CLUSTER, encode(spec))
        known = KnownCluster(name=self.name, provider="local", bucket=self.bucket.url)
        folder = self.state / "clusters"
        folder.mkdir(parents=True)
        (folder / f"{self.name}.json").write_bytes(msgspec.json.encode(known))

    def add(self) -> str:
        """One more node, which has been heard of; returns its name."""
        number = self.net.add()
        folder = self.node_dir(f"node-{number}")
        folder.mkdir(parents=True)
        env = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "OMP_NUM_THREADS": "1"}
        identity = NodeIdentity(node=folder.name, address=self.net.address(number), bucket=self.bucket.url, env=env)
        (folder / "identity.json").write_bytes(msgspec.json.encode(identity))
        with (folder / "agent.log").open("wb") as output:
            self._agents.append(
                subprocess.Popen(
                    [*self.net.inside(number), sys.executable, "-m", "gpuctl.bootstrap.agent", str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, processes.MARK: str(folder)},
                    start_new_session=True,
                )
            )
        self.wait(lambda: folder.name in self.nodes(), f"{folder.name} to be live")
        return folder.name

    def slow(self, node: str, mbit: int) -> None:
        """Both ways."""
        shape = f"root tbf rate {mbit}mbit burst 64kb latency 50ms"
        self.net.at_switch(*f"tc qdisc add dev port{_number(node)} {shape}".split())
        self._inside(node, f"tc qdisc add dev eth0 {shape}")

    def shut(self, source: str, target: str, port: str) -> None:
        """A firewall on ``target``: what ``source`` sends to ``port`` (a number, or a range as 1-65535) is dropped
        without a word. By rules of routing, since every kernel has those: the table of local addresses must come after
        ours."""
        self._inside(target, "ip rule add pref 100 lookup local")
        self._inside(target, "ip rule del pref 0")
        sender = self.net.address(_number(source))
        self._inside(target, f"ip rule add pref 50 from {sender} ipproto tcp dport {port} blackhole")

    def end(self) -> None:
        super().end()
        for agent in self._agents:
            agent.wait(timeout=20)

    def _inside(self, node: str, command: str) -> None:
        subprocess.run([*self.net.inside(_number(node)), *command.split()], check=True, timeout=20)


def _number(node: str) -> int:
    return int(node.removeprefix("node-"))


@contextlib.contextmanager
def wired(root: Path, nodes_max: int) -> Iterator[WiredCluster]:
    """With no node yet; nothing of it lives on."""
    switch = namespace()
    net = None
    cluster = None
    try:
        net = Network(entering(switch))
        cluster = WiredCluster(root, net, nodes_max)
        yield cluster
    finally:
        if cluster:
            cluster.end()
        if net:
            net.close()
        switch.kill()
        switch.wait()
