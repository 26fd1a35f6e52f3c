"""``Trainer``: the same run on any world, and to the last bit the same run after losses."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from gpuctl import Retention
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.checkpoints import CheckpointIndex
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.worker_context import DRAINED, METRICS, PROGRESS, WorkerContext
from tests.trainers.rank_scripts import fitting
from tests.trainers.rank_scripts.checkpointing import same
from tests.trainers.rank_scripts.fitting import Killing, Listed, Waiting, network, records, trainer
from tests.trainers.ranks import Ranks, run
from tests.waiting import until


def job_env(folder: Path, number: int) -> dict[str, str]:
    """A worker's environment in round ``number`` of a job whose bucket is below ``folder``."""
    place = folder / f"round-{number}"
    place.mkdir()
    return WorkerContext("demo", f"file://{folder}/bucket", "job-1", number, "node-0", place, place, place).env()


def has_reached(progress: Path, step: int) -> bool:
    text = progress.read_text().strip(" \n\0") if progress.exists() else ""
    return text != "" and int(json.loads(text)["step"]) >= step


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize(("world", "batch"), [(1, 7), (2, 7), (3, 7), (3, 9), (4, 3)])
def test_a_gradient_is_the_mean_over_the_global_batch(world: int, batch: int, micro_batch: int | None) -> None:
    """Slices of different lengths, several micro-batches, and more ranks than samples."""
    expected = fitting.whole_gradients(batch)
    for found in run(world, fitting.gradients, {"global_batch": batch, "micro_batch": micro_batch}):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_the_losses_and_weights_do_not_depend_on_the_world(tmp_path: Path) -> None:
    """Three ranks, then one, then four: the curve is that of one process that was never disturbed."""
    curves: dict[str, dict[int, float]] = {"alone": {}, "moved": {}}
    options = {"checkpoints": str(tmp_path / "moved")}
    for name, world, steps in [("alone", 1, 18), ("moved", 3, 6), ("moved", 1, 12), ("moved", 4, 18)]:
        file = tmp_path / f"{name}-{steps}.jsonl"
        wanted = {"steps": steps, **(options if name == "moved" else {})}
        weights = run(world, fitting.fit, wanted, env={"GPUCTL_METRICS_FILE": str(file)})
        curves[name] |= {record["step"]: record["loss"] for record in records(file)}
        if name == "alone":
            (expected,) = weights
    assert list(curves["moved"]) == list(range(1, 19)), "no step is done twice"
    assert curves["moved"] == pytest.approx(curves["alone"], rel=1e-6)
    for found in weights:
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_the_checkpoint_with_the_best_loss_can_be_kept(tmp_path: Path) -> None:
    file, place = tmp_path / "metrics.jsonl", f"file://{tmp_path}/kept"
    keep = Retention(last=1, best="loss")
    options = {"checkpoints": place, "checkpoint_every": 37, "checkpoint_keep": keep, "steps": 40}
    run(2, fitting.fit, options, env={"GPUCTL_METRICS_FILE": str(file)})
    losses = {record["step"]: record["loss"] for record in records(file)}
    log = ledgers.checkpoints_in(open_bucket(place)).read().value or CheckpointIndex()
    told = {entry.step: entry.metrics["loss"] for entry in log.entries}
    assert losses[37] < losses[40], "the batch of step 37 is an easy one"
    assert told == {step: losses[step] for step in (37, 40)}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_killed_and_started_again_the_weights_are_the_same_to_the_last_bit(tmp_path: Path, rank: int) -> None:
    """With dropout, on three ranks, where the order of additions shows."""
    expected = run(3, fitting.fit, {}, 0.3)
    options = {"checkpoints": str(tmp_path / "kept"), "checkpoint_every": 4}
    committed = f"{tmp_path}/kept/ledger/{2:012d}"  # the first version raises the fence
    with Ranks(3, fitting.fit, options, 0.3, Killing(rank, 11, committed)) as ranks:
        assert ranks.wait(first=rank)[rank].code == -signal.SIGKILL
    file = tmp_path / "metrics.jsonl"
    found = run(3, fitting.fit, options, 0.3, env={"GPUCTL_METRICS_FILE": str(file)})
    assert next(records(file))["step"] in (5, 9), "the save of step 8 may have been on its way"
    assert same(found, expected)


def test_lost_before_its_first_checkpoint_a_run_begins_anew_and_ends_the_same(tmp_path: Path) -> None:
    expected = run(2, fitting.fit, {}, 0.3)
    options = {"checkpoints": str(tmp_path / "kept"), "checkpoint_every": 10}
    with Ranks(2, fitting.fit, options, 0.3, Killing(1, at=5)) as ranks:
        ranks.wait(first=1)
    assert same(run(2, fitting.fit, options, 0.3), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_noticed_at_any_moment_all_stop_at_one_step_and_the_run_ends_the_same(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    options = {"steps": 120, "checkpoint_every": 1000}
    (expected, *_) = run(3, fitting.fit, options, 0.3)
    env, go = job_env(tmp_path, 1), tmp_path / "go"
    progress = Path(env["GPUCTL_ROUND_DIR"]) / PROGRESS
    with Ranks(3, fitting.fit, options, 0.3, Waiting(100, str(go)), env=env) as ranks:
        for rank in chance.sample(range(3), 3):
            wanted = chance.randrange(1, 95)
            until(partial(has_reached, progress, wanted), f"step {wanted}")
            ranks.send(rank, signal.SIGTERM)
        go.touch()
        ended = ranks.wait()
    assert [(end.code, end.value) for end in ended] == [(0, None)] * 3, [end.said for end in ended]
    assert len(list(progress.parent.glob(f"{DRAINED}.*"))) == 3
    (entry,) = listing.committed(open_bucket(f"file://{tmp_path}/bucket"), "job-1")
    last = [record["step"] for record in records(progress.parent / METRICS)][-1]
    assert entry.step == last < 120

    env = job_env(tmp_path, 2)
    for found in run(3, fitting.fit, options, 0.3, env=env):
        assert same(found, expected)
    steps = [record["step"] for record in records(Path(env["GPUCTL_ROUND_DIR"]) / METRICS)]
    assert steps == list(range(last + 1, 121)), "no step is done twice, none is left out"


def test_dropout_depends_on_the_step_and_not_on_what_was_drawn_before() -> None:
    first, second = network(0.3), network(0.3)
    trainer(first).fit()
    torch.rand(5)
    trainer(second).fit()
    assert same(dict(second.state_dict()), dict(first.state_dict()))


def test_dropout_depends_on_seed_and_step_and_not_on_what_was_drawn_before() -> None:
    weights = []
    for drawn, seed in [(0, 5), (100, 5), (0, 6)]:
        model, data = network(0.3), fitting.samples()
        torch.rand(drawn)
        # All samples in each batch, so that the seed shows in the dropout alone.
        trainer(model, data=data, global_batch=len(data), seed=seed).fit()
        weights.append(dict(model.state_dict()))
    assert same(weights[0], weights[1])
    assert not torch.allclose(weights[0]["0.weight"], weights[2]["0.weight"], rtol=1e-6)


def test_a_finished_run_is_not_begun_again(tmp_path: Path) -> None:
    options = {"checkpoints": str(tmp_path / "kept")}
    first = run(2, fitting.fit, options)
    file = tmp_path / "metrics.jsonl"
    assert same(run(2, fitting.fit, options, env={"GPUCTL_METRICS_FILE": str(file)}), first)
    assert not file.exists() or file.read_text() == ""


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_metrics_tell_the_global_loss_and_progress_tells_every_step(tmp_path: Path, micro_batch: int | None) -> None:
    env = job_env(tmp_path, 1)
    run(3, fitting.fit, {"log_every": 5, "steps": 12, "micro_batch": micro_batch}, env=env)
    place = Path(env["GPUCTL_ROUND_DIR"])
    logged = list(records(place / METRICS))
    assert [record["step"] for record in logged] == [1, 5, 10, 12]
    assert logged[0]["steps_per_s"] > 0
    assert logged[0]["lr"] == pytest.approx(1e-2 * 0.99)
    assert logged[0]["loss"] == pytest.approx(fitting.whole_loss(7).item(), 1e-6)
    assert json.loads((place / PROGRESS).read_text())["step"] == 12


@pytest.mark.parametrize("count", [41, 2])
def test_an_evaluation_is_the_same_however_it_is_shared(count: int) -> None:
    """Also with fewer samples than ranks; BatchNorm's averages are rank 0's on every rank."""
    found = run(3, fitting.evaluated, count)
    assert len(set(found)) == 1
    assert found[0] * count == pytest.approx(round(found[0] * count))


def test_an_evaluation_by_three_ranks_counts_every_sample_once() -> None:
    model = network()
    alone = trainer(model, steps=1)
    seen: list[int] = []

    def count(output: Tensor, _target: Tensor) -> Tensor:
        seen.append(len(output))
        return torch.ones(len(output))

    assert alone.evaluate(fitting.samples(41), count, batch=10) == 1.0
    assert seen == [10, 10, 10, 10, 1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_in_the_forward_pass_and_not_in_the_weights(precision: str) -> None:
    ((met, weights, first, last),) = run(1, fitting.half, precision)
    assert met == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert weights == {torch.float32}
    assert last < 0.7 * first


@pytest.mark.parametrize("workers", [0, 2])
def test_any_map_style_data_set_will_do_with_workers_or_without(workers: int) -> None:
    expected, found = network(), network()
    trainer(expected).fit()
    trainer(found, data=Listed(), workers=workers, micro_batch=3).fit()
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 41


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": Endless()}, "Endless cannot be indexed.*use a map-style data set"),
        ({"global_batch": 42}, "global_batch=42 does not fit a data set of 41 samples"),
        ({"precision": "fp8"}, "unknown precision 'fp8'; use one of fp32, bf16, fp16"),
        ({"micro_batch": 0}, "micro_batch=0 is not a number of samples or steps; use 1 or more"),
        ({"log_every": 0}, "log_every=0 is not a number of samples or steps; use 1 or more"),
    ],
)
def test_what_cannot_be_trained_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        trainer(network(), **options)


def test_no_samples_have_no_mean() -> None:
    with pytest.raises(BadInput, match="the data set is empty"):
        trainer(network()).evaluate(fitting.samples(0), lambda output, _: output[:, 0])


def test_a_metric_that_takes_the_mean_itself_is_refused() -> None:
    with pytest.raises(BadInput, match="the metric has 1 values for 41 samples; return one for each"):
        trainer(network()).evaluate(fitting.samples(41), torch.nn.functional.cross_entropy)
