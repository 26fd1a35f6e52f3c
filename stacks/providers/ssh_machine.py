"""One machine that somebody has already, as provider ssh finds it, makes a node of it, and leaves it.

It needs Linux with systemd, ``/usr/bin/python3`` of 3.10 or later, and root: to log in as, or by ``sudo`` without a
password. Put there are the files of a rented machine's user-data but those that are not ours to put: nothing that ends
the machine when it idles, and no setting of apt.
"""

from __future__ import annotations

import io
import ipaddress
import re
import shlex
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuctl.bootstrap.node_spec import NodeSpec
from gpuctl.bootstrap.user_data.render import PACKAGE, File, files
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.nodes import SshHost
from gpuctl.stacks.ssh.commands import as_root, explain
from gpuctl.stacks.ssh.hosts import Host
from gpuctl.stacks.ssh.target import SshTarget

_ANSWER_S = 60.0
_UNDO_S = 300.0
_OLDEST_PYTHON = (3, 10)
_NOT_OURS = ("/etc/apt/apt.conf.d/99-gpuctl", "/etc/systemd/system/gpuctl-idle.service")
_OURS = (
    *("/etc/gpuctl", "/opt/gpuctl", "/var/lib/gpuctl", "/run/gpuctl", "/var/log/gpuctl-boot.log"),
    *(f"/etc/systemd/system/gpuctl-{unit}.service" for unit in ("boot", "agent")),
)
_NODE_JSON = "/etc/gpuctl/node.json"

_LOOK = f"""
say() {{ echo "gpuctl:$1=$2"; }}
say system "$(uname -s)"
[ -d /run/systemd/system ] && say systemd yes
say python "$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"
if [ "$(id -u)" = 0 ]; then say root yes; elif sudo -n true 2>/dev/null; then say root yes; sudo="sudo -n"; fi
/usr/bin/python3 -c 'import socket; socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9))' 2>/dev/null ||
  say address "$(echo "$SSH_CONNECTION" | cut -d ' ' -f 3)"
for file in /etc/ssh/ssh_host_*_key.pub; do [ -e "$file" ] && say host_key "$(cut -d ' ' -f 1,2 "$file")"; done
$sudo /usr/bin/python3 - <<'END' 2>/dev/null
import json
told = json.load(open("{_NODE_JSON}"))
for name in ("cluster", "bucket"):
    print(f"gpuctl:{{name}}={{told[name]}}")
END
true
"""

_BEGIN = f"""
set -e
systemctl stop gpuctl-boot.service 2>/dev/null || true
before=$(cat {_NODE_JSON} 2>/dev/null || true)
umask 022
rm -rf {PACKAGE}/__pycache__
tar -C / -xf -
[ "$before" = "$(cat {_NODE_JSON})" ] || systemctl stop gpuctl-agent.service 2>/dev/null || true
systemctl daemon-reload
systemctl enable --quiet gpuctl-boot.service
systemctl start --no-block gpuctl-boot.service
"""
"""The agent starts again only if it was told something else before: a job that runs here is not disturbed. Python takes
what it compiled of an earlier boot program for this one's, where a file's time and size are the same."""

_PULSE = """
echo "gpuctl:boot=$(systemctl is-active gpuctl-boot.service)"
echo "gpuctl:log=$(tail -n 1 /var/log/gpuctl-boot.log 2>/dev/null)"
"""

_UNDO = f"""
systemctl disable --quiet --now gpuctl-boot.service 2>/dev/null
systemctl stop gpuctl-agent.service 2>/dev/null
sed -n 's/^+ apt-get .* install //p' /var/log/gpuctl-boot.log 2>/dev/null | while read -r names; do
  echo "gpuctl:package=$names"
done
rm -rf {shlex.join(_OURS)}
systemctl daemon-reload
systemctl reset-failed gpuctl-boot.service gpuctl-agent.service 2>/dev/null
for path in {shlex.join(_OURS)}; do [ -e "$path" ] && echo "gpuctl:left=$path"; done
for process in /proc/[0-9]*; do
  words=$(tr '\\0' ' ' 2>/dev/null <"$process/cmdline")
  case "$words" in /opt/gpuctl/*) echo "gpuctl:left=process ${{process#/proc/}} ($words)";; esac
done
true
"""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts of a machine that was probed."""

    troubles: tuple[str, ...]
    """Why it cannot be a node."""
    cluster: str
    """The one that it is a node of, if it is one, and where that has its bucket."""
    bucket: str
    address: str
    """Where nothing leads out: the one of its own that this user's ssh came to, which others may reach too."""
    host_keys: tuple[str, ...]


class MachineRefused(GpuctlError):
    """A machine cannot be reached, or cannot be a node."""


class SshMachine:
    """A machine reached over ssh, as whoever that logs in as; nobody is asked for a password.

    Args:
        node: its name in the cluster.
        words: what ssh takes for it: options, and the host last.
        config: ssh's configuration file.
        logs: a folder for what ssh itself has to say.
    """

    def __init__(self, node: str, words: Sequence[str], config: Path, logs: Path) -> None:
        self.node = node
        self._words = tuple(words)
        self._config = config
        self._log = logs / node

    # -- before it is a node ------------------------------------------------------------------------------------------

    def look(self) -> MachineFacts:
        """Raises ``MachineRefused`` if it cannot be reached."""
        told = _told(self._run(_LOOK))
        troubles = []
        if told.get("system") != ["Linux"]:
            troubles.append("it does not run Linux")
        elif not told.get("systemd"):
            troubles.append("it does not run systemd")
        if not told.get("root"):
            troubles.append("the user there is not root, and sudo asks for a password")
        python = (told.get("python") or [""])[0]
        if not python or tuple(map(int, python.split("."))) < _OLDEST_PYTHON:
            troubles.append(f"/usr/bin/python3 is {python or 'missing'}, and 3.10 or later is needed")
        address = (told.get("address") or [""])[0]
        if address and not _is_for_others(address):
            troubles.append(f"no route leads out of it, and ssh came to {address}, where no other machine finds it")
        return MachineFacts(
            troubles=tuple(troubles),
            cluster=(told.get("cluster") or [""])[0],
            bucket=(told.get("bucket") or [""])[0],
            address=address,
            host_keys=tuple(told.get("host_key", ())),
        )

    def about(self, target: SshTarget, facts: MachineFacts) -> SshHost:
        """The record of how others reach it, from what this user's ssh knows: settings, and the host keys that it went
        by. With them go those that the machine told by that way. Raises ``MachineRefused`` if others cannot go the way
        there."""
        settings = _settings(self._config, self._words)
        one = {key: values[0] for key, values in settings.items()}
        if "proxycommand" in one:
            raise MachineRefused(f"{target.node} is reached by a ProxyCommand, which is not supported", "use ProxyJump")
        return SshHost(
            node=target.node,
            target=target.text,
            host=one["hostname"],
            port=int(one["port"]),
            user=one["user"],
            jump="" if one.get("proxyjump", "none") == "none" else one["proxyjump"],
            identities=tuple(settings.get("identityfile", ())),
            host_keys=tuple(dict.fromkeys((*_known_keys(one), *facts.host_keys))),
        )

    # -- as a node ----------------------------------------------------------------------------------------------------

    def begin(self, spec: NodeSpec) -> None:
        """Put the boot program there and start it; how far it comes, it tells the bucket. Raises ``MachineRefused``."""
        wanted = {path: file for path, file in files(spec).items() if path not in _NOT_OURS}
        self._run(as_root(_BEGIN), packed(wanted, time.time()))

    def pulse(self) -> tuple[bool, str]:
        """Whether the boot program still runs, and what its log ends with. Raises ``MachineRefused``."""
        told = _told(self._run(as_root(_PULSE)))
        return "active" in told.get("boot", []), (told.get("log") or [""])[0]

    def undo(self) -> tuple[list[str], list[str]]:
        """Remove gpuctl from the machine; returns what is left of it there, and the packages that it installed, which
        stay. Raises ``MachineRefused``."""
        told = _told(self._run(as_root(_UNDO), timeout_s=_UNDO_S))
        return told.get("left", []), " ".join(told.get("package", [])).split()

    def _run(self, script: str, stdin: bytes = b"", timeout_s: float = _ANSWER_S) -> str:
        options = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
        command = (
            "ssh",
            "-F",
            str(self._config),
            "-E",
            str(self._log),
            *options,
            *self._words,
            f"exec sh -c {shlex.quote(script)}",
        )
        self._log.unlink(missing_ok=True)
        try:
            done = _answer(command, stdin, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise MachineRefused(f"{self.node} did not answer in {timeout_s:g} s", "run it again") from error
        if not done.returncode:
            return done.stdout.decode(errors="replace")
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        if done.returncode == 255 and log.strip():
            raise self._unreached(log)
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise MachineRefused(
            f"{self.node}: {said[-1] if said else f'ssh ended with {done.returncode}'}", "fix it on the machine"
        )

    def _unreached(self, log: str) -> MachineRefused:
        where = self._words[-1]
        if "HOST IDENTIFICATION HAS CHANGED" in log:
            return MachineRefused(
                f"{self.node} presents a different host key than the known one, so it was refused",
                "find out why before you connect",
            )
        if "Host key verification failed" in log or "host key is known" in log:
            return MachineRefused(f"the host key of {self.node} is unknown", f"log in once and compare it: ssh {where}")
        host = Host(self.node, 0, takes_part=True, address=where.rpartition("@")[2], is_public=True)
        told = explain(host, log, way_in=True)
        return MachineRefused(told.message, f"try it by hand: ssh {shlex.join(self._words)}")


def packed(wanted: Mapping[str, File], now: float) -> bytes:
    """An archive of these files, root's and written ``now`` (seconds since the epoch), for ``tar -C /``."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for path, file in wanted.items():
            data = file.text.encode()
            about = tarfile.TarInfo(path.lstrip("/"))
            about.size, about.mode, about.mtime = len(data), int(file.mode, 8), int(now)
            archive.addfile(about, io.BytesIO(data))
    return made.getvalue()


def _answer(
    command: tuple[str, ...], stdin: bytes = b"", timeout_s: float = _ANSWER_S
) -> subprocess.CompletedProcess[bytes]:
    """What ssh prints until it ends. Into files, because pipes end later than ssh where it leaves something behind: a
    child of a ProxyCommand, or a connection that ControlPersist keeps. Raises ``subprocess.TimeoutExpired``."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        done = subprocess.run(command, input=stdin, stdout=out, stderr=err, check=False, timeout=timeout_s)
        # By name: what is left behind still writes where `out` and `err` point to.
        told, said = Path(out.name).read_bytes(), Path(err.name).read_bytes()
    return subprocess.CompletedProcess(command, done.returncode, told, said)


def _told(output: str) -> dict[str, list[str]]:
    """The lines that are ours: a login shell may print what it likes."""
    told: dict[str, list[str]] = {}
    for name, value in re.findall(r"^gpuctl:(\w+)=(.+)$", output, re.MULTILINE):
        told.setdefault(name, []).append(value.strip())
    return told


def _is_for_others(address: str) -> bool:
    """Whether another machine may find this one by ``address``."""
    try:
        return not ipaddress.ip_address(address).is_loopback and "%" not in address  # a zone is the machine's own
    except ValueError:
        return False


def _settings(config: Path, words: Sequence[str]) -> dict[str, list[str]]:
    """The settings that ssh would use for ``words``, by name."""
    command = ("ssh", "-G", "-F", str(config), *words)
    done = _answer(command)
    done.check_returncode()
    found: dict[str, list[str]] = {}
    for line in done.stdout.decode().splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, []).append(value)
    return found


def _known_keys(settings: Mapping[str, str]) -> list[str]:
    """The host keys of a machine in the user's files of known hosts."""
    host, port = settings["hostname"], settings["port"]
    name = settings.get("hostkeyalias") or (host if port == "22" else f"[{host}]:{port}")
    files_ = f"{settings.get('userknownhostsfile', '')} {settings.get('globalknownhostsfile', '')}".split()
    found = []
    for file in files_:
        path = Path(file).expanduser()
        if path.is_file():
            command = ("ssh-keygen", "-F", name, "-f", str(path))
            said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S).stdout
            found += re.findall(r"^[^#@\s]\S* (\S+ [A-Za-z0-9+/=]+)", said, re.MULTILINE)
    return found
