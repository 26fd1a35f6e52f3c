"""Settings of a verb.

- ``resolve``: flag, environment, file or default, and which of them won
- ``file``: ``gpuctl.yaml``
- ``options``: flags that several verbs share
"""
