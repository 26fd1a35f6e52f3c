"""What `make docs` makes of the code: pages that would be wrong as soon as they were written by hand.

- ``hooks``: what MkDocs calls
- ``cli_reference``: the verbs, with their arguments and options
- ``records_reference``: the keys in the bucket, and the records
"""
