"""Everything that is printed, and in what form.

- ``terminal``: colours, bars, sizes, tables
- ``job``: a job as it goes, and what it lived through
- ``checkpoints``: checkpoints as a table
- ``plan``: what ``up`` would create on a cloud
- ``hints``: commands in messages, with the name of the cluster that was named
- ``dialog``: the answers of a person at a terminal
- ``resource_progress``: what a cloud makes and deletes
- ``boot_log``: how a machine booted
"""
