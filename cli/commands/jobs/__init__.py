"""Verbs about jobs and what they leave.

- ``train``, ``jobs``, ``cancel``: begin, list and end them
- ``logs``: what they print
- ``ckpt``, ``ckpt_pull``: what they keep
- ``env``, ``image``: the packages that they run with, or their image
- ``mingle``, ``mingle_command``: a command on machines without a cluster
"""
