"""User-data: what a cloud hands to a machine that it starts, and cloud-init there carries out.

It has as much of the boot program with it as tells what becomes of the machine and takes it away again; the steps come
with gpuctl's wheel. Programs go without their comments and docstrings, and compressed (``stacks.clouds.user_data``) all
of it is within ``MOST_BYTES``.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from gpuctl.bootstrap.boot import FROM_WHEEL
from gpuctl.bootstrap.node_spec import NodeSpec
from gpuctl.cluster.errors import BadInput

MOST_BYTES = 12 * 1024
"""Compressed. AWS takes 16,384."""
PACKAGE = "/opt/gpuctl/boot/gpuctl_boot"
_UNITS = "/etc/systemd/system"

_BOOT = f"""
[Unit]
Description=gpuctl: from a bare machine to a node
Wants=network-online.target
After=network-online.target gpuctl-idle.service
StartLimitIntervalSec=0
[Service]
Type=exec
Environment=PYTHONPATH={PACKAGE.rpartition("/")[0]} DEBIAN_FRONTEND=noninteractive
ExecStart=/usr/bin/python3 -m gpuctl_boot boot
Restart=on-failure
RestartSec=5
[Install]
WantedBy=multi-user.target
"""
"""Not a oneshot: the machine would not be up, nor cloud-init finished, until it ends."""

_IDLE = f"""
[Unit]
Description=gpuctl: removes a machine that nobody uses
StartLimitIntervalSec=0
[Service]
Type=exec
Environment=PYTHONPATH={PACKAGE.rpartition("/")[0]}
ExecStart=/usr/bin/python3 -m gpuctl_boot idle
Restart=on-failure
RestartSec=5
[Install]
WantedBy=multi-user.target
"""

NEEDED_TO_THE_END = (
    *("network.target", "network-online.target", "nss-lookup.target", "remote-fs.target"),
    *("scratch.mount", "opt-dlami-nvme.mount", "dlami-nvme.service", "blk-availability.service"),
    *("var-lib-gpuctl-node-jobs.mount", *(f"var-lib-{one}.mount" for one in ("docker", "containerd", "containers"))),
    *("systemd-networkd.service", "systemd-resolved.service", "NetworkManager.service", "chrony.service"),
    *("containerd.service", "docker.service"),
    *("nvidia-persistenced.service", "nvidia-fabricmanager.service", "openibd.service", "sku-customizations.service"),
)
"""What a draining agent and its workers still need. systemd stops in the reverse of the order in which it starts, and
what has no place in that order at once: the network gives its DHCP lease back, LVM unmounts the disks that nobody uses
at the moment (blkdeactivate(8)), Docker kills its containers, the fabric manager the processes on the GPUs, and Azure's
sku-customizations stops that manager and removes NCCL's topology. Sources: systemd.unit(5), "Before=, After="; systemd
issue 24584; azhpc-images, setup_sku_customizations.sh. A name that the machine does not have is no harm."""

_AGENT = f"""
[Unit]
Description=gpuctl: the agent
After={" ".join(NEEDED_TO_THE_END)}
StartLimitIntervalSec=0
[Service]
Type=exec
Environment=HOME=/root
EnvironmentFile=-/var/lib/gpuctl/agent.env
ExecStart=/opt/gpuctl/venv/bin/python -m gpuctl.bootstrap.agent /var/lib/gpuctl/node
Restart=on-failure
RestartSec=2
ExecStopPost=-/bin/rm -f /run/gpuctl/rank0.json /run/gpuctl/ill
KillMode=mixed
Delegate=yes
TimeoutStopSec=150
OOMPolicy=continue
LimitMEMLOCK=infinity
LimitNOFILE=1048576
TasksMax=infinity
"""
"""Boot starts it. Who rank 0 is, and whether a GPU is ill, nobody knows once it has ended, however it did. Its
workers pin memory for the fabric, look for caches in a home (systemd names none), and one that runs out of memory does
not take it along. It may divide its cgroup (``launch.job_cgroup``)."""

_SECRET = re.compile("key|secret|token|passw|sas|credential", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@")
_HAVE_THEIR_OWN = "remove it: machines have their own identity"
_NO_UPGRADES = 'APT::Periodic::Enable "0";\n'


class File(NamedTuple):
    text: str
    mode: str
    """As chmod takes it."""


def render(spec: NodeSpec) -> str:
    """Pure, and the same text every time for the same spec. Raises ``BadInput`` for a spec with a secret in it: whoever
    may look at a machine in the cloud's console reads its user-data, and so does every process on the machine."""
    _refuse_secrets(spec)
    from jinja2 import Environment, StrictUndefined  # weighs 50 ms, and no other verb needs it

    template = Path(__file__).with_name("user-data.yaml.j2").read_text()
    return (
        Environment(undefined=StrictUndefined, keep_trailing_newline=True)
        .from_string(template)
        .render(files=files(spec))
    )


def files(spec: NodeSpec) -> dict[str, File]:
    """All files to put on the machine, by path, in this order. Where SSH brings them, they may hold keys."""
    return {
        "/etc/apt/apt.conf.d/99-gpuctl": File(_NO_UPGRADES, "0644"),
        "/etc/gpuctl/node.json": File(_every_field(spec), "0600"),
        **{f"{PACKAGE}/{name}.py": File(text, "0644") for name, text in _program().items()},
        f"{_UNITS}/gpuctl-boot.service": File(_BOOT.lstrip(), "0644"),
        f"{_UNITS}/gpuctl-idle.service": File(_IDLE.lstrip(), "0644"),
        f"{_UNITS}/gpuctl-agent.service": File(_AGENT.lstrip(), "0644"),
    }


def _refuse_secrets(spec: NodeSpec) -> None:
    options = dict(parse_qsl(urlsplit(spec.bucket).query, keep_blank_values=True))
    for name in options:
        if _SECRET.search(name):
            raise BadInput(
                f"the bucket's URL has a secret in it ({name}), and machines are told the URL", _HAVE_THEIR_OWN
            )
    for name, value in {**spec.env, **spec.sources}.items():
        if _SECRET.search(name) or _PASSWORD.search(value):
            raise BadInput(f"{name} holds a secret, and would be in user-data", _HAVE_THEIR_OWN)


def _every_field(spec: NodeSpec) -> str:
    """The boot program knows no defaults."""
    nested = {"package": msgspec.structs.asdict(spec.package), "promise": msgspec.structs.asdict(spec.promise)}
    return json.dumps({**msgspec.structs.asdict(spec), **nested}) + "\n"  # in ASCII: YAML has line ends of its own


@cache
def _program() -> dict[str, str]:
    folder = Path(__file__).parent.with_name("boot")
    return {path.stem: _bare(path.read_text()) for path in sorted(folder.glob("*.py")) if path.stem not in FROM_WHEEL}


def _bare(source: str) -> str:
    """The same program without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            body = [line for line in node.body if not _is_text(line)]
            node.body = body or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    return ast.unparse(tree) + "\n"


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
