"""Notes that gpuctl keeps on a user's machine.

- ``paths``: where
- ``clusters``: which clusters there are
"""
