"""JAX: data-parallel training that survives the loss of a node.

    python jax_circle.py
    gpuctl train --launcher jax examples/frameworks/jax_circle.py
    gpuctl mingle --id circle --nodes 2 --launcher jax -- python jax_circle.py

``jax.distributed.initialize()`` has no arguments: under gpuctl it finds its round by itself. A lost node ends all
processes, and the next round starts them anew, from the last file in ``$GPUCTL_CHECKPOINT_DIR``.
"""

import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

STEPS = int(os.environ.get("STEPS", "500"))
SAVE_EVERY = 50
BATCH = 480
"""Of all processes together, so that the result does not depend on how many there are."""


def forward(params, points):
    for weights, bias in params[:-1]:
        points = jnp.tanh(points @ weights + bias)
    weights, bias = params[-1]
    return points @ weights + bias


def loss_of(params, points, inside):
    logits = forward(params, points)
    return jnp.mean(jnp.maximum(logits, 0) - logits * inside + jnp.log1p(jnp.exp(-jnp.abs(logits))))


@jax.jit
def train_step(params, velocity, points, inside, asked):
    loss, gradient = jax.value_and_grad(loss_of)(params, points, inside)
    velocity = jax.tree.map(lambda v, g: 0.9 * v - 0.1 * g, velocity, gradient)
    # All processes learn at the same step whether one of them was asked to stop.
    return jax.tree.map(jnp.add, params, velocity), velocity, loss, jnp.max(asked)


def first_state():
    random = np.random.default_rng(0)
    sizes = [(2, 64), (64, 64), (64, 1)]
    params = [(random.normal(size=size).astype("f4") / size[0] ** 0.5, np.zeros(size[1], "f4")) for size in sizes]
    return params, jax.tree.map(np.zeros_like, params)


def main() -> None:
    asked_to_stop = []
    signal.signal(signal.SIGUSR1, lambda *_: asked_to_stop.append(True))
    if "GPUCTL_LAUNCHER" in os.environ:
        jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    file = Path(os.environ.get("GPUCTL_CHECKPOINT_DIR", "/tmp")) / "jax_circle.npz"
    step, state = 0, first_state()
    leaves, tree = jax.tree.flatten(state)
    if file.exists():
        with np.load(file) as saved:
            step, leaves = int(saved["step"]), [saved[f"leaf{number}"] for number in range(len(leaves))]
    params, velocity = jax.device_put(jax.tree.unflatten(tree, leaves), everywhere)
    rank, size = jax.process_index(), jax.process_count()
    print(f"rank {rank} of {size} begins after step {step}", flush=True)

    here = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    while step < STEPS:
        points = np.random.default_rng(step).uniform(-1, 1, (BATCH, 2)).astype("f4")
        inside = (np.linalg.norm(points, axis=1, keepdims=True) < 0.7).astype("f4")
        asked = np.full(jax.local_device_count(), bool(asked_to_stop))
        batch = [jax.make_array_from_process_local_data(split, part) for part in (points[here], inside[here], asked)]
        params, velocity, loss, stop = train_step(params, velocity, *batch)
        step += 1
        if rank == 0 and (step % SAVE_EVERY == 0 or stop or step == STEPS):
            print(f"step {step} loss {loss:.4f}", flush=True)
            leaves = jax.tree.leaves((params, velocity))
            new = file.with_suffix(".new")
            with new.open("wb") as out:
                np.savez(out, step=step, **{f"leaf{number}": np.asarray(leaf) for number, leaf in enumerate(leaves)})
            new.replace(file)
        if stop:
            return


if __name__ == "__main__":
    main()
