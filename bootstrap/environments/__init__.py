"""Environments on a node: the packages of a job's script, built once for the cluster and unpacked on every node.

Read in this order:

- ``node_environments``: what a job gets, and from where: this node's disk, another node, the bucket, or a build
- ``facts``: what an environment depends on besides its source
- ``installer``, ``install``: a source resolved and installed
- ``pack``: an environment as an archive, and back
- ``prefix``: a conda environment's path, which is written into it
- ``fetch``: an archive from the nearest place that has it
- ``claim``: who builds
- ``publish``: what was built, on its way to the others
- ``disk``: where they lie, and room for the next one
"""
