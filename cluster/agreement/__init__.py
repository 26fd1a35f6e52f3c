"""Agreement between machines that share nothing but a bucket.

- ``ledger``: a document with versions, each of which has exactly one writer
- ``ledgers``: every ledger of a cluster
- ``probe``: whether a bucket can be trusted with it
"""
