"""Everything that is printed, and in what form.

- ``terminal``: colours, bars, sizes, tables
- ``follow``: a job as it goes
- ``checkpoints``: checkpoints as a table
- ``timeline``: what a job lived through
- ``plan``: what ``up`` would create on a cloud
- ``hints``: commands in messages, with the name of the cluster that was named
- ``dialog``: the answers of a person at a terminal
- ``resource_progress``: what a cloud makes and deletes
- ``boot_log``: how a machine booted
- ``hints``: the cluster in the commands that a message proposes
"""
