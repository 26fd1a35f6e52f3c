"""What the examples for Kubernetes and Slurm run, run: each pod has a network namespace and so an address of its own,
and the bucket is a real S3 server at the switch between them."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuctl.stacks.providers import processes
from tests.bench.network import Network, is_possible
from tests.paths import ROOT
from tests.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root, iproute2 and util-linux"),
]

EXAMPLES = ROOT / "examples" / "mingle"
TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

folder = Path(os.environ["FOLDER"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
kept = folder / "checkpoint"
step = torch.tensor([int(kept.read_text()) if kept.exists() else 0, 0])
dist.broadcast(step, 0)
while True:
    step[0] += 1
    step[1] = int((folder / "over").exists())
    dist.all_reduce(step, dist.ReduceOp.MAX)
    where = f"{os.environ['MINGLE_ROUND']} {os.environ['MASTER_ADDR']} {os.getpid()}"
    with (folder / "steps").open("a") as log:
        log.write(f"{step[0].item()} {rank} {world} {where}\\n")
    if rank == 0:
        (folder / "checkpoint.new").write_text(str(step[0].item()))
        (folder / "checkpoint.new").rename(kept)
    if step[1]:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Pods:
    """Pods that each run one command line, in the order in which they are started."""

    def __init__(self, net: Network, folder: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.net = net
        self.folder = folder
        self._command = list(command)
        programs = Path(sys.executable).parent
        self._env = {**os.environ, **env, "FOLDER": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}
        self._pods: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "train.py").write_text(TRAIN)

    def start(self) -> int:
        """A new pod, under an address that none has had; returns its number."""
        number = self.net.add()
        with (self.folder / f"pod-{number}.log").open("wb") as output:
            self._pods[number] = subprocess.Popen(
                [*self.net.inside(number), *self._command],
                cwd=self.folder,
                env={**self._env, processes.MARK: str(self.folder / f"pod-{number}")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return number

    def delete(self, number: int) -> int:
        """As ``kubectl delete pod`` does: SIGTERM, and time to end. Returns the exit code."""
        self._pods[number].send_signal(signal.SIGTERM)
        return self._pods.pop(number).wait(PATIENCE_S)

    def lose(self, number: int) -> None:
        """With its node."""
        processes.kill_all(self.folder / f"pod-{number}")
        self._pods.pop(number).wait()

    def steps(self) -> list[list[str]]:
        """Step, rank, world size, round, rank 0's address and pid of each step so far."""
        path = self.folder / "steps"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def train_on(self, size: int) -> tuple[int, int]:
        """Waits until so many workers have made ten steps together after now; the step and the round."""
        before = len(self.steps())

        def found() -> tuple[int, int] | None:
            of_size = [step for step in self.steps()[before:] if len(step) == 6 and step[2] == str(size)]
            return (int(of_size[-1][0]), int(of_size[-1][3])) if len(of_size) >= 10 * size else None

        try:
            return until(found, f"ten steps of {size}")
        except Exception as error:
            logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("pod-*.log"))]
            raise AssertionError("\n".join(logs)) from error

    def rank0(self) -> int:
        address = self.steps()[-1][4]
        return next(number for number in self._pods if self.net.address(number) == address)

    def finish(self) -> None:
        (self.folder / "over").touch()
        for number, pod in self._pods.items():
            assert pod.wait(PATIENCE_S) == 0, (self.folder / f"pod-{number}.log").read_text()[-3000:]

    def end(self) -> None:
        for number in [*self._pods]:
            self.lose(number)


def container(manifest: str) -> dict[str, Any]:
    job = yaml.safe_load((EXAMPLES / manifest).read_text())
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return {**found, "completions": job["spec"]["completions"]}


def of_manifest(manifest: str, bucket: str) -> list[str]:
    """The command line that a pod of the manifest has, as Kubernetes fills it in."""
    found = container(manifest)
    values = {"RUN": "8e1f2f1c-5f5e-4c6a-9f0e-1d2c3b4a5968", "BUCKET": bucket}
    assert {one["name"] for one in found["env"]} == {*values}
    words = [*found["command"], *found["args"]]
    filled = [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in words]
    return [word if filled[at - 1] != "--nproc-per-node" else "1" for at, word in enumerate(filled)]  # GPUs there


@pytest.mark.parametrize("manifest", ["kubernetes.yaml", "kubernetes-torchrun.yaml"])
def test_pods_of_a_job_train_and_go_on_when_they_are_deleted_lost_and_come_back(
    tmp_path: Path, switch: Network, bucket: str, manifest: str
) -> None:
    pods = Pods(switch, tmp_path, of_manifest(manifest, bucket), {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"})
    try:
        for _ in range(container(manifest)["completions"]):
            pods.start()
        step, _ = pods.train_on(4)
        assert pods.delete(pods.rank0()) == 143
        after, _ = pods.train_on(3)
        assert after > step
        pods.lose(pods.rank0())
        pods.train_on(2)
        pods.start()
        pods.start()
        last, _ = pods.train_on(4)
        assert last > after
        pods.finish()
    finally:
        pods.end()


def test_tasks_of_a_slurm_allocation_meet_in_a_folder(tmp_path: Path, switch: Network) -> None:
    text = (EXAMPLES / "slurm.sbatch").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    words = shlex.split(line[line.index("gpuctl") :].replace("--nproc-per-node 8", "--nproc-per-node 1"))
    values = {"SLURM_JOB_ID": "4711", "HOME": str(tmp_path)}
    command = [re.sub(r"\$(\w+)", lambda name: values[name[1]], word) for word in words]
    pods = Pods(switch, tmp_path, command, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"})
    try:
        tasks = [pods.start() for _ in range(3)]
        step, _ = pods.train_on(3)
        pods.lose(tasks[0])
        assert pods.train_on(2)[0] > step
        pods.finish()
    finally:
        pods.end()


MEET = """
import os, sys
from gpuctl import mingle
place = mingle("orders", nodes=4, bucket=sys.argv[1], rank=int(sys.argv[2]), timeout=120)
print(place.rank, place.master_address, place.local_address, place.interface, flush=True)
"""


def test_scripts_that_start_in_any_order_wait_for_rank_0_and_learn_its_address(
    tmp_path: Path, switch: Network, bucket: str
) -> None:
    """Every order of the four, each on the machine that has its rank; one ID, used twenty-four times."""
    machines = [switch.add() for _ in range(4)]
    for order in itertools.permutations(range(4)):
        scripts = {}
        for rank in order:
            scripts[rank] = subprocess.Popen(
                [*switch.inside(machines[rank]), sys.executable, "-c", MEET, bucket, str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
            )
            assert scripts[rank].stderr.readline()  # type: ignore[union-attr] # it is here, and says so
        for rank, script in scripts.items():
            out, err = script.communicate(timeout=PATIENCE_S)
            own, rank0 = switch.address(machines[rank]), switch.address(machines[0])
            assert out.split() == [str(rank), rank0, own, "eth0"], f"{order}: {err}"


def test_a_stranger_on_the_network_learns_and_changes_nothing(switch: Network, bucket: str) -> None:
    """It reaches every port of the pods, and says all that it can think of."""
    stranger = switch.add()
    attack = """
import json, socket, sys
host = sys.argv[1]
heard = b""
for port in range(1024, 65536):
    try:
        line = socket.create_connection((host, port), timeout=0.2)
    except OSError:
        continue
    for said in (b"", b'"nonce"\\n["poke", "0"]\\n', b'GET / HTTP/1.1\\r\\n\\r\\n',
                 b'"nonce"\\n' + json.dumps([json.dumps({"node": "x", "incarnation": "x", "address": host, "port": 1,
                 "to": ["x", "x"]}), "00"]).encode() + b"\\n"):
        try:
            line.sendall(said)
            line.settimeout(0.2)
            heard += line.recv(4096)
        except OSError:
            pass
print(heard.decode(errors="replace"))
"""
    machines = [switch.add() for _ in range(3)]
    command = [sys.executable, "-m", "gpuctl.cli.main", "mingle", "--id", "exp1", "--nodes", "3", "--bucket", bucket]

    def come(machine: int) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        inside = [*switch.inside(machine), *command, "--", "bash", "-c", "echo $RANK"]
        return subprocess.Popen(inside, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    pods = [come(machine) for machine in machines[:2]]
    assert pods[1].stderr is not None
    until(lambda: "2 of 3 are here" in pods[1].stderr.readline(), "two to have met")  # type: ignore[union-attr]
    for machine in machines[:2]:
        heard = subprocess.run(
            [*switch.inside(stranger), sys.executable, "-c", attack, switch.address(machine)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        # At most a nonce, which tells nothing: no name, no address, no key, no answer.
        assert re.sub(r'"[0-9a-f]{32}"', "", heard).strip() == "", heard
    pods.append(come(machines[2]))
    said = [pod.communicate(timeout=PATIENCE_S)[0] for pod in pods]
    assert sorted(said) == ["0\n", "1\n", "2\n"]
    assert [pod.returncode for pod in pods] == [0, 0, 0]


def test_an_address_that_the_others_do_not_reach_is_told_to_all_with_those_that_there_are(
    switch: Network, bucket: str
) -> None:
    """As that of Docker's own network, of a pod or of rank 0."""
    machines = [switch.add() for _ in range(3)]
    for machine, number in ((machines[0], 1), (machines[1], 2)):
        for command in (
            "link add docker0 type bridge",
            f"addr add 172.17.0.{number}/16 dev docker0",
            "link set docker0 up",
        ):
            subprocess.run([*switch.inside(machine), "ip", *command.split()], check=True)
    gpuctl = [sys.executable, "-m", "gpuctl.cli.main", "mingle", "--id", "exp1", "--nodes", "4", "--bucket", bucket]
    pods = []
    for machine, interface in ((machines[0], "docker0"), (machines[1], "docker0"), (machines[2], "eth0")):
        there = [*switch.inside(machine), *gpuctl, "--interface", interface]
        pods.append(subprocess.Popen(there, stderr=subprocess.PIPE, text=True))
    try:
        for pod in pods:
            said = ""
            while not all(f"cannot be reached at 172.17.0.{number}, port " in said for number in (1, 2)):
                assert pod.stderr is not None
                line = pod.stderr.readline()
                assert line, said
                said += line
            assert "(10.77.0." in said.partition("it has ")[2]
            assert "choose one there with --interface" in said
    finally:
        for pod in pods:
            pod.send_signal(signal.SIGINT)
            assert pod.wait(PATIENCE_S) == 130
