"""What people ask of a cluster, as plain data: anybody who may read the bucket can have it.

- ``holders``: the clusters that are, or were, at a prefix, above and below it
- ``job_status``: how far jobs are
- ``status``: the nodes, and all of it together
- ``usage``: how long each rented machine was there
"""
