"""What a checkpoint holds of a training run.

- ``state_tensors``: a state as tensors by name
- ``load_targets``: and back
- ``treespec``: what is kept of it besides tensors
- ``private``: what is another one on each worker
- ``optimizers``: which optimizers can be kept
- ``rng``: random number generators
"""
