"""Jobs in a container image on a whole cluster: they end, fail, leave and are lost like any other."""

from __future__ import annotations

import re
import shlex
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from gpuctl.bootstrap.containers.command_lines import OPTIONS
from gpuctl.cluster.errors import CHECKPOINT_LOST
from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster, as_json
from tests.e2e.scripts import COUNTING, PLAIN_DDP, REFUSED
from tests.e2e.test_no_code import BARE, PROBLEM
from tests.fakes import containers
from tests.waiting import PATIENCE_S

WHERE = """
    with open("/proc/1/cmdline") as first:
        print("inside", "container_entry.py" in first.read(), flush=True)
"""

BEGINS = """
    import torch.distributed.nn.functional
"""
ENDS = """
    # In an image a worker ends as any Python does, and without this torch's threads abort it now and then: see the end
    # of examples/plain_ddp.py.
    del model
    dist.destroy_process_group()
"""

pytestmark = pytest.mark.machines


@pytest.fixture
def boxed(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose nodes can run ``containers.IMAGE``."""
    containers.runtime()
    cluster.env[OPTIONS] = shlex.join(containers.options())
    yield cluster
    folders = [folder for folder in cluster.state.glob("local/*/nodes/*") if folder.is_dir()]
    cluster.end()
    cluster.wait(lambda: not any(map(containers.left, folders)), "the containers to go")


def test_a_job_in_an_image_runs_to_its_end_as_one_without_does(boxed: Cluster) -> None:
    boxed.up("2")
    boxed.write("train.py", BEGINS + PLAIN_DDP + WHERE + ENDS)
    done = boxed.run("train", "--image", containers.IMAGE, "train.py", "--", "--lr", "0.1")
    (master,) = set(re.findall(r"MASTER_ADDR=(\S+)", done.stdout))
    assert master in ("127.0.0.2", "127.0.0.3")
    assert sorted(set(re.findall(r"(?m)^node-(\d)/", done.stdout))) == ["0", "1"]
    for node, rank in set(re.findall(r"(?m)^(node-\d)/(\d)", done.stdout)):
        prefix = f"{node}/{rank} | "
        env = f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK={rank} MASTER_ADDR={master}"
        assert f"{prefix}env {env} TORCHELASTIC_RUN_ID=train-1-1 GPUCTL_JOB=train-1 GPUCTL_NODE={node}" in done.stdout
        assert f"{prefix}argv ['--lr', '0.1'] cwd True name __main__" in done.stdout
        assert f"{prefix}inside True" in done.stdout
        assert f"{prefix}to stderr" in done.stdout


def test_any_program_runs_in_an_image_with_the_rounds_variables(boxed: Cluster) -> None:
    boxed.up("2")
    program = boxed.folder / "program.sh"
    # None fails before all have printed, and only one does: the others are ended with the first.
    program.write_text(
        '#!/bin/sh\necho "$RANK of $WORLD_SIZE"; wc -l < "$GPUCTL_HOSTFILE"\n'
        'met="${GPUCTL_BUCKET#file://}/met"; mkdir -p "$met"; touch "$met/$RANK"\n'
        'while [ "$(ls "$met" | wc -l)" -lt 4 ]; do sleep 0.05; done; test "$RANK" != 1 || exit 7\n'
    )
    program.chmod(0o755)
    done = boxed.run("train", "--image", containers.IMAGE, "--launcher", "exec", "--nproc", "2", "./program.sh", code=7)
    assert sorted(re.findall(r"\| (\d) of 4", done.stdout)) == ["0", "1", "2", "3"], done.stdout + done.stderr
    assert re.findall(r"(?m)\| +2$", done.stdout), "a line for each node"
    assert re.search(r"rank 1 on node-\d exited with code 7", done.stderr)


def test_an_image_without_the_framework_is_told_so(boxed: Cluster) -> None:
    boxed.up("1")
    boxed.write("train.py", "pass")
    done = boxed.run("train", "--image", containers.IMAGE, "--launcher", "horovod", "train.py", code=1)
    assert "no python in this image has horovod" in done.stderr


def test_a_script_that_fails_in_an_image_ends_with_its_code_and_its_traceback(boxed: Cluster) -> None:
    boxed.up("2")
    boxed.write("fails.py", "import os, time\nif os.environ['RANK'] == '1':\n    {}['lost']\ntime.sleep(1000)\n")
    (boxed.folder / "gpuctl.yaml").write_text(f"image: {containers.IMAGE}\n")
    done = boxed.run("train", "fails.py", code=1)
    assert "KeyError: 'lost'" in done.stderr
    assert re.search("rank 1 on node-. exited with code 1: KeyError: 'lost'", done.stderr)


def test_a_training_in_an_image_whose_last_checkpoint_is_lost_fails_with_a_code_of_its_own(boxed: Cluster) -> None:
    boxed.up("1")
    boxed.write("refused.py", REFUSED)
    for args in ((), ("--", "waits")):
        done = boxed.run("train", "--image", containers.IMAGE, "refused.py", *args, code=CHECKPOINT_LOST)
        assert "the checkpoint of step 1 was not written: the bucket refuses it" in done.stderr


def test_an_image_that_does_not_exist_fails_the_job_with_one_line(boxed: Cluster) -> None:
    boxed.up("1")
    boxed.write("train.py", "pass")
    done = boxed.run("train", "--image", "127.0.0.1:1/nothing:1", "train.py", code=1)
    said = [line for line in done.stderr.splitlines() if "cannot pull 127.0.0.1:1/nothing:1" in line]
    assert len(said) == 1
    assert "refused" in said[0]


def test_people_see_that_an_image_is_pulled_and_may_cancel_it(boxed: Cluster) -> None:
    with containers.registry(threading.Event()) as image:
        boxed.env |= containers.trusting(boxed.folder, image)
        boxed.up("1")
        boxed.write("train.py", "pass")
        with boxed.start("train", "--image", image, "train.py") as watching:
            assert watching.stdout is not None
            assert any(f"pulling {image} on node-0" in line for line in watching.stdout)
            assert f"node-0: pulling {image}" in boxed.run("status").stdout
            assert as_json(boxed.run("status", "-o", "json"))["nodes"][0]["doing"] == f"pulling {image}"
            boxed.run("cancel", "train-1")
            boxed.wait_for_end("train-1")
            watching.stdout.read()
        boxed.wait(lambda: "pulling" not in boxed.run("status").stdout, "the pull to be broken off")


def test_a_dead_agent_leaves_no_container(boxed: Cluster) -> None:
    boxed.up("1")  # no other node, whose end of a connection would end this one
    boxed.write("waits.py", "import time\nprint('waits', flush=True)\ntime.sleep(1000)\n")
    job = boxed.train("waits.py", "--image", containers.IMAGE)
    boxed.wait(lambda: "waits" in boxed.run("logs", job).stdout, "the script to run", PATIENCE_S)
    folder = boxed.node_dir("node-0")
    agent = processes.noted_process(folder)
    assert agent is not None
    (worker,) = [p for p in processes.marked_processes(folder) if p.cmdline()[-1].endswith("/waits.py")]
    assert len(containers.left(folder)) == 1
    agent.send_signal(signal.SIGKILL)
    boxed.wait(lambda: not containers.left(folder), "the container to go", 10)
    assert processes.wait_until_ended([worker], 1) == []


def test_a_job_in_an_image_survives_the_loss_of_a_node_and_a_notice(boxed: Cluster) -> None:
    boxed.up("1:2")
    boxed.write("train.py", COUNTING)
    args = ("--steps", "240", "--every", "10", "--rest", "0.05")
    job = boxed.train("train.py", "--image", containers.IMAGE, "--", *args)
    boxed.wait(lambda: boxed.step(job, 1) >= 20, "step 20", PATIENCE_S)
    boxed.kill("node-1")
    boxed.wait(lambda: boxed.step(job, 2) >= 30, "step 30 in round 2", PATIENCE_S)
    boxed.run("preempt", "node-0", "--notice", "30", "--replace-after", "0")
    ended = boxed.wait_for_end(job, PATIENCE_S)
    assert ended.outcome is not None and ended.outcome.result == "succeeded"
    drained = next(entry for entry in boxed.history(job) if entry.phase == "drain")
    assert drained.reason == "node-0 given notice"
    steps = [int(record["step"]) for record in boxed.metrics(job)]
    jumps = [(now, later) for now, later in pairwise(steps) if later != now + 1]
    assert len(jumps) <= 1, "after the loss some steps may come twice, after the notice none"
    assert steps[-1] == 240


def test_files_written_after_sigterm_in_an_image_come_back(boxed: Cluster) -> None:
    boxed.up("1")
    boxed.write("problem.py", PROBLEM)
    boxed.write("train.py", BARE)
    job = boxed.train("train.py", "--image", containers.IMAGE, "--env", "OMP_NUM_THREADS=1", "--", "--until-asked")
    boxed.wait(lambda: "step 25 " in boxed.run("logs", job).stdout, "step 25", PATIENCE_S)
    boxed.run("preempt", "node-0", "--notice", "30", "--replace-after", "0")
    ended = boxed.wait_for_end(job, PATIENCE_S)
    assert ended.outcome is not None and ended.outcome.result == "succeeded"
    said = boxed.run("logs", job).stdout
    steps = [int(line.split("step ")[1].split()[0]) for line in said.splitlines() if "| step " in line]
    assert steps == list(range(1, 31))
    assert "finished 30" in said


def test_an_image_that_one_node_has_built_comes_to_the_others_from_the_bucket(boxed: Cluster) -> None:
    boxed.up("2")
    folder = boxed.folder / "mine"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {containers.IMAGE}\nCOPY told .\nRUN cp told /built\n")
    (folder / "told").write_text("this one")
    boxed.run("image", "build", "mine", "--node", "node-1", "--", *containers.build_options())
    (listed,) = as_json(boxed.run("image", "ls", "-o", "json"))
    name = f"localhost/gpuctl/mine:{listed['image'][:12]}"
    assert (listed["name"], listed["built_on"], len(listed["layers"])) == ("mine", "node-1", 3)
    containers.ask(containers.runtime(), "rmi", name)  # local nodes share what the machine has
    try:
        boxed.write("train.py", "print('built:', open('/built').read(), flush=True)")
        done = boxed.run("train", "--image", "bucket:mine", "train.py")
        assert sorted(re.findall(r"(?m)^(node-\d)/\d \| built: this one$", done.stdout)) == ["node-0", "node-1"]
        assert "environment: image bucket:mine" in done.stderr
    finally:
        containers.ask(containers.runtime(), "rmi", name)
