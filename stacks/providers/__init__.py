"""Providers of the machines that clusters run on.

- ``interface``: what a provider answers
- ``ownership``: the record in a bucket, and whose cluster it is
- ``local``, ``local_nodes``, ``local_preemption``, ``processes``: nodes that are processes on this machine
- ``ssh``, ``ssh_machine``, ``ssh_progress``: machines that somebody has already
- ``node_package``: gpuctl for the nodes
"""
