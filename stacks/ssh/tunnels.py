"""Ways to nodes that have no public address: a command whose standard input and output are the node's sshd.

AWS has one, the EC2 Instance Connect Endpoint that ``aws.resources.network`` makes. AWS CLI 2.12 and newer open a
tunnel through it, find it by the instance's network, and may do so for whom IAM lets ``OpenTunnel``
(docs.aws.amazon.com, "Connect using EC2 Instance Connect Endpoint"; options: AWS CLI reference,
``ec2-instance-connect open-tunnel``).

What they are made of comes from the bucket, which is not trusted: a name or region of another shape gets no tunnel.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuctl.cluster.errors import GpuctlError

AT_ONCE = 16
"""An endpoint carries 20 connections at a time (same page); some are left for others."""
LONGEST_S = 3600
"""A tunnel ends after that, whatever goes through it (same page)."""

_INSTANCE = re.compile(r"i-(?:[0-9a-f]{8}|[0-9a-f]{17})")
_REGION = re.compile(r"[a-z]{2,4}(?:-[a-z]+){1,3}-\d{1,2}")
_ZONE = re.compile(rf"(?P<region>{_REGION.pattern})(?:-[a-z]{{3}}-\d)?[a-z]")
"""``us-east-1a``, or a local zone such as ``us-west-2-lax-1a``."""

_INSTALL = "install AWS CLI v2: docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html"
_RIGHTS = (
    "your AWS user needs ec2-instance-connect:OpenTunnel, ec2:DescribeInstances and "
    "ec2:DescribeInstanceConnectEndpoints"
)
_HINTS = (
    (r"AccessDenied|Unauthorized|not authorized", _RIGHTS),
    (r"no available instance connect endpoints", "`gpuctl up --ssh-from me` creates one"),
    (r"InvalidInstanceID|not in a valid state|IncorrectInstanceState", "see `gpuctl status`"),
    (r"credential|token|sso|profile|expired", "log in as for `gpuctl up`; AWS_PROFILE names a profile"),
)
_TOO_OLD = re.compile(r"Invalid choice|Unknown options|unrecognized arguments", re.IGNORECASE)
_MISSING = re.compile(r"\baws: (?:command )?not found|command not found: aws|Unknown command: aws|aws: No such file")
_BODY = re.compile(r'"message"\s*:\s*"((?:[^"\\]|\\.)+)"', re.IGNORECASE)
_REFUSED = re.compile(r"An error occurred \((?P<code>[\w.]+)\)(?: when calling the \w+ operation)?[^:]*: (?P<what>.+)")


def command(
    provider: str, node: str, *, region: str = "", zone: str = "", env: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The command that opens a tunnel to a node; empty where there is none.

    Args:
        provider: the cluster's; only ``aws`` has tunnels.
        node: its name; on AWS the id of the instance.
        region: the cluster's; empty: not on record, so it is taken from ``zone``.
        zone: the node's; empty: unknown.
        env: ``AWS_PROFILE`` in it is named in the command, for shells and editors that do not have it.
    """
    if not region and (found := _ZONE.fullmatch(zone)):
        region = found["region"]
    if provider != "aws" or not _INSTANCE.fullmatch(node) or not _REGION.fullmatch(region):
        return ()
    profile = env.get("AWS_PROFILE", "")
    # A named profile goes before keys in the environment, where AWS_PROFILE comes after them.
    is_named = profile and profile.isprintable() and "AWS_ACCESS_KEY_ID" not in env
    return (
        *("aws", "ec2-instance-connect", "open-tunnel", "--instance-id", node, "--region", region),
        *("--remote-port", "22", "--max-tunnel-duration", str(LONGEST_S)),
        *(("--profile", profile) if is_named else ()),
    )


def proxy_command(words: Sequence[str], log: Path | None = None) -> str:
    """The command for ssh's ``ProxyCommand``, which gives it to a shell. ``log``: a file for what the command itself
    has to say."""
    line = shlex.join(words)
    if log is not None:
        line = shlex.join(("/bin/sh", "-c", f"exec {line} 2>>{shlex.quote(str(log))}"))  # any shell knows this much
    return line.replace("%", "%%")


def check_program(node: str, words: Sequence[str]) -> None:
    """Raises ``GpuctlError`` if it is not on PATH."""
    if shutil.which(words[0]) is None:
        raise _missing(node)


def explain(node: str, said: str) -> GpuctlError:
    """The error for a tunnel that did not come to be, from what its command ``said``."""
    if _MISSING.search(said):
        return _missing(node)
    if _TOO_OLD.search(said):
        return GpuctlError(f"the `aws` on this machine is too old to open a tunnel to {node}", _INSTALL)
    reason = _reason(said)
    hint = next((hint for shape, hint in _HINTS if re.search(shape, said, re.IGNORECASE)), "see `gpuctl status`")
    return GpuctlError(f"cannot reach {node} through AWS's Instance Connect Endpoint: {reason}", hint)


def _missing(node: str) -> GpuctlError:
    return GpuctlError(f"{node} has no public address and is reached with `aws`, which is not installed", _INSTALL)


def _reason(said: str) -> str:
    """A line of it, without what is for AWS's own support."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = lines[-1].removeprefix("aws: [ERROR]: ") if lines else "it printed nothing"
    if body := _BODY.search(said):
        told = re.sub(r"\\(.)", r"\1", body[1])
    elif refused := next((found for line in lines if (found := _REFUSED.search(line))), None):
        told = f"{refused['code']}: {refused['what']}"
    return told.partition(" Encoded authorization failure")[0].strip().rstrip(".")
