"""The plan of an ``up``, made offline.

- ``planner``: what would be made, and what it costs
- ``validators``: what is wrong with a request, all at once
"""
