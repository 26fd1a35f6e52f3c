"""Scripts that know nothing of gpuctl but the name of a folder: they lose their node and go on on another."""

from __future__ import annotations

import importlib.util
import re

import pytest

from gpuctl.cluster import filesets
from tests.e2e.machine import Cluster

BARE = """
    import os, signal, sys, time
    import torch

    stop = []
    if "--listen" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    path = os.path.join(os.environ["GPUCTL_CHECKPOINT_DIR"], "last.pt")
    model = torch.nn.Linear(8, 8)
    start = 0
    if os.path.exists(path):
        saved = torch.load(path)
        start = saved["step"]
        model.load_state_dict(saved["model"])

    def save(step):
        torch.save({"step": step, "model": model.state_dict()}, path + ".tmp")
        os.replace(path + ".tmp", path)

    print("starts at", start, flush=True)
    for step in range(start, 200):
        with torch.no_grad():
            model.weight += 1
        time.sleep(0.05)
        if stop:
            save(step + 1)
            print("saved at", step + 1, flush=True)
            sys.exit(0)
        if (step + 1) % 40 == 0:
            save(step + 1)
    save(200)
    print("finished", flush=True)
"""

ONE_WRITES = """
    '''Rank 0 writes for all; every node reads what it wrote.'''
    import os, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    path = os.path.join(os.environ["GPUCTL_CHECKPOINT_DIR"], "last.pt")
    start = torch.load(path)["step"] if os.path.exists(path) else 0
    print("starts at", start, flush=True)
    for step in range(start, 120):
        total = torch.ones(1)
        dist.all_reduce(total)
        time.sleep(0.05)
        if (step + 1) % 30 == 0 and dist.get_rank() == 0:
            torch.save({"step": step + 1}, path + ".tmp")
            os.replace(path + ".tmp", path)
    print("finished", flush=True)
"""

TRANSFORMERS = """
    import os, time
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Slow(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            print("starts at", state.global_step, flush=True)
        def on_step_end(self, args, state, control, **_):
            time.sleep(0.1)

    folder = os.environ["GPUCTL_CHECKPOINT_DIR"]
    tokens = torch.randint(0, 50, (64, 16), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=1)),
        args=TrainingArguments(folder, max_steps=120, save_steps=30, save_total_limit=2, report_to=[],
                               per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Slow()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    print("finished", trainer.state.global_step, flush=True)
"""

LIGHTNING = """
    import os, time
    import torch
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
        def on_train_start(self):
            print("starts at", self.global_step, flush=True)
        def training_step(self, batch, _):
            time.sleep(0.1)
            return self.layer(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    folder = os.environ["GPUCTL_CHECKPOINT_DIR"]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 8)), batch_size=1)
    trainer = lightning.Trainer(
        max_steps=120, accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=30, save_last="link", save_top_k=-1)],
    )
    last = os.path.join(folder, "last.ckpt")
    trainer.fit(Model(), data, ckpt_path=last if os.path.exists(last) else None, weights_only=False)
    print("finished", trainer.global_step, flush=True)
"""

ACCELERATE = """
    import os, time
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    folder = os.environ["GPUCTL_CHECKPOINT_DIR"]
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2),
    )
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    steps = torch.zeros(1)

    class Count:
        step = 0
        def state_dict(self):
            return {"step": self.step}
        def load_state_dict(self, state):
            self.step = state["step"]

    count = Count()
    accelerator.register_for_checkpointing(count)
    saved = os.path.join(folder, "checkpoints")
    if os.path.isdir(saved) and os.listdir(saved):
        accelerator.load_state()
        accelerator.project_configuration.iteration = len(os.listdir(saved)) and count.step // 30
    print("starts at", count.step, flush=True)
    while count.step < 120:
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        count.step += 1
        if count.step % 30 == 0:
            accelerator.save_state()
    print("finished", count.step, flush=True)
"""


def starts(cluster: Cluster, job: str) -> list[int]:
    """The step that each start of the script began with, on the node that said so last."""
    return [int(step) for step in re.findall(r"starts at (\d+)", cluster.run("logs", job).stdout)]


def lose_the_node_of(cluster: Cluster, job: str) -> None:
    """Once a checkpoint is there: power loss."""

    def has_one() -> bool:
        newest = filesets.newest(cluster.bucket, job)  # frameworks write small files about themselves first
        return newest is not None and any(file.size > 1000 for file in newest.files.values())

    cluster.wait(has_one, "a checkpoint in the bucket")
    running = cluster.now(job)
    assert running
    cluster.kill(running.members[0].node)


def test_a_script_that_saves_files_goes_on_where_they_were_when_its_node_is_lost(cluster: Cluster) -> None:
    cluster.write("bare.py", BARE)
    cluster.up("2")
    job = cluster.train("bare.py", "--nodes", "1")
    lose_the_node_of(cluster, job)
    assert cluster.wait_for_end(job).outcome.exit_code == 0  # type: ignore[union-attr]
    first, second = starts(cluster, job)
    assert first == 0 and second >= 40 and second % 40 == 0
    newest = filesets.newest(cluster.bucket, job)
    assert newest and set(newest.files) == {"last.pt"}, "and what it wrote last is in the bucket"


def test_a_script_that_saves_on_sigterm_loses_no_step_to_a_notice(cluster: Cluster) -> None:
    cluster.write("bare.py", BARE)
    cluster.up("2")
    job = cluster.train("--nodes", "1", "bare.py", "--", "--listen")
    cluster.wait(lambda: "starts at" in cluster.run("logs", job).stdout, "the script to start")
    running = cluster.now(job)
    assert running
    cluster.run("preempt", running.members[0].node, "--notice", "20", "--replace-after", "never")
    assert cluster.wait_for_end(job).outcome.exit_code == 0  # type: ignore[union-attr]
    saved = [int(step) for step in re.findall(r"saved at (\d+)", cluster.run("logs", job).stdout)]
    assert len(saved) == 1 and starts(cluster, job) == [0, saved[0]]


def test_every_node_finds_what_one_of_them_wrote(cluster: Cluster) -> None:
    cluster.write("one.py", ONE_WRITES)
    cluster.up("3")
    job = cluster.train("one.py", "--nodes", "2")
    lose_the_node_of(cluster, job)
    assert cluster.wait_for_end(job).outcome.exit_code == 0  # type: ignore[union-attr]
    first, second = sorted(set(starts(cluster, job)))
    assert first == 0 and second in (30, 60, 90)
    assert len(starts(cluster, job)) == 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("package", "script"),
    [("transformers", TRANSFORMERS), ("lightning", LIGHTNING), ("accelerate", ACCELERATE)],
    ids=lambda value: value if value.isidentifier() else "",
)
def test_a_framework_goes_on_from_its_own_checkpoint(cluster: Cluster, package: str, script: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -c constraints.txt lightning accelerate transformers")
    cluster.write("train.py", script)
    cluster.up("2")
    job = cluster.train("train.py", "--nodes", "1")
    lose_the_node_of(cluster, job)
    ended = cluster.wait_for_end(job, timeout=200)
    assert ended.outcome and ended.outcome.exit_code == 0, ended.outcome
    first, second = starts(cluster, job)
    assert first == 0 and second in (30, 60, 90)
    assert "finished 120" in cluster.run("logs", job).stdout
