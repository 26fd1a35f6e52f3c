"""Refusals that mean no more than "what was made a moment ago is not known everywhere yet", in the clouds' own words.

Roles, accounts and identities reach all parts of a cloud in seconds to minutes, and until then another part says that
there is no such thing. Pulumi's providers pass most of that on: `azure-native` repeats HTTP 408, 429, 5xx and
AnotherOperationInProgress only (provider/pkg/azure/client_azcore.go). To repeat the whole update is the remedy.
"""

from __future__ import annotations

import re

_TEXTS = (
    # Azure. A role was made a moment ago: hashicorp/terraform-provider-azurerm #10442, #10479, #19916.
    r"RoleDefinitionDoesNotExist",
    r"The specified role definition with ID '[^']+' does not exist",
    # An identity was: learn.microsoft.com, "Troubleshoot Azure RBAC", on PrincipalNotFound; pulumi/pulumi-azure #142.
    r"PrincipalNotFound",
    r"Principal \S+ does not exist in the directory",
    # AWS. An instance profile or a role: hashicorp/terraform-provider-aws retries just these on instances and groups.
    r"Invalid IAM Instance Profile",
    r"Value \([^)]*\) for parameter iamInstanceProfile\.(name|arn) is invalid",
    # Google. A service account: cloud.google.com/iam/docs/service-accounts-create, "It can take 60 seconds or more".
    r"Service account \S+ does not exist",
    r"The resource 'projects/[^']+/serviceAccounts/[^']+' was not found",
)
_EVENTUAL = re.compile("|".join(_TEXTS), re.IGNORECASE)


def is_eventual(said: str) -> bool:
    """Whether a refusal, all that a provider said of it, ends by itself: to be tried again for some minutes."""
    return bool(_EVENTUAL.search(said))
