"""Starting a round's workers on one node.

Read in this order:

- ``interpreter``: the warm interpreter, which forks them
- ``container_args``, ``container_runtime``, ``container_process``: the same in an image of the user's
- ``old_images``: which images go when the disk is full
- ``job_cgroup``: what their processes are in
- ``worker_ranks``: which of them have not ended
- ``worker_stop``: how they are asked to stop
- ``last_words``: what a worker that failed has printed
- ``memory``: whether the kernel has killed it for memory
"""
