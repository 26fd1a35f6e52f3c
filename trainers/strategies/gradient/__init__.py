"""Methods that exchange gradients in each step, over DDP.

- ``synchronous``: the exact mean, by DDP itself, and DDP as all methods here use it.
- ``compressed``: through a codec: the largest values, one byte each, half the width.
- ``dgc``: the largest values, with momentum that is corrected for what waits.
- ``powersgd``: matrices of low rank.
- ``bucket_hook``: what they share: a bucket of DDP's, while the backward pass goes on.
- ``lane``: where the buckets of a model are worked on, one after the other.
- ``method_state``: what a method remembers, as a checkpoint holds it.
- ``sparsity``: a ratio that comes down over the first steps.
"""
