"""What the agent watches for.

- ``preemption``: the cloud's notice that it takes the machine
- ``stall``: a job that no longer gets on
"""
