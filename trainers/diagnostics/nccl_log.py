"""What NCCL says of the network it uses, out of its log (``NCCL_DEBUG=INFO``): the only place where it admits that it
has fallen back to TCP.

Its words have changed over the years; those of NCCL 2.4 to 2.28 and of aws-ofi-nccl 1.0 to 1.21 are known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuctl.cluster.network.verification import Transport

_VIA = re.compile(r"via NET/([^/\n]+)/\d+(/GDRDMA)?")
_USING = re.compile(r"Using network (.+?)\s*$", re.MULTILINE)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,]+)")
_BOOTSTRAP = re.compile(r"Bootstrap\s*: Using (?:\[0\])?([\w.@-]+):")
_SOCKET = re.compile(r"NET/Socket : Using \[0\]([\w.@-]+):")
"""A single rank has no bootstrap network from NCCL 2.28 on."""
_DEVICES = (("IB", re.compile(r"NET/IB : Using \[")), ("Socket", re.compile(r"NET/Socket : Using \[")))
_HARMFUL = (("NCCL_NET", "Socket"), ("NCCL_IB_DISABLE", "1"), ("NCCL_NET_PLUGIN", "none"))
_CLUES = (
    (
        r"NET/OFI No eligible providers were found|NET/OFI aws-ofi-nccl initialization failed",
        "libfabric found no EFA device: its driver is not loaded, or the container lacks /dev/infiniband",
    ),
    (r"NET/OFI Selected [Pp]rovider is (?!efa)", "libfabric chose another provider than EFA: set FI_PROVIDER=efa"),
    (
        r"No plugin found|Could not find: libnccl-net|Plugin load .* returned 2 ",
        "NCCL found no plug-in libnccl-net.so: EFA's is in /opt/amazon/ofi-nccl/lib, and LD_LIBRARY_PATH lacks it",
    ),
    (r"[Ff]ailed to open libibverbs", "libibverbs is not installed, or not in the container"),
    (r"NET/IB ?: No device found", "NCCL found no InfiniBand device: no driver, or NCCL_IB_HCA names none that is up"),
)


def transport(log: str, env: Mapping[str, str]) -> Transport:
    """The transport of one node, from the logs of its workers one after the other. Where several networks are used, the
    slowest. ``env``: the workers' variables; NCCL tells what it found there up to 2.27."""
    used = [(name, bool(gdr)) for name, gdr in _VIA.findall(log)]
    names = {name for name, _ in used} or set(_USING.findall(log)) or _devices(log)
    network = min((_called(name, log) for name in names), key=_speed, default="")
    interface = _BOOTSTRAP.search(log) or _SOCKET.search(log)
    set_ = [
        f"{name}={value} is set: unset it"
        for name, value in _HARMFUL
        if env.get(name) == value or f"{name} set by environment to {value}" in log
    ]
    return Transport(
        network=network,
        gdr=bool(used) and all(gdr for _, gdr in used),
        interface=interface[1] if interface else "",
        clues=(*set_, *(said for pattern, said in _CLUES if re.search(pattern, log))),
    )


def _devices(log: str) -> set[str]:
    """The devices NCCL chose. Before version 2.5 it did not say which one it had chosen; InfiniBand goes before
    sockets."""
    return set([name for name, pattern in _DEVICES if pattern.search(log)][:1])


def _called(name: str, log: str) -> str:
    if name == "Socket":
        return "socket"
    if name.startswith("IB"):  # IBext, IBext_v8: the same by NVIDIA's plug-in
        return "roce" if "/RoCE" in log and "/IB" not in log.replace("NET/IB", "") else "infiniband"
    if "Libfabric" in name or name == "OFI":
        providers = _PROVIDER.findall(log)
        others = [provider for provider in providers if not provider.startswith("efa")]
        return f"libfabric/{others[0]}" if others else "efa" if providers else "libfabric"
    return name.lower()


def _speed(network: str) -> int:
    """A sort key, slower networks first."""
    return 0 if network == "socket" else 1 if network.startswith("libfabric") else 2
