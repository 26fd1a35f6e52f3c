"""From the bucket into tensors.

- ``sources``: where blocks are read from, the nearest place first
- ``restore``: a checkpoint into a state, on all ranks at once
- ``reader``: ranges of parts, read side by side and checked
"""
