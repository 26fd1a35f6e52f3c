"""What a step is trained on.

- ``sampling``: which samples a step takes, by seed and step alone
- ``batches``: the batches of a dataset, from any step on
"""
