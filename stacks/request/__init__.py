"""The request that a cloud's program is given.

- ``stack_request``: everything that ``gpuctl up`` has found out
- ``last_request``: what the ``up`` before asked for
- ``immutable``: what of a cluster cannot be changed
"""
