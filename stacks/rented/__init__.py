"""Clusters of rented machines, on whichever cloud.

Read in this order:

- ``provider``: what a cloud answers as a provider
- ``clusters``: made, changed, repaired
- ``earlier_up``: what an earlier ``up`` left
- ``cluster_bucket``: their bucket
- ``namesakes``: another cluster of that name
- ``readiness``: from machines asked for to nodes that live
- ``remains``: what is there where one of them did not come to its end
- ``teardown``: taken away, and the proof
- ``missing_engine``: where Pulumi's package is missing, removal by tag goes on without it
- ``by_tag``: taken away without any record of it
"""
