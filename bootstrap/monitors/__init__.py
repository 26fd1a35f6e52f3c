"""What the agent watches for.

- ``preemption``: the cloud's notice that it takes the machine
- ``stall``: a job that no longer gets on
- ``gpu_health``: a GPU that is ill, as ``gpu_watch`` hears from the driver and ``gpu_faults`` judges it
"""
