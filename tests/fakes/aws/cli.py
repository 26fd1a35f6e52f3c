"""A stand-in for AWS CLI 2 as far as ``aws ec2-instance-connect open-tunnel`` goes: it takes the options that the real
one takes and no others, fails with its words and exit codes, and connects its standard streams to a port on loopback
where the real one goes through AWS to the instance.

Written after the CLI's reference and its source (aws/aws-cli, branch v2: ``awscli/customizations/ec2instanceconnect``).
``install`` puts it on PATH; what the account has is in a file beside it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[3]
_USAGE = """
usage: aws [options] <command> <subcommand> [<subcommand> ...] [parameters]
To see help text, you can run:

  aws help
  aws <command> help
  aws <command> <subcommand> help
"""
_OPTIONS = {"--instance-id", "--instance-connect-endpoint-id", "--instance-connect-endpoint-dns-name"}
_OPTIONS |= {"--private-ip-address", "--remote-port", "--local-port", "--max-tunnel-duration"}
_OPTIONS |= {"--max-websocket-connections", "--endpoint-url", "--output", "--query", "--profile", "--region"}
_OPTIONS |= {"--color", "--ca-bundle", "--cli-read-timeout", "--cli-connect-timeout", "--cli-binary-format"}
_SWITCHES = {"--debug", "--no-verify-ssl", "--no-paginate", "--no-sign-request", "--no-cli-pager"}
_INTEGERS = ("--remote-port", "--local-port", "--max-tunnel-duration", "--max-websocket-connections")
_UPGRADE = "AWS_ERROR_HTTP_WEBSOCKET_UPGRADE_FAILURE: Failed to upgrade HTTP connection to Websocket."
_LOG = "awscli.customizations.ec2instanceconnect.websocket - ERROR - "


@dataclass
class Account:
    """What there is in AWS, and what whoever asks may do."""

    region: str = "us-east-1"
    instances: dict[str, int] = field(default_factory=dict)
    """By id, the port on loopback that stands for the instance's port 22."""
    profiles: list[str] = field(default_factory=list)
    is_new: bool = True
    """2.12 or newer."""
    has_endpoint: bool = True
    may_describe: bool = True
    may_tunnel: bool = True


class Failed(Exception):
    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code


class Stand:
    """An installed stand-in: its folder, for PATH, and what it was asked."""

    def __init__(self, folder: Path, account: Account) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        tool = folder / "aws"
        tool.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.fakes.aws.cli {folder} "$@"\n')
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        self.change(account)

    def change(self, account: Account) -> None:
        (self.folder / "account.json").write_text(json.dumps(asdict(account)))

    def calls(self) -> list[list[str]]:
        """The words of each, the oldest first."""
        return [call["words"] for call in self._calls()]

    def running(self) -> list[int]:
        """Process ids of those that have not ended."""
        return [call["pid"] for call in self._calls() if Path(f"/proc/{call['pid']}/stat").exists()]

    def end_newest(self) -> None:
        """The tunnel that was opened last ends, as each does after its time."""
        os.kill(self._calls()[-1]["pid"], signal.SIGTERM)

    def _calls(self) -> list[dict[str, Any]]:
        log = self.folder / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _main(folder: Path, words: list[str]) -> int:
    with (folder / "calls").open("a") as log:
        log.write(json.dumps({"pid": os.getpid(), "words": words}) + "\n")
    account = Account(**json.loads((folder / "account.json").read_text()))
    try:
        _tunnel(account, _parsed(account, words))
    except Failed as failed:
        print(f"\n{failed}", file=sys.stderr)
        return failed.code
    return 0


def _parsed(account: Account, words: list[str]) -> dict[str, str]:
    commands: list[str] = []
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _OPTIONS and (equals or rest):
            options[name] = value if equals else rest.pop(0)
        elif word in _OPTIONS:
            raise Failed(252, f"{_USAGE}\naws: error: argument {word}: expected one argument")
        elif word not in _SWITCHES:
            commands.append(word)
    known, unknown = commands[:2], commands[2:]
    choices = ["open-tunnel", "send-ssh-public-key", "ssh"] if account.is_new else ["send-ssh-public-key"]
    if known[:1] != ["ec2-instance-connect"] or known[1:] != ["open-tunnel"] or not account.is_new:
        shown = "\n".join(choices)
        raise Failed(252, f"{_USAGE}\naws: error: argument operation: Invalid choice, valid choices are:\n\n{shown}")
    if unknown:
        raise Failed(252, f"{_USAGE}\nUnknown options: {', '.join(unknown)}")
    for name in _INTEGERS:
        if name in options and not options[name].isdigit():
            raise Failed(252, f"{_USAGE}\naws: error: argument {name}: invalid int value: {options[name]!r}")
    return options


def _tunnel(account: Account, options: dict[str, str]) -> None:
    id_, lasts_s = options.get("--instance-id", ""), int(options.get("--max-tunnel-duration", "3600"))
    if not id_:
        raise Failed(252, "Specify an instance id or private ip.")
    if not 1 <= lasts_s <= 3600:
        raise Failed(252, "Invalid max connection timeout specified. Value must be greater than 1 and less than 3600.")
    if sys.stdin.isatty():
        raise Failed(252, "This command does not support interactive mode.")
    profile = options.get("--profile") or os.environ.get("AWS_PROFILE", "")
    if profile and profile not in account.profiles:
        raise Failed(255, f"The config profile ({profile}) could not be found")
    if not profile and "AWS_ACCESS_KEY_ID" not in os.environ:
        raise Failed(253, 'Unable to locate credentials. You can configure credentials by running "aws configure".')
    region = options.get("--region") or os.environ.get("AWS_REGION", "")
    if not region:
        raise Failed(253, 'You must specify a region. You can also configure your region by running "aws configure".')
    refused = "An error occurred ({}) when calling the DescribeInstances operation: {}"
    if not account.may_describe:
        why = "You are not authorized to perform this operation. Encoded authorization failure message: 3bVQ"
        raise Failed(254, refused.format("UnauthorizedOperation", why))
    if region != account.region or id_ not in account.instances:
        raise Failed(254, refused.format("InvalidInstanceID.NotFound", f"The instance ID '{id_}' does not exist"))
    if not account.has_endpoint:
        raise Failed(252, "There are no available instance connect endpoints.")
    port = options.get("--remote-port", "22")
    if port not in ("22", "3389"):
        _refuse(
            "InvalidParameter", "The specified RemotePort is not valid. Specify either 22 or 3389 as the RemotePort"
        )
    if not account.may_tunnel:
        who, action = "User: arn:aws:iam::123456789012:user/ada", "ec2-instance-connect:OpenTunnel"
        _refuse("AccessDenied", f"{who} is not authorized to perform: {action}")
    try:
        connection = socket.create_connection(("127.0.0.1", account.instances[id_]), timeout=5)
    except OSError:
        _refuse("InvalidParameter", "Unable to connect to target")
    with connection:
        _carry(connection, time.monotonic() + lasts_s)


def _refuse(code: str, message: str) -> NoReturn:
    raise Failed(255, f"{_LOG}{json.dumps({'ErrorCode': code, 'Message': message})}\n\n{_UPGRADE}")


def _carry(connection: socket.socket, until: float) -> None:
    """Until the instance closes, or the time is over; the end of standard input is not noticed, as by the real one."""
    sources: list[int | socket.socket] = [0, connection]
    while (left := until - time.monotonic()) > 0:
        for source in select.select(sources, [], [], left)[0]:
            if source == 0:
                data = os.read(0, 65_000)
                if not data:
                    sources.remove(0)
                connection.sendall(data)
                continue
            data = connection.recv(65_000)
            if not data:
                return
            _write(data)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2:]))
