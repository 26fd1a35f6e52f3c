"""Files that a script keeps by itself, under ``$GPUCTL_CHECKPOINT_DIR``.

- ``snapshot_log``: sets of files in the bucket, each there whole or not at all
- ``maintenance``: check them and delete them, from outside of the job
"""
