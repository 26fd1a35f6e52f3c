"""Saving and restoring a training's state.

Read in this order:

- ``checkpointer``: what a script calls
- ``round_saves``: the saves of one rank in one round
- ``save_plan``: what the ranks agree on before a save
- ``ranks``: what all ranks tell each other
- ``location``: which job's checkpoints, in which bucket
- ``state``: what a checkpoint holds of a training
- ``save``: from the tensors to the commit
- ``load``: from the bucket into the tensors
- ``replicas``: copies on the disks of nodes
- ``dcp``: the same behind ``torch.distributed.checkpoint``
- ``torch_export``: files of ``torch.save``
- ``tensor_bytes``, ``threads``: small helpers of the others
"""
