"""Files under ``$GPUCTL_CHECKPOINT_DIR``, copied to the bucket while a script writes them, and back.

- ``mirror``: when a set of files is copied
- ``watched_folder``: what is in the folder, and what has changed
- ``quiescence``: whether a file is still being written
"""
