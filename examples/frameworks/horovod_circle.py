"""Horovod: the classic script, which survives the loss of a node.

    gpuctl train --launcher horovod examples/frameworks/horovod_circle.py
    gpuctl mingle --id circle --nodes 2 --launcher horovod -- python horovod_circle.py

There is no ``horovodrun``: gpuctl tells each rank where the others are. A lost node ends all processes, and the next
round starts them anew, from the last file in ``$GPUCTL_CHECKPOINT_DIR``.
"""

import os
import signal
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

STEPS = int(os.environ.get("STEPS", "500"))
SAVE_EVERY = 50
BATCH = 240


def main() -> None:
    asked_to_stop = []
    signal.signal(signal.SIGUSR1, lambda *_: asked_to_stop.append(True))
    hvd.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05 * hvd.size(), momentum=0.9)
    # It begins without the state of the one that it is made of, so what was saved is loaded into it.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    file = Path(os.environ.get("GPUCTL_CHECKPOINT_DIR", "/tmp")) / "horovod_circle.pt"
    step = 0
    if file.exists():
        saved = torch.load(file, map_location=device)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    print(f"rank {hvd.rank()} of {hvd.size()} begins after step {step}", flush=True)

    while step < STEPS:
        torch.manual_seed(step * hvd.size() + hvd.rank())
        points = torch.rand(BATCH, 2, device=device) * 2 - 1
        inside = (points.norm(dim=1, keepdim=True) < 0.7).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        # All ranks learn at the same step whether one of them was asked to stop.
        loss, asked = hvd.allreduce(torch.tensor([loss.item(), float(bool(asked_to_stop))])).tolist()
        if hvd.rank() == 0 and (step % SAVE_EVERY == 0 or asked or step == STEPS):
            print(f"step {step} loss {loss:.4f}", flush=True)
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            new = file.with_suffix(".new")
            torch.save(state, new)
            new.replace(file)
        if asked:
            return


if __name__ == "__main__":
    main()
