"""What the resource plug-ins can make, of three clouds on loopback."""

from __future__ import annotations

from tests.fakes.pulumi import resources_aws, resources_azure, resources_gcp

MAKERS = {**resources_aws.MAKERS, **resources_azure.MAKERS, **resources_gcp.MAKERS}
"""By Pulumi token: makes it of its inputs, and tells what it has come to be, its ``id`` too."""
UPDATERS = {**resources_aws.UPDATERS, **resources_azure.UPDATERS, **resources_gcp.UPDATERS}
"""By Pulumi token: changes it by its ``id``, from inputs to others, and tells what of it is otherwise now."""
REPLACED = resources_gcp.REPLACED
"""Pulumi tokens of what cannot be changed: another one is made first, and the old one goes last."""
AUTONAMED = resources_aws.AUTONAMED
"""Pulumi tokens of what gets a name of the resource's own and some letters where the program gives it none."""
UNMAKERS = {**resources_aws.UNMAKERS, **resources_azure.UNMAKERS, **resources_gcp.UNMAKERS}
"""By Pulumi token: takes it away by its ``id``."""
SEEN = {**resources_aws.SEEN, **resources_azure.SEEN, **resources_gcp.SEEN}
"""By Pulumi token: whether it is still there, by its ``id``."""
ASKED = {**resources_azure.ASKED}
"""By Pulumi token: what a program wants to know of the cloud, where it matters."""
