"""What runs inside a worker process.

- ``trainer``: a training loop that survives losing machines
- ``strategies``: ways of training together: how gradients are exchanged, or weights
- ``exchange``: means of tensors between workers that train apart
- ``compression``: what gradients are turned into before they travel
- ``checkpoint``: saving and restoring a state
- ``data``: batches and the order of samples
- ``metrics``: what a script reports of itself
- ``transport``: bytes between processes
- ``launchers``: how a node's worker processes are started
- ``diagnostics``: the job behind ``gpuctl verify``
- ``stop_signal``: agreement on the step at which all ranks stop
- ``world``: rank, world size, and the job's store
- ``gloo_exit``: processes that have used gloo end as their script does
- ``stack_signal``: a signal on which a worker writes down what it does
- ``log_output``: a full disk drops what a worker prints, and ends nothing
- ``failing_exit``: a process of JAX, TensorFlow or Horovod that fails ends at once
- ``jax_world``: ``jax.distributed.initialize`` knows the round
- ``gpus``, ``console``: small helpers of the others
"""
