"""Resources left on Google Cloud, found and deleted without Pulumi.

``leaks`` finds it, ``removal`` deletes it, ``kept_buckets`` is about buckets.
``leak_kinds`` has the kinds of things that are looked for, ``policies`` who may use them.
"""
