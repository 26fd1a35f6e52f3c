"""Scripts that the end-to-end tests train."""

from __future__ import annotations

from tests.e2e.machine import Cluster

PLAIN_DDP = """
    import os, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"]
    print("env", " ".join(f"{n}={os.environ[n]}" for n in names + ["GPUCTL_JOB", "GPUCTL_NODE", "GPUCTL_ROUND"]))
    print("argv", sys.argv[1:], "cwd", os.getcwd() == os.path.dirname(os.path.abspath(__file__)), "name", __name__)
    print("to stderr", file=sys.stderr)
"""

COUNTING = """
    '''Learns a fixed problem step by step; each step is a little real work and a short rest.'''
    import argparse, os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from gpuctl import Checkpointer, log_metrics

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rest", type=float, default=0.01)
    parser.add_argument("--gate", action="append", default=[], help="STEP=FILE: not beyond STEP until FILE is there")
    parser.add_argument("--out")
    args = parser.parse_args()
    gates = {int(step): path for step, path in (gate.split("=", 1) for gate in args.gate)}

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    # Without this, DDP lays out its buckets anew after the first step of each process, which changes the order of
    # additions: the weights of an interrupted run would differ in the last bits.
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    checkpointer = Checkpointer(every=args.every)
    state = {"model": model, "optimizer": optimizer}
    start = checkpointer.restore(state) or 0
    print("starts at", start, "world", world, flush=True)
    for step in range(start, args.steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(24, 16, generator=generator)[rank::world]
        loss = (ddp(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log_metrics(step + 1, loss=loss)
        time.sleep(args.rest)
        checkpointer.step(step + 1, state)
        while (gate := gates.get(step + 1)) and not os.path.exists(gate):
            time.sleep(0.02)
    if rank == 0:
        print("finished", args.steps, "loss", round(loss.item(), 6), flush=True)
        if args.out:
            torch.save(model.state_dict(), args.out)
"""


class Gate:
    """A step that ``COUNTING`` does not go beyond until ``open``: nothing in a test has to be quicker than a job."""

    def __init__(self, cluster: Cluster, step: int) -> None:
        self._file = cluster.folder / f"gate-{step}"
        self.args = ("--gate", f"{step}={self._file}")

    def open(self) -> None:
        self._file.touch()


REFUSED = """
    import os, sys
    from gpuctl import Checkpointer
    from gpuctl.cluster.storage.bucket import Bucket, open_bucket
    from gpuctl.cluster.errors import GpuctlError, StoreError

    class Refusing(Bucket):
        refuses = True
        def put(self, key, data):
            if self.refuses:
                raise StoreError("the bucket refuses it")
            super().put(key, data)

    url = os.environ["GPUCTL_BUCKET"] + "/elsewhere"
    store = Refusing(open_bucket(url).raw, url)
    checkpointer = Checkpointer(store=store)
    checkpointer.save(1, {"count": 1})
    if "waits" in sys.argv:
        checkpointer.wait()
    if "again" in sys.argv:
        try:
            checkpointer.wait()
        except GpuctlError:
            store.refuses = False
        checkpointer.save(2, {"count": 2})
"""
"""Its first checkpoint is lost. With the argument ``waits`` it dies of that."""
