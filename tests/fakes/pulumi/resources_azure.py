"""What ``resource_plugin`` makes in a subscription on loopback: all that the program declares, by Azure's REST API, as
the user whom ``az`` has logged in.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

Record = dict[str, Any]

USER = "22222222-2222-2222-2222-222222222222"
"""What Azure calls whoever is logged in."""
_OWN = ("location", "tags", "sku", "kind", "zones", "identity")
"""What Azure has beside ``properties``."""
_PATHS = {
    "resources:ResourceGroup": "resourceGroups/{resourceGroupName}",
    "network:VirtualNetwork": "Microsoft.Network/virtualNetworks/{virtualNetworkName}",
    "network:Subnet": "Microsoft.Network/virtualNetworks/{virtualNetworkName}/subnets/{subnetName}",
    "network:NetworkSecurityGroup": "Microsoft.Network/networkSecurityGroups/{networkSecurityGroupName}",
    "managedidentity:UserAssignedIdentity": "Microsoft.ManagedIdentity/userAssignedIdentities/{resourceName}",
    "compute:VirtualMachineScaleSet": "Microsoft.Compute/virtualMachineScaleSets/{vmScaleSetName}",
    "storage:StorageAccount": "Microsoft.Storage/storageAccounts/{accountName}",
    "storage:BlobContainer": "Microsoft.Storage/storageAccounts/{accountName}/blobServices/default/containers"
    "/{containerName}",
    "authorization:RoleDefinition": "roleDefinitions",
    "authorization:RoleAssignment": "roleAssignments",
}
"""By Pulumi token, without ``azure-native:``."""


def _make(path: str, inputs: Record) -> Record:
    if path == "roleAssignments":
        id_ = f"{inputs['scope']}/providers/Microsoft.Authorization/{path}/{uuid.uuid4()}"
    elif path == "roleDefinitions":
        id_ = f"{_subscription()}/providers/Microsoft.Authorization/{path}/{uuid.uuid4()}"
    else:
        within = "" if path.startswith("resourceGroups") else f"/resourceGroups/{inputs['resourceGroupName']}/providers"
        id_ = f"{_subscription()}{within}/{path.format(**inputs)}"
    if seen(id_):  # Pulumi's provider looks before it makes
        raise RuntimeError(f"cannot create already existing resource '{id_}'")
    given = {"principalId": str(uuid.uuid4())} if path.startswith("Microsoft.ManagedIdentity") else {}
    return _send(id_, inputs, given)


def _send(id_: str, inputs: Record, given: Record) -> Record:
    """All of it, each time: so does Pulumi's provider, whatever has changed."""
    own = {key: value for key, value in inputs.items() if key in _OWN}
    given = {**given, **{key: value for key, value in inputs.items() if key not in _OWN}}
    if "identity" in own:  # a list to Pulumi, and no list to Azure
        own["identity"] = {
            **own["identity"],
            "userAssignedIdentities": {own["identity"]["userAssignedIdentities"][0]: {}},
        }
    made = _asked("PUT", id_, {**own, "properties": given})
    told: Record = {key: found[key] for found in (given, own) for key in ("principalId", "identity") if key in found}
    return {"id": id_, "name": made["name"], **told}


def seen(id_: str) -> bool:
    try:
        _asked("GET", id_)
    except LookupError:
        return False
    return True


def _unmake(id_: str) -> None:
    _asked("DELETE", id_)


def _asked(method: str, path: str, body: Record | None = None) -> Record:
    """Raises ``RuntimeError`` in Azure's words, ``LookupError`` if there is no such thing."""
    request = Request(f"{os.environ['ARM_ENDPOINT']}{path}?api-version=1", method=method)
    request.add_header("Authorization", f"Bearer {_token()}")
    request.data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(request, timeout=30) as answer:
            text = answer.read()
    except HTTPError as refused:
        error = json.loads(refused.read())["error"]
        told = f"Status={refused.code} Code={json.dumps(error['code'])} Message={json.dumps(error['message'])}"
        raise (LookupError if refused.code == 404 and method == "GET" else RuntimeError)(told) from refused
    found: Record = json.loads(text or b"{}")
    return found


@cache
def _token() -> str:
    command = ["az", "account", "get-access-token", "--resource", "https://management.azure.com"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return str(json.loads(told.stdout)["accessToken"])


@cache
def _subscription() -> str:
    profile = json.loads((Path(os.environ["AZURE_CONFIG_DIR"]) / "azureProfile.json").read_text("utf-8-sig"))
    return "/subscriptions/" + next(str(one["id"]) for one in profile["subscriptions"] if one.get("isDefault"))


MAKERS: dict[str, Callable[[Record], Record]] = {
    f"azure-native:{kind}": partial(_make, path) for kind, path in _PATHS.items()
}
UPDATERS: dict[str, Callable[[str, Record, Record], Record]] = {
    f"azure-native:{kind}": lambda id_, _, inputs: _send(id_, inputs, {})
    for kind in ("network:NetworkSecurityGroup", "compute:VirtualMachineScaleSet")
}
UNMAKERS: dict[str, Callable[[str, Record], object]] = {
    f"azure-native:{kind}": lambda id_, _: _unmake(id_) for kind in _PATHS
}
SEEN: dict[str, Callable[[str], bool]] = {f"azure-native:{kind}": seen for kind in _PATHS}
ASKED: dict[str, Callable[[], Record]] = {
    "azure-native:authorization:getClientConfig": lambda: {
        "clientId": "az",
        "objectId": USER,
        "subscriptionId": _subscription().rpartition("/")[2],
        "tenantId": "11111111-1111-1111-1111-111111111111",
    },
}
"""By Pulumi token: what the program wants to know."""
