"""The packages or the image that a job's script needs, as the user's machine and the nodes both see them.

- ``source``: the file in the working folder that says which they are
- ``conda_file``: conda's kind of it
- ``registry``: the environments that are in the bucket, and who uses them
- ``images``: the container images that are in the bucket
"""
