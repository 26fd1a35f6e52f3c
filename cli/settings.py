"""What a verb is told: flag > environment (``GPUCTL_<KEY>``) > ``gpuctl.yaml`` > default, and which of them won."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuctl.cli import settings_file
from gpuctl.cli.options import refusal, whole_number
from gpuctl.cluster.errors import BadInput

Flag = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. ``parse`` raises ``ValueError`` with what was expected, as in "is not …"."""

    name: str
    parse: Callable[[str], Any]
    default: str
    about: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "GPUCTL_" + self.name.upper()


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as text, and where it came from: ``flag``, ``env GPUCTL_NODES``, ``gpuctl.yaml:3`` or ``default``."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, parsed. ``found`` has them as text with their sources, in the order of ``KEYS``."""

    cluster: str
    provider: str
    hosts: tuple[str, ...]
    nodes: tuple[int, int]
    slots: int | None
    bucket: str | None
    backend: str | None
    max_restarts: int
    nproc: int | None
    image: str | None
    env: dict[str, str]
    found: dict[str, Setting]

    @property
    def size(self) -> tuple[int, int]:
        """Fewest and most nodes: of machines that are named one by one, as many as there are if nobody said another."""
        is_counted = self.provider == "ssh" and self.found["nodes"].source == "default"
        return (len(self.hosts), len(self.hosts)) if is_counted else self.nodes


def load(
    flags: Mapping[str, Flag] | None = None, env: Mapping[str, str] = os.environ, folder: Path | None = None
) -> Settings:
    """Settings for a verb that was given ``flags`` in ``folder`` (default: the working folder).

    Raises ``BadInput`` naming the flag, the variable or the line at fault.
    """
    flags = flags or {}
    path = settings_file.nearest(folder or Path.cwd())
    file = settings_file.read(path, [key.name for key in KEYS], ["env"]) if path else {}
    found: dict[str, Setting] = {}
    values: dict[str, Any] = {}
    for key in KEYS:
        if key.name == "env":
            found |= _worker_env(flags.get("env") or (), env, file)
            continue
        setting, where = _winner(key, flags.get(key.name), env, file)
        found[key.name] = setting
        values[key.name] = _parsed(key, setting.text, where)
    worker_env = {name.removeprefix("env."): s.text for name, s in found.items() if name.startswith("env.")}
    return Settings(**values, env=worker_env, found=found)


def parse_nodes(text: str) -> tuple[int, int]:
    """``4`` or ``2:4`` as (fewest, most). Raises ``ValueError``."""
    numbers = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip(), re.ASCII)
    if not numbers:
        raise ValueError("is not a number of nodes; use one such as 4, or fewest:most such as 2:4")
    fewest = int(numbers[1])
    most = int(numbers[2] or fewest)
    if fewest < 1:
        raise ValueError("is no node at all; use 1 or more")
    if most < fewest:
        raise ValueError(f"is more at least than at most; did you mean {most}:{fewest}?")
    return fewest, most


def _winner(
    key: Key, flag: Flag, env: Mapping[str, str], file: Mapping[str, settings_file.Line]
) -> tuple[Setting, str]:
    """The setting, and how an error about it begins."""
    if isinstance(flag, str):
        return Setting(flag, "flag"), f"{key.flag} {flag}"
    if text := env.get(key.variable):
        return Setting(text, f"env {key.variable}"), f"{key.variable}={text}"
    if line := file.get(key.name):
        return Setting(line.text, line.where), f"{line.where}: {key.name}: {line.text}"
    return Setting(key.default, "default"), key.name


def _parsed(key: Key, text: str, where: str) -> Any:
    if text == "" and key.default == "":
        return () if key.parse is _list else None
    try:
        return key.parse(text)
    except ValueError as error:
        raise refusal(where, error) from error


def _worker_env(flags: Flag, env: Mapping[str, str], file: Mapping[str, settings_file.Line]) -> dict[str, Setting]:
    """Variables for the workers: unlike the other settings, they add up."""
    found = {name: Setting(line.text, line.where) for name, line in file.items() if name.startswith("env.")}
    try:
        words = shlex.split(env.get("GPUCTL_ENV", ""))
    except ValueError as error:
        raise BadInput(f"GPUCTL_ENV: {error}", "write it as a shell would: A=1 B='two words'") from error
    for words_, source, where in ((words, "env GPUCTL_ENV", "GPUCTL_ENV"), (flags or (), "flag", "--env")):
        for word in words_:
            name, equals, value = word.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise BadInput(f"{where} {word} is not NAME=VALUE", "write it as in --env OMP_NUM_THREADS=2")
            found[f"env.{name}"] = Setting(value, source)
    return found


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", text):
        raise ValueError("is not a name; use at most 40 lower-case letters, digits and dashes")
    return text


def _image(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?", text):
        raise ValueError("is not the name of an image; use one such as pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime")
    return text


def _backend(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://\S+", text):
        raise ValueError("is not a URL that `pulumi login` takes; use one such as s3://bucket")
    return text


def _text(text: str) -> str:
    return text


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


KEYS = (
    Key("cluster", _name, "default", "Name of the cluster."),
    Key("provider", _text, "local", "Where the machines come from."),
    Key("hosts", _list, "", "Only of provider ssh: the machines, with commas between."),
    Key("nodes", parse_nodes, "1", "Nodes of the cluster: a number, or fewest:most."),
    Key("slots", whole_number(1), "", "Worker processes per node; unset: one per GPU, else 1."),
    Key("bucket", _text, "", "URL of the bucket; unset: the provider chooses one."),
    Key("backend", _backend, "", "URL of where Pulumi keeps its state; unset: a folder on this machine."),
    Key("max_restarts", whole_number(0), "0", "Times a script that fails is started again; lost nodes do not count."),
    Key("nproc", whole_number(1), "", "Worker processes per node of a job; unset: the node's slots."),
    Key("image", _image, "", "Container image for a job's workers; unset: the node itself."),
    Key("env", _text, "", "Variables for the workers."),
)
