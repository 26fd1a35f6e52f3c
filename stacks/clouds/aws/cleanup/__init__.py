"""Resources left on AWS, found and deleted without Pulumi.

``leaks`` finds it, ``removal`` deletes it, ``kept_buckets`` is about buckets.
``deletions`` has how each kind of thing is deleted, and in which order.
"""
