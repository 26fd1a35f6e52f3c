"""AWS's partitions: the usual one, China and GovCloud know nothing of each other, and name everything apart."""

from __future__ import annotations

_HOMES = {"aws": "us-east-1", "aws-cn": "cn-north-1", "aws-us-gov": "us-gov-west-1"}
_CONSOLES = {
    "aws": "console.aws.amazon.com",
    "aws-cn": "console.amazonaws.cn",
    "aws-us-gov": "console.amazonaws-us-gov.com",
}


def partition(region: str) -> str:
    """The second word of every ARN in the region: docs.aws.amazon.com/IAM, "Identify AWS resources with ARNs"."""
    if region.startswith("cn-"):
        return "aws-cn"
    return "aws-us-gov" if region.startswith("us-gov-") else "aws"


def home(region: str) -> str:
    """A region of the same partition that every account may use: one that is not enabled refuses good credentials."""
    return _HOMES[partition(region)]


def console(region: str) -> str:
    """Address of the web console, without a path."""
    return f"https://{_CONSOLES[partition(region)]}"
