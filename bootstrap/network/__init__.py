"""A node's network.

- ``inventory``: its interfaces and network cards
- ``nccl_env``: variables and libraries for NCCL on each fabric
- ``reachability``: which of its ports the others reach
"""
