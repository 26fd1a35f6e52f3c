"""Machine types and what they cost.

- ``instance_types``: what is known of each type, from ``catalog.json``
- ``offers``: what could be rented, the cheapest first
- ``billing``: what a cluster's machines have cost
- ``region_names``, ``provider_names``: every region and provider there is
"""
