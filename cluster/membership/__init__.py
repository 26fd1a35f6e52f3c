"""Which nodes take part, who leads them, and what each job does next.

Read in this order:

- ``lease``: who leads
- ``failure_detector``: what the leader knows of the other nodes
- ``rounds``: what it decides for a job, a pure function
- ``rank_order``: which node has which rank
- ``blame``: which rank made a round fail
- ``stalls``: whether a job's workers do nothing any more
- ``peers``, ``peer_line``: direct questions between agents, which only make it quick
- ``job_records``: what the leader reads of jobs
- ``mingle``: how a node takes part in all of it
"""
