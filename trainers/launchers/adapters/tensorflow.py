"""TensorFlow: ``MultiWorkerMirroredStrategy``, by ``TF_CONFIG`` with the address and port of every process
(https://www.tensorflow.org/guide/distributed_training#TF_CONFIG).
"""

from __future__ import annotations

import json
import signal

from gpuctl.trainers.launchers.adapter import Launcher, Process

LEGACY = "tf_keras"
"""Keras 2. ``fit`` of Keras 3 fails under this strategy (tensorflow 2.21, keras 3.15: "Attempt to convert a value
(PerReplica…)")."""


def variables(process: Process) -> dict[str, str]:
    cluster = {"worker": list(process.peers)}
    found = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": process.rank}})}
    if LEGACY in process.packages and "TF_USE_LEGACY_KERAS" not in process.env:
        found["TF_USE_LEGACY_KERAS"] = "1"
    return found


LAUNCHER = Launcher(
    "tensorflow",
    variables,
    needs="tensorflow",
    install="pip install 'tensorflow[and-cuda]' tf_keras",
    packages=(LEGACY,),
    stop=signal.SIGUSR1,
    meets=True,
)
