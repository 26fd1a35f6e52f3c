"""The way to a node.

- ``target``: how a person names a machine
- ``hosts``: a cluster's machines, and what ssh needs to reach each
- ``commands``: running something there
- ``config``: what the user's own ssh is told of a cluster
- ``tunnels``: machines without a public address
- ``keys``: public keys, and which kinds each cloud takes
"""
