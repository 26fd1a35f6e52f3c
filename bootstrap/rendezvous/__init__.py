"""Nodes without a cluster, which meet under an ID in a bucket: pods, tasks of an allocation, shells.

Read in this order:

- ``mingle``: the call that waits until all are there
- ``runs``: which run of an ID a node joins
- ``session``: from its arrival to the end
- ``participant``: a node's part in it, by the same agreement as a cluster's
- ``placement``: what a node learns when a round begins, and the variables for launchers
- ``own_address``, ``reach``: by which address the others reach it, and whether they do
- ``command``, ``keeper``: the command that runs in each round, and ends with it
- ``progress``: who is here, in words
"""
