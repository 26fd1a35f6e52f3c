"""The way of a save, from the tensors on all ranks to one commit.

In the order in which a save passes them:

- ``schedule``: whether one is due
- ``partition``: which rank writes what
- ``host_buffer``: the copy in host memory
- ``pending_save``: a save on its way
- ``save_thread``: what goes on behind the training's back
- ``uploader``: parts of bytes to the bucket
- ``report``, ``store_gather``: what each rank has written, told to rank 0
- ``commit``: one entry in the log
- ``last_save``: what is still worth saving before a machine is taken
"""
