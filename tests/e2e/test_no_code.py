"""Scripts that know nothing of gpuctl but the name of a folder: they lose their node and go on on another."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from gpuctl.cluster import layout
from gpuctl.cluster.snapshots import snapshot_log
from gpuctl.cluster.storage.streams import StreamReader
from tests.e2e.machine import Cluster

PROBLEM = """
    '''What the scripts learn in 30 steps, with a checkpoint every 10. In the job's first life they wait at step 25 for
    their node to be lost or, if told so, for SIGTERM.'''
    import signal, sys, time
    import torch

    INPUT = torch.arange(1.0, 9.0) / 8
    told = []
    asked = []

    def layer():
        made = torch.nn.Linear(8, 1)
        torch.nn.init.ones_(made.weight)
        torch.nn.init.zeros_(made.bias)
        return made

    def tell(step, loss):
        told.append(step)
        if step == 25:
            handler = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *about: (asked.append(True), handler(*about)))
        print("step", step, "loss", float(loss), flush=True)
        if told[0] == 1 and step >= 25:
            wait()

    def wait():
        if "--until-asked" not in sys.argv:
            time.sleep(600)
        elif asked:
            time.sleep(1)  # transformers takes a signal seriously after 3 s
        while not asked:
            time.sleep(0.01)
"""

BARE = """
    import os, signal, sys
    import torch
    from problem import INPUT, layer, tell

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    path = os.path.join(os.environ["GPUCTL_CHECKPOINT_DIR"], "last.pt")
    model = layer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    start = 0
    if os.path.exists(path):
        saved = torch.load(path)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(start + 1, 31):
        loss = model(INPUT).square().mean()
        tell(step, loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or stop:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
        if stop:
            sys.exit()
    print("finished", step, flush=True)
"""

TRANSFORMERS = """
    import os
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
    from problem import INPUT, layer, tell

    class Model(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.layer = layer()

        def forward(self, inputs):
            return self.layer(inputs)

    class Telling(Trainer):
        def compute_loss(self, model, inputs, **_):
            loss = model(**inputs).square().mean()
            tell(self.state.global_step + 1, loss)
            return loss

    folder = os.environ["GPUCTL_CHECKPOINT_DIR"]
    trainer = Telling(
        model=Model(PreTrainedConfig()),
        args=TrainingArguments(
            folder, max_steps=30, save_steps=10, save_total_limit=2, learning_rate=0.02, lr_scheduler_type="constant",
            max_grad_norm=0, per_device_train_batch_size=1, use_cpu=True, disable_tqdm=True, report_to=[],
            enable_jit_checkpoint=True,
        ),
        train_dataset=[{"inputs": INPUT}] * 12,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    print("finished", trainer.state.global_step, flush=True)
"""

LIGHTNING = """
    import os
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from problem import INPUT, layer, tell

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = layer()

        def training_step(self, batch, _):
            loss = self.layer(batch).square().mean()
            tell(self.global_step + 1, loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.02)

    folder = os.environ["GPUCTL_CHECKPOINT_DIR"]
    last = os.path.join(folder, "last.ckpt")
    trainer = lightning.Trainer(
        max_steps=30, accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=folder,
        callbacks=[
            ModelCheckpoint(folder, every_n_train_steps=10, save_last="link", save_top_k=-1, save_on_exception=True)
        ],
    )
    data = torch.utils.data.DataLoader([INPUT] * 12)
    trainer.fit(Model(), data, ckpt_path=last if os.path.exists(last) else None)
    print("finished", trainer.global_step, flush=True)
"""

ACCELERATE = """
    import os
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from problem import INPUT, layer, tell

    class Count:
        step = 0

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

    project = ProjectConfiguration(os.environ["GPUCTL_CHECKPOINT_DIR"], automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = layer()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
    count = Count()
    accelerator.register_for_checkpointing(count)
    if os.path.isdir(os.path.join(project.project_dir, "checkpoints")):
        accelerator.load_state()
        project.iteration = count.step // 10
    while count.step < 30:
        count.step += 1
        loss = model(INPUT).square().mean()
        tell(count.step, loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if count.step % 10 == 0:
            accelerator.save_state()
    print("finished", count.step, flush=True)
"""

ONE_WRITES = """
    '''Rank 0 writes for all; every node reads what it wrote.'''
    import os
    import torch, torch.distributed as dist
    from problem import tell

    dist.init_process_group("gloo")
    path = os.path.join(os.environ["GPUCTL_CHECKPOINT_DIR"], "last.pt")
    start = torch.load(path)["step"] if os.path.exists(path) else 0
    for step in range(start + 1, 31):
        total = torch.ones(1)
        dist.all_reduce(total)
        tell(step, total)
        if step % 10 == 0 and dist.get_rank() == 0:
            torch.save({"step": step}, path + ".tmp")
            os.replace(path + ".tmp", path)
    print("finished", step, flush=True)
"""


SCRIPTS = [
    pytest.param(BARE, id="torch.save"),
    pytest.param(TRANSFORMERS, id="transformers", marks=pytest.mark.slow),
    pytest.param(LIGHTNING, id="lightning", marks=pytest.mark.slow),
    pytest.param(ACCELERATE, id="accelerate", marks=pytest.mark.slow),
]


def curve() -> list[float]:
    """The loss before each of the 30 steps if nothing is lost on the way."""
    weights = torch.cat([torch.ones(8), torch.zeros(1)]).requires_grad_()
    values = torch.cat([torch.arange(1.0, 9.0) / 8, torch.ones(1)])
    optimizer = torch.optim.Adam([weights], lr=0.02)
    losses = []
    for _ in range(30):
        loss = (weights @ values).square()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def is_kept(cluster: Cluster, job: str) -> bool:
    """The bucket has all the files of the first node's folder, as they are, but for logs that are still open."""
    running, newest = cluster.now(job), snapshot_log.newest(cluster.bucket, job)
    if running is None or newest is None:
        return False
    folder = cluster.node_dir(running.members[0].node) / "jobs" / job / "checkpoints"
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    there = {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in paths if "tfevents" not in path.name}
    return there.items() <= {path: file.modified_ns for path, file in newest.files.items()}.items()


def lines(cluster: Cluster, job: str, pattern: str) -> dict[tuple[int, int], list[tuple[str, ...]]]:
    """What workers printed, by (round, rank), as far as it matches."""
    found: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    for number, _, line in StreamReader(cluster.bucket, layout.logs(job)).read():
        if match := re.fullmatch(pattern, line["text"].strip()):
            found.setdefault((number, line["rank"]), []).append(match.groups())
    return dict(sorted(found.items()))


def told(cluster: Cluster, job: str) -> list[list[tuple[int, float]]]:
    """Step and loss in the order in which each worker of each round told them."""
    found = lines(cluster, job, r"step (\d+) loss (\S+)")
    return [[(int(step), float(loss)) for step, loss in worker] for worker in found.values()]


def finished(cluster: Cluster, job: str) -> int:
    """The step at which the last life of a script ended."""
    *_, [(step,)] = lines(cluster, job, r"finished (\d+)").values()
    return int(step)


def wait_for_step_25(cluster: Cluster, job: str) -> None:
    cluster.wait(lambda: any(life[-1][0] == 25 for life in told(cluster, job)), "step 25", timeout=120)


def lose_a_node_of(cluster: Cluster, job: str) -> None:
    """Power loss, once all that was saved at step 20 is in the bucket."""
    cluster.wait(lambda: is_kept(cluster, job), "what was saved at step 20 to be in the bucket")
    running = cluster.now(job)
    assert running
    cluster.kill(running.members[0].node)


def wait_for_the_next_life(cluster: Cluster, job: str, lives: int = 1) -> None:
    cluster.wait(lambda: len(told(cluster, job)) > lives, "another node to go on", timeout=120)


def has_succeeded(cluster: Cluster, job: str) -> bool:
    outcome = cluster.wait_for_end(job).outcome
    return outcome is not None and outcome.exit_code == 0


@pytest.fixture
def train(cluster: Cluster) -> Callable[..., str]:
    """Starts a script on one of two nodes; returns the job once it is at step 25."""

    def start(script: str, *args: str) -> str:
        cluster.env["HF_HUB_OFFLINE"] = "1"
        cluster.write("problem.py", PROBLEM)
        cluster.write("train.py", script)
        cluster.up("2")
        job = cluster.train("--nodes", "1", "train.py", *args)
        wait_for_step_25(cluster, job)
        return job

    return start


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_lost_its_node_goes_on_from_its_own_checkpoint_as_if_nothing_had_been(
    cluster: Cluster, train: Callable[..., str], script: str
) -> None:
    job = train(script)
    lose_a_node_of(cluster, job)
    wait_for_the_next_life(cluster, job)
    assert told(cluster, job)[-1][0][0] == 21
    assert has_succeeded(cluster, job)

    first, second = told(cluster, job)
    assert [step for step, _ in first + second] == [*range(1, 26), *range(21, 31)]
    undisturbed = pytest.approx(curve(), rel=1e-5)
    assert [loss for _, loss in first[:20] + second] == undisturbed, "weights and optimizer are those of step 20"
    assert finished(cluster, job) == 30
    assert is_kept(cluster, job), "and what it wrote last is in the bucket"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS[:3])
def test_a_script_that_saves_on_sigterm_loses_no_step_to_a_notice(
    cluster: Cluster, train: Callable[..., str], script: str
) -> None:
    job = train(script, "--", "--until-asked")
    running = cluster.now(job)
    assert running
    cluster.run("preempt", running.members[0].node, "--notice", "20", "--replace-after", "never")
    wait_for_the_next_life(cluster, job)
    assert has_succeeded(cluster, job)

    first, second = told(cluster, job)
    again = second[0][0]
    assert first[-1][0] <= again > 25, "no optimizer step is done twice"
    assert [step for step, _ in second] == [*range(again, 31)]
    assert [loss for _, loss in first[: again - 1] + second] == pytest.approx(curve(), rel=1e-5)
    assert finished(cluster, job) == 30


@pytest.mark.slow
def test_every_node_finds_what_one_of_them_wrote(cluster: Cluster) -> None:
    cluster.write("problem.py", PROBLEM)
    cluster.write("one.py", ONE_WRITES)
    cluster.up("3")
    job = cluster.train("one.py", "--nodes", "2")
    wait_for_step_25(cluster, job)
    lose_a_node_of(cluster, job)
    wait_for_the_next_life(cluster, job, lives=2)
    assert has_succeeded(cluster, job)
    assert [[step for step, _ in life] for life in told(cluster, job)] == [[*range(1, 26)]] * 2 + [[*range(21, 31)]] * 2
