"""Object storage of any kind.

Read in this order:

- ``interface``: six operations on objects
- ``bucket``: those on a prefix of a bucket, and how one is opened
- ``bucket_names``, ``store_options``: what a bucket's URL may say
- ``session``, ``credentials``: the connection, and credentials that end and are renewed
- ``error_mapping``: what a store's failures mean, and which of them are worth another try
- ``record_io``: several records at once
- ``upload``: a file, in parts
- ``streams``: logs and metrics, which grow
"""
