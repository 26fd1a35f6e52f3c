"""TensorFlow: ``MultiWorkerMirroredStrategy`` that survives the loss of a node.

    python tensorflow_circle.py
    gpuctl train --launcher tensorflow examples/frameworks/tensorflow_circle.py
    gpuctl mingle --id circle --nodes 2 --launcher tensorflow -- python tensorflow_circle.py

gpuctl sets ``TF_CONFIG`` anew in each round. A lost node ends all processes, and the next round starts them again,
from the last file in ``$GPUCTL_CHECKPOINT_DIR``. Needs tf_keras: this strategy does not work with Keras 3's ``fit``.
"""

import os
import signal
from pathlib import Path

import numpy as np
import tensorflow as tf

STEPS = int(os.environ.get("STEPS", "500"))
SAVE_EVERY = 50
BATCH = 480
"""Of all processes together, so that the result does not depend on how many there are."""


def main() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # After the strategy, which takes SIGTERM for itself.
    asked_to_stop = []
    signal.signal(signal.SIGUSR1, lambda *_: asked_to_stop.append(True))
    rank, size = strategy.cluster_resolver.task_id or 0, max(1, strategy.extended._num_workers)

    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [tf.keras.layers.Dense(64, "tanh", input_shape=(2,)), tf.keras.layers.Dense(64, "tanh")]
        model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(1)])
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    variables = [*model.trainable_variables, *optimizer.variables]

    @tf.function
    def train_step(points, inside, asked):
        def on_each(points, inside):
            with tf.GradientTape() as tape:
                errors = tf.nn.sigmoid_cross_entropy_with_logits(inside, model(points))
                loss = tf.reduce_sum(errors) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        loss = strategy.reduce("SUM", strategy.run(on_each, (points, inside)), axis=None)
        # All processes learn at the same step whether one of them was asked to stop.
        return loss, strategy.reduce("SUM", strategy.run(lambda: tf.identity(asked)), axis=None) > 0

    file = Path(os.environ.get("GPUCTL_CHECKPOINT_DIR", "/tmp")) / "tensorflow_circle.npz"
    step = 0
    if file.exists():
        with np.load(file) as saved:
            step = int(saved["step"])
            for number, variable in enumerate(variables):
                variable.assign(saved[f"variable{number}"])
    print(f"rank {rank} of {size} begins after step {step}", flush=True)

    here = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    while step < STEPS:
        points = np.random.default_rng(step).uniform(-1, 1, (BATCH, 2)).astype("f4")
        inside = (np.linalg.norm(points, axis=1, keepdims=True) < 0.7).astype("f4")
        loss, stop = train_step(
            tf.constant(points[here]), tf.constant(inside[here]), tf.constant(float(bool(asked_to_stop)))
        )
        step += 1
        if rank == 0 and (step % SAVE_EVERY == 0 or stop or step == STEPS):
            print(f"step {step} loss {loss:.4f}", flush=True)
            new = file.with_suffix(".new")
            with new.open("wb") as out:
                np.savez(out, step=step, **{f"variable{n}": one.numpy() for n, one in enumerate(variables)})
            new.replace(file)
        if stop:
            return


if __name__ == "__main__":
    main()
