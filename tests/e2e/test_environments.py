"""Packages of a script on every node, from the package index: on those that come later as on the first."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.machine import Cluster
from tests.e2e.scripts import COUNTING, Gate
from tests.fakes.conda_channel import PLACEHOLDER, CondaChannel
from tests.waiting import until

IMPORTS = """
    import einops, humanize, orjson, os, sys, torch
    for module in (einops, humanize, orjson):
        assert module.__file__.startswith(sys.prefix), module.__file__
    print("packages on", os.environ["GPUCTL_NODE"], einops.__version__, humanize.__version__, orjson.__version__)
    print("torch on", os.environ["GPUCTL_NODE"], torch.__version__, torch.__file__.startswith(sys.prefix))
"""

CONDA = """
    import os, pathlib, sys
    import gamma, torch
    prefix = pathlib.Path(sys.prefix, "share", "where.txt").read_text()
    print(f"gamma {gamma.VERSION}, torch {torch.__version__}, at home {os.path.samefile(prefix, sys.prefix)}")
"""

FINE_TUNE = """
    import os, sys
    import torch, transformers
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    assert transformers.__file__.startswith(sys.prefix), transformers.__file__
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=64))
    numbers = (torch.arange(16) + torch.arange(64)[:, None]) % 64
    rows = [{"input_ids": row, "labels": row} for row in numbers]
    arguments = TrainingArguments(
        "out", max_steps=20, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], save_strategy="no",
        use_cpu=True, logging_steps=20,
    )
    result = Trainer(model=model, args=arguments, train_dataset=rows).train()
    if os.environ["RANK"] == "0":
        print("fine-tuned with", transformers.__version__, "to", round(result.training_loss, 3))
"""


@pytest.mark.slow
def test_four_nodes_two_lost_on_the_way_and_all_later_ones_have_all_packages(cluster: Cluster) -> None:
    cluster.write("requirements.txt", "einops\nhumanize\norjson\n")
    script = cluster.write("counting.py", IMPORTS + COUNTING)
    cluster.up("4")
    first, second = Gate(cluster, 60), Gate(cluster, 120)
    job = cluster.train(script, "--", "--every", "10", *first.args, *second.args)

    cluster.wait_for_step(job, 60)
    lose_one(cluster, job)
    first.open()
    cluster.wait_for_step(job, 120)
    bucket = cluster.state / "buckets" / cluster.name
    aside = bucket.rename(bucket.with_suffix(".away"))
    bucket.touch()  # else the nodes would make another one
    until(lambda: "trying again" in agent_logs(cluster), "the agents miss the bucket")
    bucket.unlink()
    aside.rename(bucket)
    lose_one(cluster, job)
    second.open()
    outcome = cluster.wait_for_end(job).outcome
    assert outcome is not None and outcome.result == "succeeded"

    told = re.findall(r"packages on (\S+) (.*)", cluster.run("logs", job).stdout)
    assert {node for node, _ in told} == {f"node-{number}" for number in range(6)}
    assert len({versions for _, versions in told}) == 1, "all have the same versions"
    torches = set(re.findall(r"torch on \S+ (\S+ \S+)", cluster.run("logs", job).stdout))
    assert len(torches) == 1 and torches.pop().endswith("False"), "torch is the node's own"
    logs = agent_logs(cluster)
    assert logs.count("installed in") == 1, "one node has built it"
    fetched = re.findall(r"environment of requirements.txt: .* MB from (?:node-\d|the bucket)", logs)
    assert len(fetched) == 5, "the five others have fetched it: from the bucket too, once who has built it is lost"
    (environment,) = json.loads(cluster.run("env", "ls", "-o", "json").stdout)
    assert environment["jobs"] == [job] and set(environment["packages"]) == {"einops", "humanize", "orjson"}


@pytest.mark.slow
def test_a_hugging_face_fine_tune_brings_its_own_packages(cluster: Cluster) -> None:
    cluster.write("requirements.txt", "transformers\naccelerate\n")
    script = cluster.write("tune.py", FINE_TUNE)
    cluster.up("2")
    ran = cluster.run("train", script)
    assert "environment: requirements.txt (2 packages)" in ran.stderr.splitlines()
    found = re.search(r"fine-tuned with \S+ to (\S+)", ran.stdout)
    assert found and float(found[1]) < 4.0, ran.stdout  # log(64) is 4.16


@pytest.mark.slow
def test_what_cannot_be_installed_ends_the_job_in_line_with_the_reason(cluster: Cluster) -> None:
    """While another one holds the nodes: nobody waits for its end to hear of a package that does not exist."""
    cluster.up("2")
    gate = Gate(cluster, 20)
    busy = cluster.train(cluster.write("counting.py", COUNTING), "--", *gate.args, "--steps", "30")
    cluster.wait_for_step(busy, 20)
    cluster.write("requirements.txt", "no-such-package-of-gpuctl\n")
    said = cluster.run("train", cluster.write("train.py", "print('never')\n"), code=1).stderr
    assert "no-such-package-of-gpuctl was not found in the package registry" in said
    assert "check the name, and the index that the nodes use" in said
    gate.open()
    outcome = cluster.wait_for_end(busy).outcome
    assert outcome is not None and outcome.result == "succeeded"


def lose_one(cluster: Cluster, job: str) -> None:
    """A node that is not rank 0 is taken at once, and another one comes."""
    before = cluster.now(job)
    assert before is not None
    other = next(member.node for member in before.members if member.node != cluster.rank0())
    cluster.run("preempt", other, "--notice", "0", "--replace-after", "0")
    cluster.wait(
        lambda: (
            (now := cluster.now(job)) and now.number > before.number and now.phase == "run" and len(now.members) == 4
        ),
        "four nodes again",
    )


def agent_logs(cluster: Cluster) -> str:
    folder: Path = cluster.node_dir("node-0").parent
    return "".join(path.read_text() for path in sorted(folder.glob("*/agent.log")))


@pytest.mark.slow
def test_condas_packages_are_on_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    channel = CondaChannel(tmp_path / "channel")
    channel.add_python()
    channel.add_pure("gamma", "3.0")
    channel.add("where", "1.0", {"share/where.txt": PLACEHOLDER.encode()}, depends=("gamma",))
    cluster.write("environment.yml", f"channels: [{channel.url}]\ndependencies: [where]\n")
    script = cluster.write("train.py", CONDA)
    cluster.up("2")
    done = cluster.run("train", script)
    assert "environment: environment.yml (1 package)" in done.stderr
    assert sorted(re.findall(r"(?m)^(node-\d)/\d \| gamma 3.0, torch \d\S+, at home True$", done.stdout)) == [
        "node-0",
        "node-1",
    ]
    (listed,) = json.loads(cluster.run("env", "ls", "-o", "json").stdout)
    assert listed["packages"]["where"] == "1.0" and listed["from"] == "environment.yml"


@pytest.mark.slow
def test_what_conda_cannot_solve_ends_the_job_with_its_reason(cluster: Cluster, tmp_path: Path) -> None:
    channel = CondaChannel(tmp_path / "channel")
    channel.add_python()
    cluster.write("environment.yml", f"channels: [{channel.url}]\ndependencies: [no-such-thing]\n")
    cluster.up("1")
    failed = cluster.run("train", cluster.write("train.py", "print(1)\n"), code=1)
    assert re.search(r"environment.yml: Cannot solve the request because of: .*no-such-thing", failed.stderr)
