"""The first words to a rented machine.

- ``render``: cloud-init's user-data for a ``NodeSpec``, from ``user-data.yaml.j2`` and the files of ``boot``
"""
