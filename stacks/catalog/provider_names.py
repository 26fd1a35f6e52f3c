"""The names of all providers there are, and what to say of another one."""

from __future__ import annotations

import difflib

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CLOUDS

PROVIDERS = ("local", "ssh", *CLOUDS)


def unknown_provider(name: str) -> BadInput:
    """The error for a provider's name that is none.

    >>> str(unknown_provider("awss"))
    "unknown provider 'awss'; did you mean aws? (there are: local, ssh, aws, gcp, azure)"
    """
    near = difflib.get_close_matches(name.lower(), PROVIDERS, n=1)
    there = ", ".join(PROVIDERS)
    hint = f"did you mean {near[0]}? (there are: {there})" if near else f"use one of: {there}"
    return BadInput(f"unknown provider {name!r}", hint)
