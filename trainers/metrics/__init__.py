"""What a script reports of itself: step, loss, speed.

- ``stream``: ``log_metrics``, and the files that the agent reads
- ``append_file``: a file of records, which a full disk costs whole ones
- ``tensorboard_events``: event files, without TensorBoard
"""
