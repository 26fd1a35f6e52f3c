"""Resources left on Azure, found and deleted without Pulumi.

``leaks`` finds it, ``removal`` deletes it, ``kept_buckets`` is about buckets.
``leak_kinds`` has the kinds of things that are looked for, ``deletions`` deletes by id.
"""
