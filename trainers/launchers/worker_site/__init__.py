"""A folder that comes first in the ``PYTHONPATH`` of workers: Python imports its ``sitecustomize`` by itself."""
