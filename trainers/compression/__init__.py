"""What gradients are turned into before they travel, and how ranks add up what arrives.

- ``codec``: the protocol of a codec: a vector to bytes, and those added to a vector. Codecs know no group.
- ``topk``: the largest values and where they stand; ``int8``: one byte a value, rounded at random.
- ``cast``: half the width, for a sum that is taken in that width.
- ``reducers``: the mean of a vector over all ranks of a group, with each kind of codec.
- ``error_feedback``: what was not sent is added to the next gradient.
- ``packing``: positions of 12 bits.
"""
