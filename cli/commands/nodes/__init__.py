"""Verbs that log in to nodes.

- ``ssh``, ``exec``, ``cp``, ``forward``: to the machine
- ``shell``, ``jupyter``, ``code``: to where a job runs on it
- ``port_forward``: a node's port on this machine
"""
