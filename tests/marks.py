"""Marks that several folders' tests share."""

from __future__ import annotations

import pytest

STORES = ["file", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("s3", "az", "gs"))]
"""Parameters of ``bucket_url``: every change is tried on a folder, and each night on the servers too."""

slow_but_on_a_folder = pytest.mark.parametrize("bucket_url", STORES, indirect=True)
