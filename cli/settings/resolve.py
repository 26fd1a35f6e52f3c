"""The settings of a verb: flag > environment (``GPUCTL_<KEY>``) > ``gpuctl.yaml`` > default, and which of them won."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuctl.cli.settings import file as settings_file
from gpuctl.cli.settings.options import refusal, refuse_unusable, whole_number
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import strategy
from gpuctl.cluster.storage.bucket_names import parts_of

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
    """All settings, parsed. ``found`` holds them as text with their sources, in the order of ``KEYS``."""

    cluster: str
    provider: str
    hosts: tuple[str, ...]
    nodes: tuple[int, int]
    slots: int | None
    bucket: str | None
    backend: str | None
    region: tuple[str, ...]
    max_restarts: int
    exit_timeout: int
    nproc: int | None
    image: str | None
    environment: str | None
    launcher: str
    strategy: str | None
    env: dict[str, str]
    found: dict[str, Setting]


def load(
    flags: Mapping[str, Flag] | None = None,
    env: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    *,
    only: Collection[str] | None = None,
) -> Settings:
    """Load the settings for a verb.

    Args:
        flags: the verb's, by key; one whose value is ``None`` was not given.
        env: variables, ``GPUCTL_<KEY>`` among them.
        folder: in or above which ``gpuctl.yaml`` is; ``None``: the working folder.
        only: the keys that the verb uses; ``None``: all. The others are their defaults where they are wrong, so that
            nobody is kept from `gpuctl down`.

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
        try:
            values[key.name] = _parsed(key, setting.text, where)
        except BadInput:
            if only is None or key.name in only:
                raise
            values[key.name] = _parsed(key, key.default, key.name)
    worker_env = {name.removeprefix("env."): s.text for name, s in found.items() if name.startswith("env.")}
    return Settings(**values, env=worker_env, found=found)


def parse_nodes(text: str) -> tuple[int, int]:
    """``4`` or ``2:4`` as (fewest, most). Raises ``ValueError``."""
    numbers = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip(), re.ASCII)
    if not numbers:
        raise ValueError("is not a number of nodes; use a number such as 4, or MIN:MAX such as 2:4")
    fewest = int(numbers[1])
    most = int(numbers[2] or fewest)
    if fewest < 1:
        raise ValueError("is too few; use 1 or more")
    if most < fewest:
        raise ValueError(f"has a minimum above the maximum; did you mean {most}:{fewest}?")
    return fewest, most


def _winner(
    key: Key, flag: Flag, env: Mapping[str, str], file: Mapping[str, settings_file.SourcedValue]
) -> tuple[Setting, str]:
    """The setting, and how an error about it begins."""
    if isinstance(flag, str):
        return Setting(flag, "flag"), f"{key.flag} {flag}"
    if text := env.get(key.variable):
        refuse_unusable(key.variable, text)
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


def _worker_env(
    flags: Flag, env: Mapping[str, str], file: Mapping[str, settings_file.SourcedValue]
) -> dict[str, Setting]:
    """Variables for the workers: unlike the other settings, they add up."""
    found = {name: Setting(line.text, line.where) for name, line in file.items() if name.startswith("env.")}
    refuse_unusable("GPUCTL_ENV", env.get("GPUCTL_ENV", ""), may_be_empty=True)
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


def cluster_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", text):
        raise ValueError(
            "is not a name; use at most 40 lower-case letters, digits and dashes (on a cloud 30, a letter first)"
        )
    return text


def _image(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?", text):
        raise ValueError("is not the name of an image; use one such as pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime")
    return text


def _launcher(text: str) -> str:
    from gpuctl.trainers.launchers.adapter import named

    named(text)
    return text


def _strategy(text: str) -> str:
    try:
        return str(strategy.parse(text))
    except BadInput as error:
        raise ValueError(f"is invalid: {error}") from error


def _backend(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://\S+", text):
        raise ValueError("is not a URL that `pulumi login` takes; use one such as s3://bucket")
    return text


def _bucket(text: str) -> str:
    """``S3://`` is ``s3://`` from here on."""
    scheme = parts_of(text).scheme
    if scheme == "memory":
        raise ValueError("is another bucket in each process; use a folder, such as file:///mnt/shared")
    return scheme + text[len(scheme) :]


def _text(text: str) -> str:
    return text


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


KEYS = (
    Key("cluster", cluster_name, "default", "Name of the cluster."),
    Key("provider", _text, "local", "Provider of the machines."),
    Key("hosts", _list, "", "For provider ssh: the machines, separated by commas."),
    Key("nodes", parse_nodes, "1", "Number of nodes, or MIN:MAX."),
    Key("slots", whole_number(1), "", "Worker processes per node; unset: one per GPU, else 1."),
    Key("bucket", _bucket, "", "URL of the bucket; unset: created by the provider."),
    Key("backend", _backend, "", "URL of Pulumi's state; unset: a folder on this machine."),
    Key(
        "region",
        _list,
        "",
        "For clouds: the region, or several separated by commas, of which the cheapest is taken.",
    ),
    Key("max_restarts", whole_number(0), "0", "Times a script that fails is started again; lost nodes do not count."),
    Key(
        "exit_timeout",
        whole_number(0),
        "60",
        "Seconds that ranks may stay and do nothing once others have ended; 0: for ever.",
    ),
    Key("nproc", whole_number(1), "", "Worker processes per node of a job; unset: the node's slots."),
    Key("image", _image, "", "Container image for a job's workers; unset: the node itself."),
    Key("environment", _text, "", "File with the packages of a job, or none; unset: the first that is there."),
    Key("launcher", _launcher, "torchrun", "What starts a job's workers: torchrun, jax, tensorflow, horovod or exec."),
    Key("strategy", _strategy, "", "What ranks exchange under gpuctl.Trainer; unset: as the script says."),
    Key("env", _text, "", "Variables for the workers."),
)
