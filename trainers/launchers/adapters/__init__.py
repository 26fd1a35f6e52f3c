"""The launchers that ``--launcher`` names, one module each.

- ``torchrun``: PyTorch
- ``jax``: ``jax.distributed``
- ``tensorflow``: ``MultiWorkerMirroredStrategy``
- ``horovod``: Horovod on gloo
- ``exec``: any program

Another one is one more file here; its name is the module's (see ``docs/internals/adding-a-launcher.md``).
"""
