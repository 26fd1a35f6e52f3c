"""A node's agent.

Read in this order:

- ``agent``: the loop
- ``reconcile``: from what rounds say to what this node runs
- ``round_run``: a node's part in one round
- ``heartbeat``: what it says of itself
- ``worker_exits``: how its workers ended
- ``round_work``: what the loop holds of it
- ``host_files``: what the machine's host learns of it
- ``log_shipper``: what workers print, to the bucket
- ``replica_server``: copies of checkpoints, for the other nodes
"""
