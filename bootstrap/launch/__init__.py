"""Starting a round's workers on one node.

Read in this order:

- ``interpreter``: the warm interpreter, which forks them
- ``job_cgroup``: what their processes are in
- ``worker_ranks``: which of them have not ended
- ``worker_stop``: how they are asked to stop
- ``last_words``: what a worker that failed has printed
- ``memory``: whether the kernel has killed it for memory
"""
