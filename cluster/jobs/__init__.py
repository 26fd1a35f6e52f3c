"""A job until it runs: its place in the queue, and the code that is sent along.

- ``queue``: submit a job, cancel it, learn how it ended
- ``strategy``: what a job's ``--strategy`` may name
- ``code_survey``: what of the working folder is sent
- ``code_archive``: that as one object
- ``gitignore``, ``dockerignore``: which files stay behind
- ``private_files``: which files look like keys and passwords
"""
