"""Verbs about a cluster's machines.

- ``check``, ``up``, ``attach``: before there is a cluster, making one, using one that is there
- ``status``, ``net``, ``verify``: looking at it
- ``preempt``, ``repair``, ``down``: losing machines, replacing them, taking everything away
- ``kept_checkpoints``: what ``down`` keeps, or deletes
"""
