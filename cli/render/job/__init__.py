"""What is shown of a job.

- ``follow``: a job as it goes
- ``log_lines``: what its workers print
- ``progress_line``: how far it is
- ``timeline``: what it lived through
"""
