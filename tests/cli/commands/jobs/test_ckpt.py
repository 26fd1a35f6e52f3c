"""``gpuctl ckpt`` on checkpoints as jobs write them."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from gpuctl.cli.render.terminal import size
from gpuctl.cluster import layout
from gpuctl.cluster.checkpoints import deletion, listing
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import Fenced
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.records.rounds import JobOutcome
from gpuctl.cluster.records.snapshots import StoredFile
from gpuctl.cluster.snapshots import maintenance as snapshots_maintenance
from gpuctl.cluster.snapshots.snapshot_log import SnapshotLog
from tests.cluster.checkpoints.export.test_pull import keep
from tests.fakes.checkpoints import Raw, of_bytes
from tests.fakes.faults import Fault, Proxy
from tests.fakes.written_cluster import WrittenCluster
from tests.marks import slow_but_on_a_folder

JOB = "digits-1"
WEIGHTS = Raw("float32", (1000, 50), os.urandom(200_000), (2, 1))
STATE = {
    "model": {"0.weight": WEIGHTS},
    "optimizer": {"state": {"0.weight": {"step": 7}}, "param_groups": [{"lr": 0.1}]},
}


@pytest.fixture
def saved(written: WrittenCluster) -> WrittenCluster:
    """Steps 100 and 200 of one job; the second has the weights of the first."""
    return with_two(written)


@pytest.fixture
def saved_anywhere(written_anywhere: WrittenCluster) -> WrittenCluster:
    return with_two(written_anywhere)


def with_two(cluster: WrittenCluster) -> WrittenCluster:
    cluster.submit()
    maker = cluster.maker(JOB)
    maker.part_bytes = 50_000
    first = maker.save(100, {**STATE, "epoch": 1}, metrics={"loss": 0.5})
    maker.save(200, {**STATE, "epoch": 2}, 3, base=first, reason="notice", metrics={"loss": 0.25, "acc": 0.875})
    return cluster


def listed(cluster: WrittenCluster) -> tuple[CheckpointEntry, ...]:
    return listing.committed(cluster.store, JOB)


def harm(cluster: WrittenCluster, key: str, how: str) -> str:
    """``key`` is below the job's checkpoint folder."""
    spoil(cluster, f"{layout.checkpoints(JOB)}/{key}", how)
    return key


def spoil(cluster: WrittenCluster, key: str, how: str) -> None:
    data = cluster.store.get(key)
    assert data is not None, f"there is no {key} to harm"
    if how == "missing":
        cluster.store.delete([key])
    else:
        cluster.store.put(key, {"cut short": data[:-1], "flipped": bytes([data[0] ^ 1]) + data[1:]}[how])


# -- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_tells_step_size_round_age_reason_state_tier_and_metrics(saved: WrittenCluster) -> None:
    saved.maker(JOB).write(300, STATE, 3)  # not committed
    first, second = listed(saved)
    lines = saved.run("ckpt", "ls", "--job", JOB).stdout.splitlines()
    assert len(lines) == 3
    header = ["STEP", "SIZE", "ADDED", "ROUND", "SAVED", "REASON", "STATE", "LOCATION", "METRICS"]
    assert lines[0].split() == header
    cells = re.split(r"\s{2,}", lines[2].strip())
    assert cells[:4] == ["200", size(second.bytes), size(second.written), "3"]
    assert re.fullmatch(r"\d+ s ago", cells[4])
    assert cells[5:] == ["notice", "whole", "bucket", "loss=0.25 acc=0.875"]
    assert first.written == first.bytes > 10 * second.written


def test_ls_as_json_has_all_of_it(saved: WrittenCluster) -> None:
    harm(saved, f"{listed(saved)[1].path}/manifest.json", "flipped")
    told = json.loads(saved.run("ckpt", "ls", "-o", "json").stdout)
    assert (told["job"], told["files"]) == (JOB, None)
    first, second = told["checkpoints"]
    assert (first["step"], first["round"], first["reason"], first["nodes"]) == (100, 1, "interval", [])
    assert (first["whole"], first["faults"], first["metrics"]) == (True, [], {"loss": 0.5})
    assert 0 <= first["age_s"] < 60
    assert first["bytes"] == listed(saved)[0].bytes
    assert second["whole"] is False
    assert second["faults"] == [f"{second['path']}/manifest.json is not what was written"]


@pytest.mark.slow
def test_ls_tells_which_nodes_have_copies_of_the_last_one(written: WrittenCluster) -> None:
    job = written.submit().job
    written.round(job, 1, ("node-0", "node-1"))
    written.maker(job).save(100, STATE, nodes=("node-0", "node-1"))
    written.maker(job).save(200, STATE, nodes=("node-0", "node-1", "node-9"), attempt=2)
    tiers = [re.split(r"\s{2,}", line.strip())[7] for line in written.run("ckpt", "ls").stdout.splitlines()]
    assert tiers == ["LOCATION", "bucket", "2 nodes, bucket"]
    told = json.loads(written.run("ckpt", "ls", "-o", "json").stdout)
    assert [one["nodes"] for one in told["checkpoints"]] == [[], ["node-0", "node-1"]]
    done = JobOutcome(result="succeeded", exit_code=0)
    written.round(job, 2, ("node-0", "node-1"), phase="ended", outcome=done)
    assert "2 nodes" not in written.run("ckpt", "ls").stdout, "they clear their disks"


@pytest.mark.slow
def test_ls_tells_of_no_copies_once_the_one_that_they_were_of_is_removed(written: WrittenCluster) -> None:
    """Nodes have dropped those of 100 when 200 was committed."""
    job = written.submit().job
    nodes = ("node-0", "node-1")
    written.round(job, 1, nodes)
    for step in (100, 200):
        written.maker(job).save(step, STATE, nodes=nodes)
    written.run("ckpt", "rm", "200", "-y")
    told = json.loads(written.run("ckpt", "ls", "-o", "json").stdout)
    assert [(one["step"], one["nodes"], one["whole"]) for one in told["checkpoints"]] == [(100, [], True)]
    written.maker(job).save(300, STATE, nodes=nodes)
    written.run("ckpt", "rm", "100", "-y")
    assert "2 nodes, bucket" in written.run("ckpt", "ls").stdout


def test_ls_says_what_a_damaged_one_lacks(saved_anywhere: WrittenCluster) -> None:
    key = harm(saved_anywhere, f"{listed(saved_anywhere)[0].path}/00001-0001", "missing")
    done = saved_anywhere.run("ckpt", "ls")
    assert ["damaged" in line for line in done.stdout.splitlines()] == [False, True, True], "both need that part"
    assert done.stderr.splitlines() == [f"step {step} is damaged: {key} is missing" for step in (100, 200)]


def test_ls_tells_of_the_files_of_a_script(written: WrittenCluster) -> None:
    job = written.submit().job
    assert f"job {job} has no checkpoint" in written.run("ckpt", "ls").stderr
    keep(written.url, {"last.ckpt": b"x" * 2000, "a/b": b"y"}, {}, job)
    assert re.fullmatch(
        r"files of the script: 2, 2\.0 kB, kept \d+ s ago in round 1\n", written.run("ckpt", "ls").stdout
    )
    told = json.loads(written.run("ckpt", "ls", "-o", "json").stdout)
    assert told["checkpoints"] == []
    assert told["files"]["sizes"] == {"last.ckpt": 2000, "a/b": 1}


# -- pull -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "epoch"), [("100", 1), ("200", 2), ("last", 2)])
def test_pull_gives_safetensors_without_torch(saved_anywhere: WrittenCluster, step: str, epoch: int) -> None:
    done = saved_anywhere.run("ckpt", "pull", step, "out/here", "--format", "safetensors")
    assert done.stdout == "out/here\n"
    assert re.search(rf"step {100 * epoch} of {JOB}: 2\d\d kB", done.stderr)
    folder = saved_anywhere.work / "out" / "here"
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "values.json", "checkpoint.json"}
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert list(file.keys()) == ["0.weight"]
        assert file.get_tensor("0.weight").tobytes() == WEIGHTS.data
        assert file.metadata()["step"] == str(100 * epoch)
    assert json.loads((folder / "values.json").read_text()) == {
        "model": {"0.weight": {"tensor": "0.weight"}},
        "optimizer": STATE["optimizer"],
        "epoch": epoch,
    }
    about = json.loads((folder / "checkpoint.json").read_text())
    assert (about["job"], about["step"]) == (JOB, 100 * epoch)


@pytest.mark.parametrize("how", ["flipped", "cut short", "missing"])
@pytest.mark.parametrize("what", ["00000-0002", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_leaves_nothing(written: WrittenCluster, what: str, how: str) -> None:
    written.submit()
    maker = written.maker(JOB)
    maker.part_bytes = 50_000
    key = harm(written, f"{maker.save(100, STATE).path}/{what}", how)
    said = written.run("ckpt", "pull", "100", "out", "--format", "safetensors", code=1).stderr
    assert said.startswith(f"error: {key} ")
    assert said.endswith("use an earlier checkpoint; gpuctl ckpt verify shows which are intact\n")
    assert not (written.work / "out").exists()


@pytest.fixture
def held(written: WrittenCluster, s3_url: str, s3_endpoint: str) -> Iterator[tuple[WrittenCluster, Fault, list[str]]]:
    """A cluster on S3 with step 100, a read of a part of it that the network holds up, and a pull that meets it."""
    on_s3 = WrittenCluster(written.home, s3_url, name="held")
    on_s3.submit()
    maker = on_s3.maker(JOB)
    maker.part_bytes = 10_000
    maker.save(100, STATE)
    with Proxy(s3_endpoint).running() as proxy:
        fault = proxy.plan("hold", "GET", "00001-0001")
        url = s3_url.replace(s3_endpoint, proxy.url)
        yield on_s3, fault, ["ckpt", "pull", "100", "out", "--format", "safetensors", "--bucket", url]


@pytest.mark.slow
def test_a_pull_that_is_interrupted_leaves_nothing_and_waits_for_nobody(
    held: tuple[WrittenCluster, Fault, list[str]],
) -> None:
    cluster, fault, pull = held
    process = cluster.start(*pull)
    assert fault.met.wait(30)
    assert list((cluster.work / "out").iterdir())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    fault.gate.set()
    assert process.returncode == 130, said
    assert said == "interrupted\n"
    assert not (cluster.work / "out").exists()


@pytest.mark.slow
def test_a_step_that_is_removed_while_it_is_pulled_is_not_called_damaged(
    held: tuple[WrittenCluster, Fault, list[str]],
) -> None:
    cluster, fault, pull = held
    process = cluster.start(*pull)
    assert fault.met.wait(30)
    deletion.remove(cluster.store, JOB, listed(cluster))
    fault.gate.set()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said == "error: the checkpoint of step 100 was removed meanwhile; use a newer one: gpuctl ckpt ls\n"
    assert not (cluster.work / "out").exists()


@pytest.mark.parametrize("there", ["a file", "a folder with files"])
def test_pull_overwrites_nothing(saved: WrittenCluster, there: str) -> None:
    out = saved.work / "out"
    if there == "a file":
        out.write_text("precious")
    else:
        out.mkdir()
        (out / "mine").write_text("precious")
    said = saved.run("ckpt", "pull", "200", "out", "--format", "safetensors", code=2).stderr
    assert said.startswith(
        "error: cannot write to out: " if there == "a file" else "error: out is not empty; choose a new"
    )
    assert len(said.splitlines()) == 1
    assert (out if there == "a file" else out / "mine").read_text() == "precious"


def test_a_format_that_is_none_is_refused(saved: WrittenCluster) -> None:
    said = saved.run("ckpt", "pull", "200", "out", "--format", "pickle", code=2).stderr
    assert said == "error: --format pickle is not a format; use torch, dcp or safetensors\n"


@pytest.mark.slow
def test_without_torch_the_line_says_how_to_get_it_and_what_works_without(saved: WrittenCluster) -> None:
    hidden = saved.home / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    saved.env["PYTHONPATH"] = str(hidden)
    for form in ([], ["--format", "dcp"]):
        said = saved.run("ckpt", "pull", "200", "out", *form, code=1).stderr
        assert said == (
            f"error: --format {form[1] if form else 'torch'} needs torch, which is not installed; "
            "pip install 'gpuctl-spot[train]', or use --format safetensors\n"
        )
    saved.run("ckpt", "pull", "200", "out", "--format", "safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "dcp", "safetensors"])
def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(written: WrittenCluster, form: str) -> None:
    written.submit()
    written.maker(JOB).save(100, {"model": {"w": of_bytes(bytes(3_000_000))}})
    limit = (2_000_000, 2_000_000) if form == "safetensors" else (3_000_100, 3_000_100)
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "ckpt", "pull", "100", "out", "--format", form],
        cwd=written.work,
        env=written.env,
        text=True,
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: cannot write to out: File too large; choose another folder\n"
    assert not (written.work / "out").exists()


@pytest.mark.slow
def test_the_files_of_a_script_are_pulled_as_they_are(written: WrittenCluster) -> None:
    job = written.submit().job
    said = written.run("ckpt", "pull", "files", "out", code=2).stderr
    assert said == f"error: job {job} keeps no files; a script writes them to $GPUCTL_CHECKPOINT_DIR\n"
    keep(written.url, {"last.ckpt": b"x" * 2000, "a/b": b"y"}, {"best": "last.ckpt"}, job)
    done = written.run("ckpt", "pull", "files", "out")
    assert done.stderr == f"files of {job}: 2.0 kB\n"
    assert (written.work / "out" / "best").read_bytes() == b"x" * 2000
    assert (written.work / "out" / "a" / "b").read_bytes() == b"y"


# -- rm ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@slow_but_on_a_folder
def test_rm_tells_what_became_free_and_keeps_the_others_whole(saved_anywhere: WrittenCluster) -> None:
    """The second one needs the weights of the first, so they stay."""
    first, second = listed(saved_anywhere)
    said = saved_anywhere.run("ckpt", "rm", "100", "-y").stdout
    found = re.fullmatch(rf"deleted 1 checkpoint of {JOB}, which freed (\d+\.\d) kB\n", said)
    assert found
    assert float(found[1]) * 1000 < first.bytes / 10
    assert listed(saved_anywhere) == (second,)
    saved_anywhere.run("ckpt", "verify", "200")
    said = saved_anywhere.run("ckpt", "rm", "all", "-y").stdout
    assert re.fullmatch(rf"deleted 1 checkpoint of {JOB}, which freed 2\d\d kB\n", said)
    assert [item.key for item in saved_anywhere.maker(JOB).store.list("") if not item.key.startswith("ledger")] == []
    for verb in (["ls"], ["rm", "all", "-y"], ["verify"]):
        assert saved_anywhere.run("ckpt", *verb).stderr == f"job {JOB} has no checkpoint\n"


@pytest.mark.slow
def test_rm_and_gc_ask_and_without_anybody_to_ask_do_nothing(saved: WrittenCluster) -> None:
    before = saved.store.list("")
    for verb in (["rm", "200"], ["gc", "--keep-last", "1"]):
        assert "nothing was deleted; answer y, or use -y" in saved.run("ckpt", *verb, code=1).stderr
    assert saved.store.list("") == before


# -- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_reads_every_byte_and_says_whole(saved_anywhere: WrittenCluster) -> None:
    done = saved_anywhere.run("ckpt", "verify")
    assert done.stdout == "step 100: whole\nstep 200: whole\n"
    assert re.fullmatch(rf"2 checkpoints of {JOB}: 2\d\d kB\n", done.stderr)
    for which in ("200", "last"):
        assert saved_anywhere.run("ckpt", "verify", which).stdout == "step 200: whole\n"


@pytest.mark.parametrize(
    ("how", "said"),
    [("missing", "is missing"), ("cut short", "has 49999 bytes, not 50000"), ("flipped", "is not what was")],
)
def test_verify_names_the_damaged_part_and_what_a_restore_takes(saved: WrittenCluster, how: str, said: str) -> None:
    third = saved.maker(JOB).save(300, {"other": of_bytes(b"x" * 60_000)}, 3)
    saved.maker(JOB)
    key = harm(saved, f"{listed(saved)[0].path}/00000-0002", how)
    done = saved.run("ckpt", "verify", code=1)
    lines = done.stdout.splitlines()
    assert [lines[0], lines[2], lines[4]] == ["step 100: damaged", "step 200: damaged", "step 300: whole"]
    assert lines[1].startswith(f"  {key} {said}")
    assert done.stderr.splitlines()[-1] == (
        "error: damaged: step 100, 200; a restore takes step 300; delete it: gpuctl ckpt rm 100 200"
    )
    harm(saved, f"{third.path}/00000-0000", how)
    assert "a restore finds none; " in saved.run("ckpt", "verify", code=1).stderr


def test_verify_of_one_step_says_what_a_restore_falls_back_to(saved: WrittenCluster) -> None:
    key = harm(saved, f"{listed(saved)[1].path}/manifest.json", "flipped")
    done = saved.run("ckpt", "verify", "last", code=1)
    assert done.stdout == f"step 200: damaged\n  {key} is not what was written\n"
    assert "damaged: step 200; a restore takes step 100; delete it: gpuctl ckpt rm 200" in done.stderr
    assert saved.run("ckpt", "verify", "100").stdout == "step 100: whole\n"


_PEAK = """
import sys
from gpuctl.cli.main import run
assert run(sys.argv[1:]) == 0
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory was used")
def test_no_more_than_a_few_blocks_are_held_in_memory(written: WrittenCluster) -> None:
    written.submit()
    written.maker(JOB).save(100, {"model": {f"w{i}": of_bytes(os.urandom(1 << 20) * 64) for i in range(5)}})

    def peak_mb(*args: str) -> float:
        command = [sys.executable, "-c", _PEAK, "ckpt", *args]
        done = subprocess.run(command, cwd=written.work, env=written.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.splitlines()[-1]) / 1000

    idle = peak_mb("ls")
    assert peak_mb("verify") < idle + 100
    assert peak_mb("pull", "100", "out", "--format", "safetensors") < idle + 100


# -- gc ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@slow_but_on_a_folder
def test_gc_shows_what_goes_and_deletes_only_that(saved_anywhere: WrittenCluster) -> None:
    maker = saved_anywhere.maker(JOB)
    maker.part_bytes = 50_000
    maker.write(150, {"model": of_bytes(os.urandom(70_000))}, 1, attempt=2)
    before = saved_anywhere.store.list("")
    done = saved_anywhere.run("ckpt", "gc", "--dry-run")
    assert done.stdout == "2 objects that no checkpoint needs, left by past rounds\n"
    found = re.fullmatch(r"all this would free (7\d\.\d kB); nothing was deleted\n", done.stderr)
    assert found
    assert saved_anywhere.store.list("") == before
    assert saved_anywhere.run("ckpt", "gc", "-y").stdout.splitlines()[-1] == f"freed {found[1]}"
    assert saved_anywhere.run("ckpt", "gc", "-y").stderr == f"job {JOB} has nothing to delete\n"
    done = saved_anywhere.run("ckpt", "gc", "--keep-last", "1", "-y")
    assert done.stdout.splitlines()[0] == "step 100: no rule keeps it"
    assert saved_anywhere.run("ckpt", "verify").stdout == "step 200: whole\n"


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (["--keep-last", "2"], [400, 500]),
        (["--keep-last", "1", "--keep-every", "200"], [200, 400, 500]),
        (["--keep-last", "1", "--keep-best", "loss"], [300, 500]),
        (["--keep-last", "1", "--keep-best", "loss:max"], [100, 500]),
        (["--keep-every", "200"], [200, 300, 400, 500]),
    ],
)
def test_gc_keeps_what_any_rule_keeps(written: WrittenCluster, rules: list[str], kept: list[int]) -> None:
    written.submit()
    for step, loss in ((100, 5.0), (200, 3.0), (300, 1.0), (400, 2.0), (500, 4.0)):
        written.maker(JOB).save(step, {"epoch": step}, metrics={"loss": loss})
    written.run("ckpt", "gc", "-y", *rules)
    assert [entry.step for entry in listed(written)] == kept
    written.run("ckpt", "verify")


@pytest.mark.slow
def test_gc_takes_the_last_rounds_leavings_once_the_job_has_ended(written: WrittenCluster) -> None:
    written.submit()
    written.maker(JOB).save(100, STATE, 2)
    written.maker(JOB).write(200, STATE, 2)
    assert "nothing to delete" in written.run("ckpt", "gc", "-y").stderr
    written.end(JOB, 2, JobOutcome(result="failed", exit_code=1))
    assert "freed" in written.run("ckpt", "gc", "-y").stdout
    assert written.run("ckpt", "verify").stdout == "step 100: whole\n"


# -- files of a script ------------------------------------------------------------------------------------------------

ENDED = JobOutcome(result="succeeded", exit_code=0)


def with_files(cluster: WrittenCluster) -> str:
    """A job that only keeps files, in two sets; ``common`` is in both. Returns its id."""
    job = cluster.submit().job
    keep(cluster.url, {"last.ckpt": b"x" * 2000, "common": b"c" * 500}, {"best": "last.ckpt"}, job)
    keep(cluster.url, {"last.ckpt": b"y" * 3000, "common": b"c" * 500}, {}, job)
    return job


def blob(cluster: WrittenCluster, job: str, path: str, which: int = -1) -> str:
    """The key of what a set has at ``path``."""
    return f"{layout.files(job)}/blobs/{snapshots_maintenance.sets(cluster.store, job)[which].files[path].blob}"


@pytest.mark.slow
def test_verify_reads_the_files_of_a_script_too(written_anywhere: WrittenCluster) -> None:
    job = with_files(written_anywhere)
    done = written_anywhere.run("ckpt", "verify")
    assert done.stdout == "files of the set before: whole\nfiles: whole\n"
    assert re.fullmatch(rf"files of {job}: 5\.\d kB\n", done.stderr), "each blob once"
    written_anywhere.maker(job).save(100, {"epoch": 1})
    assert written_anywhere.run("ckpt", "verify").stdout.splitlines()[::2] == ["step 100: whole", "files: whole"]
    assert "files" not in written_anywhere.run("ckpt", "verify", "100").stdout
    assert "step" not in written_anywhere.run("ckpt", "verify", "files").stdout


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "is missing"),
        ("cut short", "has 2999 bytes, not 3000"),
        ("flipped", "is damaged: its SHA-256 does not match"),
    ],
)
def test_verify_names_the_damaged_file_and_what_a_restore_takes(written: WrittenCluster, how: str, said: str) -> None:
    job = with_files(written)
    key = blob(written, job, "last.ckpt")
    spoil(written, key, how)
    done = written.run("ckpt", "verify", code=1)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["files of the set before: whole", "files: damaged"]
    assert lines[2].startswith(f"  last.ckpt: {key} {said}")
    assert len(lines) == 3
    assert re.fullmatch(r"error: damaged: files; a restore takes those of \d+ s ago", done.stderr.splitlines()[-1])
    spoil(written, blob(written, job, "last.ckpt", 0), how)
    done = written.run("ckpt", "verify", "files", code=1)
    assert done.stdout.splitlines()[::2] == ["files of the set before: damaged", "files: damaged"]
    assert done.stderr.splitlines()[-1] == (
        "error: damaged: files; a restore finds none; delete it: gpuctl ckpt rm files"
    )


def test_a_file_of_many_chunks_is_verified(written: WrittenCluster) -> None:
    job = written.submit().job
    keep(written.url, {"large": bytes(range(256)) * 70_000}, {}, job)
    assert written.run("ckpt", "verify").stdout == "files: whole\n"
    spoil(written, blob(written, job, "large"), "flipped")
    assert "is damaged: its SHA-256 does not match" in written.run("ckpt", "verify", code=1).stdout


@pytest.mark.slow
@slow_but_on_a_folder
def test_rm_deletes_the_files_of_a_job_that_is_over(written_anywhere: WrittenCluster) -> None:
    job = with_files(written_anywhere)
    written_anywhere.end(job, 1, ENDED)
    before = written_anywhere.store.list("")
    said = written_anywhere.run("ckpt", "rm", "files", code=1).stderr
    assert said == "error: nothing was deleted; answer y, or use -y\n"
    assert written_anywhere.store.list("") == before
    done = written_anywhere.run("ckpt", "rm", "files", "-y")
    assert re.fullmatch(rf"deleted the script's files of {job}, which freed 5\.\d kB\n", done.stdout)
    assert snapshots_maintenance.objects(written_anywhere.store, job) == []
    for verb in (["ls"], ["rm", "all", "-y"], ["verify"]):
        assert written_anywhere.run("ckpt", *verb).stderr == f"job {job} has no checkpoint\n"


@pytest.mark.slow
def test_rm_all_deletes_checkpoints_and_files(written: WrittenCluster) -> None:
    job = with_files(written)
    written.maker(job).save(100, STATE)
    written.maker(job).save(200, STATE)
    written.end(job, 1, ENDED)
    done = written.run("ckpt", "rm", "100", "files", "-y")
    assert done.stdout.startswith(f"deleted 1 checkpoint and the script's files of {job}, which freed 2")
    keep_late = SnapshotLog(written.store, job, 1, 0, SystemClock())
    with pytest.raises(Fenced):
        keep_late.commit({"late": StoredFile(link="x")})
    written.run("ckpt", "rm", "all", "-y")
    assert written.run("ckpt", "ls").stderr == f"job {job} has no checkpoint\n"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["files", "all"])
@pytest.mark.parametrize("phase", ["queued", "runs"])
def test_the_files_of_a_job_that_goes_on_are_not_deleted(written: WrittenCluster, what: str, phase: str) -> None:
    job = with_files(written)
    written.maker(job).save(100, STATE)
    if phase == "runs":
        written.round(job, 1, ("node-0",))
    before = written.store.list("")
    said = written.run("ckpt", "rm", what, "-y", code=1).stderr
    assert said == (
        f"error: job {job} is still running and uses its files; "
        f"cancel it first: gpuctl cancel {job}; or name the steps to delete\n"
    )
    assert written.store.list("") == before
    written.run("ckpt", "rm", "100", "-y")
    assert written.run("ckpt", "verify", "files").stdout.endswith("files: whole\n")


def test_what_an_interrupted_rm_left_goes_with_the_next(written: WrittenCluster) -> None:
    job = with_files(written)
    left = blob(written, job, "last.ckpt")
    written.end(job, 1, ENDED)
    written.run("ckpt", "rm", "files", "-y")
    written.store.put(left, b"y" * 3000)
    assert "freed 3.0 kB" in written.run("ckpt", "rm", "files", "-y").stdout
    assert snapshots_maintenance.objects(written.store, job) == []


@pytest.mark.parametrize("verb", [["rm", "files", "-y"], ["verify", "files"]])
def test_a_job_that_keeps_no_files_is_told_so(saved: WrittenCluster, verb: list[str]) -> None:
    said = saved.run("ckpt", *verb, code=2).stderr
    assert said == f"error: job {JOB} keeps no files; a script writes them to $GPUCTL_CHECKPOINT_DIR\n"
    assert len(listed(saved)) == 2


# -- bad input --------------------------------------------------------------------------------------------------------

VERBS = {
    "ls": ["ls"],
    "pull": ["pull", "last", "out"],
    "rm": ["rm", "all", "-y"],
    "verify": ["verify"],
    "gc": ["gc", "-y"],
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_no_job_an_unknown_job_and_no_bucket(written: WrittenCluster, verb: str) -> None:
    args = ["ckpt", *VERBS[verb]]
    said = written.run(*args, code=2).stderr
    assert said == "error: no job has been started on this cluster; start one with `gpuctl train script.py`\n"
    written.submit()
    said = written.run(*args, "--job", "nope", code=2).stderr
    assert said == f"error: unknown job 'nope'; the last ones: {JOB}\n"
    said = written.run(*args, "--bucket", "file:///no/such/folder", code=2).stderr
    assert said == "error: folder /no/such/folder does not exist; check --bucket, or run `gpuctl up`\n"


@pytest.mark.slow
def test_a_bucket_that_is_away_is_one_line(written: WrittenCluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"s3://b/p?endpoint=http://127.0.0.1:{taken.getsockname()[1]}&access_key_id=a&secret_access_key=b"
        running = {verb: written.start("ckpt", *VERBS[verb], "--bucket", url) for verb in VERBS}
        for verb, process in running.items():
            printed, said = process.communicate(timeout=60)
            assert (process.returncode, printed) == (1, ""), verb
            assert re.fullmatch(r"error: the bucket s3://b/p did not answer for '.*': .*; try again\n", said), verb


@pytest.mark.parametrize("verb", [["pull", "7", "out"], ["rm", "7", "-y"], ["rm", "100", "7", "-y"], ["verify", "7"]])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(saved: WrittenCluster, verb: list[str]) -> None:
    said = saved.run("ckpt", *verb, code=2).stderr
    assert said == f"error: job {JOB} has no checkpoint of step 7; it has: 100, 200\n"
    assert len(listed(saved)) == 2


@pytest.mark.slow
def test_a_step_of_a_job_without_any_is_refused(written: WrittenCluster) -> None:
    written.submit()
    for verb in (["pull", "last", "out"], ["verify", "5"]):
        said = written.run("ckpt", *verb, code=2).stderr
        assert said == f"error: job {JOB} has no checkpoint of step {verb[1]}; it has: none\n"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (["--keep-last", "0"], "--keep-last 0 is too few; use 1 or more"),
        (["--keep-last", "x"], "--keep-last x is not a whole number; use 1 or more"),
        (["--keep-every", "-1"], "--keep-every -1 is too few; use 1 or more"),
        (
            ["--keep-best", "loss:most"],
            "--keep-best loss:most is not a metric with a direction; use one such as loss, or acc",
        ),
        (
            ["--keep-best", ":max"],
            "--keep-best :max is not a metric with a direction; use one such as loss, or accuracy:max",
        ),
        (["--keep-best", "f1"], f"no checkpoint of job {JOB} has a metric 'f1'; they have: acc, loss"),
    ],
)
def test_a_rule_that_is_none_is_refused(saved: WrittenCluster, rule: list[str], said: str) -> None:
    line = saved.run("ckpt", "gc", "-y", *rule, code=2).stderr
    assert line.startswith(f"error: {said}")
    assert len(line.splitlines()) == 1
    assert len(listed(saved)) == 2


@pytest.mark.slow
def test_without_a_job_it_is_the_newest_that_has_what_is_asked_for(written: WrittenCluster, tmp_path: Path) -> None:
    """Such as before `gpuctl verify`; what deletes takes no other than the newest."""
    job = written.submit().job
    written.checkpoint(job, 5, {"weight": b"x"})
    later = written.submit("verify.py").job
    for args in (["ls"], ["verify"], ["pull", "last", str(tmp_path / "out"), "--format", "safetensors"]):
        assert f"job {job}, the newest that has checkpoints\n" in written.run("ckpt", *args).stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert written.run("ckpt", "rm", "all", "-y").stderr == f"job {later} has no checkpoint\n"
    assert len(listing.committed(written.store, job)) == 1
    assert "the newest that has" not in written.run("ckpt", "ls", "--job", job).stderr
    assert written.run("ckpt", "ls", "--job", later).stderr == f"job {later} has no checkpoint\n"
