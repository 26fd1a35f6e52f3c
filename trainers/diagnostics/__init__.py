"""The job behind ``gpuctl verify``.

- ``verify_job``: the script that all nodes run
- ``burn_in``: whether each GPU computes what it should
- ``bandwidth``: how quick the nodes are between each other
- ``nccl_log``: which network NCCL says it uses
- ``net_plugin``: whether the network's plug-in can be loaded
"""
