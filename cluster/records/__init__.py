"""What is written into the bucket: plain data, as JSON. Never pickled: write access must not be code execution.

Every record is frozen: a change is a new record. Unknown fields are ignored on reading, so that an older agent
understands a newer one. Wall-clock fields (``…_at``, seconds since the epoch) are for people; nothing decides by them.

- ``clusters``, ``nodes``: a cluster and its machines
- ``jobs``, ``rounds``: a job, and what became of it
- ``environments``, ``images``: the packages that it runs with, or the container image
- ``runs``: what meets under an ID without a cluster
- ``checkpoints``, ``snapshots``: what it keeps
- ``codec``: records as JSON
"""
