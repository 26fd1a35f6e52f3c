"""What a script reports of itself: step, loss, speed.

- ``stream``: ``log_metrics``, and the files that the agent reads
- ``tensorboard_events``: event files, without TensorBoard
"""
