"""``gpuctl.jax.initialize()``: join the processes of this round, under ``--launcher jax``, ``gpuctl mingle`` or alone."""

from gpuctl.trainers.jax_world import initialize

__all__ = ["initialize"]
