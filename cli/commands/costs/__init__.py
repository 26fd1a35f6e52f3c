"""Verbs about what machines and buckets cost.

- ``offers``: what machines would cost
- ``cost``: what a cluster's have cost
- ``leaks``, ``buckets``: what is left that still costs
- ``cloud_regions``: where the last two look
"""
