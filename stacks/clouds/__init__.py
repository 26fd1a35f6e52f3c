"""The clouds: ``aws``, ``gcp`` and ``azure``, in folders of one shape.

- ``interface``: what a cloud answers, and where in its folder
- ``answers``: what they answer, in one form
- ``extras``: their Python packages
- ``regions``: which region a verb asks
- ``user_data``: user-data as the clouds take it
- ``eventual``: refusals that mean "not known everywhere yet"
- ``removal_by_tag``: deleting what a scan has found, until it finds nothing
"""
