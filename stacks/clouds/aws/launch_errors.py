"""The meaning of AWS's reasons for a machine that did not start, for those who wait for it.

The texts are those of docs.aws.amazon.com/autoscaling, "Troubleshoot issues in Amazon EC2 Auto Scaling", of EC2's
"Error codes", and of activities that people have reported.
"""

from __future__ import annotations

from typing import Literal

_RULES: tuple[tuple[str, Literal["wait", "next zone", "stop"]], ...] = (
    # A profile that was just made is not known everywhere for some seconds; the group tries again.
    ("instance profile", "wait"),
    ("iaminstanceprofile", "wait"),
    # A machine's type, or its cards and placement, are not sold there. First: it is an InvalidFleetConfiguration too.
    ("not supported in your requested availability zone", "next zone"),
    ("is no longer supported. please retry your request", "next zone"),
    ("the requested configuration is currently not supported", "next zone"),
    # Quotas.
    ("max spot instance count exceeded", "stop"),
    ("maxspotinstancecountexceeded", "stop"),
    ("vcpulimitexceeded", "stop"),
    ("than your current vcpu limit", "stop"),
    ("instancelimitexceeded", "stop"),
    ("than your current instance limit", "stop"),
    ("volumelimitexceeded", "stop"),
    ("storage limit", "stop"),
    # What the machine is made of.
    ("invalidami", "stop"),
    ("ami id", "stop"),
    ('invalid id: "ami', "stop"),
    ("invalidkeypair", "stop"),
    ("key pair", "stop"),
    ("invalidsnapshot", "stop"),
    ("the snapshot '", "stop"),
    ("invalidblockdevicemapping", "stop"),
    ("is smaller than snapshot", "stop"),
    ("invalid device name", "stop"),
    ("invalidgroup.notfound", "stop"),
    ("the security group", "stop"),
    ("invalidsubnetid", "stop"),
    ("launch template", "stop"),
    ("placement groups may not be used", "stop"),
    ("invalidparameter", "stop"),
    ("invalidfleetconfiguration", "stop"),
    # A disk whose key may not be used: AWS calls that an internal error, of the client.
    ("client.internalerror", "stop"),
    ("client error on launch", "stop"),
    ("kms", "stop"),
    # Rights, and accounts that may rent nothing yet.
    ("accessdenied", "stop"),
    ("unauthorizedoperation", "stop"),
    ("not authorized", "stop"),
    ("authfailure", "stop"),
    ("service-linked role", "stop"),
    ("optinrequired", "stop"),
    ("pendingverification", "stop"),
    ("account is currently blocked", "stop"),
)
"""Words of a reason, in small letters. The first that is in it counts. All others, a lack of capacity above all
(InsufficientInstanceCapacity, UnfulfillableCapacity), may pass."""


def verdict(reason: str) -> Literal["wait", "next zone", "stop"]:
    """The meaning of an error for those who wait; see ``LaunchProblem``."""
    small = reason.lower()
    return next((found for words, found in _RULES if words in small), "wait")
