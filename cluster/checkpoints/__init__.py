"""Committed checkpoints, as everybody but the training itself sees them: without torch.

Read in this order:

- ``manifest``: what a checkpoint consists of
- ``commit_log``: which checkpoints are committed, and what may be deleted
- ``retention``: which of them stay
- ``listing``: find them
- ``block_reader``: read a part of one, and check it
- ``verification``: whether they are whole
- ``deletion``: remove them, and what was left behind
- ``treespec``: what is kept of a state besides its tensors
- ``replica_layout``: copies on the disks of nodes
- ``export``: files that other programs read
"""
