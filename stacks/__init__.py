"""Machines for clusters: rented from a cloud, one's own, or processes on this one.

Read in this order:

- ``providers``: what a provider answers; ``local`` and ``ssh``
- ``rented``: clusters of rented machines, on whichever cloud
- ``clouds``: what each cloud is asked, and what Pulumi makes there
- ``plan``: what would be made and cost, found out offline
- ``engine``: Pulumi, run through its Automation API
- ``program``: what Pulumi runs
- ``request``: what a cloud's program is given
- ``catalog``: machine types and prices
- ``ssh``: the way to a node
- ``state``: what gpuctl notes on this machine
"""
