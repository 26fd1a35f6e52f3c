"""An ``environment.yml`` on nodes: solved and installed by rattler from a channel, and moved to other nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.environments import prefix
from gpuctl.bootstrap.environments.disk import NodeEnvironment
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed
from gpuctl.cluster.environments import registry, source
from gpuctl.cluster.errors import Damaged, GpuctlError
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.bootstrap.environments.test_node_environments import Node, published, run
from tests.fakes.conda_channel import PLACEHOLDER, CondaChannel, Content, Link
from tests.fakes.package_index import PackageIndex, write_wheel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the channel's packages are for Linux")


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> CondaChannel:
    made = CondaChannel(tmp_path_factory.mktemp("conda") / "channel")
    made.add_python()
    told = f"{PLACEHOLDER}/share".encode()
    files = {
        "bin/where": f'#!/bin/sh\nexec {PLACEHOLDER}/bin/python -c "import gamma; print(gamma.VERSION)"\n'.encode(),
        "share/where.txt": told,
        "lib/libwhere.so": b"\x7fELF\0" + told + b"\0" * 9 + b"after",
        "etc/conda/activate.d/where.sh": b'export WHERE_DATA="$CONDA_PREFIX/share"\n',
    }
    made.add("where", "1.0", files, depends=("gamma",))
    odd: dict[str, Content] = {
        "lib/sub/real.txt": b"real",
        "lib/linked": Link("sub"),
        "lib64/libq.so": b"q",
        "share/outside": Link("/etc/hostname"),
        "bin/crt/stub": b"stub",
        "etc/conda/activate.d/odd.sh": b"export LATIN=$(printf 'caf\\351')\n",
    }
    made.add("odd", "1.0", odd)
    made.add_pure("gamma", "3.0", scripts=("gamma-tool = gamma:main",))
    made.add_pure("gamma", "3.1", depends=("nowhere",))
    made.add_pure("old", "1.0", depends=("gamma <3",))
    made.add_pure("mspec", "1.0")
    made.add_pure("pytorch", "2.15.0")
    made.add("python", "3.99.1", {"bin/python": b"#!/bin/sh\n"})
    return made


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    nodes: list[Node] = []
    store = open_bucket((tmp_path / "bucket").as_uri())

    def made(name: str) -> Node:
        nodes.append(Node(tmp_path, name, store))
        return nodes[-1]

    yield made
    for one in nodes:
        one.stop()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


def job(code: Path, channel: CondaChannel, *dependencies: str, pip: tuple[str, ...] = (), **env: str) -> JobSpec:
    lines = [*(f"- {one}" for one in dependencies), *(["- pip", "- pip:"] if pip else []), *(f"  - {p}" for p in pip)]
    text = "\n".join([f"channels: [{channel.url}]", "dependencies:", *lines])
    (code / "environment.yml").write_text(f"{text}\n")
    found = source.find(code)
    assert found is not None and found.source.kind == "conda"
    return JobSpec(job="train-1", number=1, script="train.py", env=env, environment=found.source)


def have(node: Node, spec: JobSpec, code: Path, *others: Node) -> NodeEnvironment:
    found = node.environments.have(spec, code, [one.member for one in others])
    assert found is not None
    return found


def store_of(node: Node) -> Bucket:
    return open_bucket((node.folder.parent.parent / "bucket").as_uri())


def output(found: NodeEnvironment, *command: str) -> str:
    env = found.variables({"PATH": os.environ["PATH"]})
    path = str(found.folder / "bin" / command[0])
    return subprocess.run([path, *command[1:]], env=env, check=True, capture_output=True, text=True).stdout.strip()


def test_one_node_builds_it_and_it_works_where_another_unpacks_it(
    node: Callable[[str], Node], code: Path, channel: CondaChannel, index: PackageIndex
) -> None:
    write_wheel(index.folder, "needs-gamma", "1.0", requires=("gamma", "torch"), scripts={"ng": "needs_gamma:main"})
    write_wheel(index.folder, "gamma", "9.0")
    spec = job(code, channel, "where", pip=("needs-gamma", "beta"), UV_DEFAULT_INDEX=index.url)
    one, two = node("node-1"), node("a-node-with-a-longer-name")
    first = have(one, spec, code)
    (stored,) = published(store_of(one))
    index.fetched.clear()
    second = have(two, spec, code, one)
    assert index.fetched == [] and any("MB from node-1" in line for line in two.said), two.said
    assert first.folder != second.folder
    for found in (first, second):
        place = prefix.of(found.folder)
        assert len(place) == prefix.BYTES and found.folder.samefile(place)
        assert (found.folder / "share/where.txt").read_text() == f"{place}/share"
        binary = (found.folder / "lib/libwhere.so").read_bytes()
        assert binary.startswith(b"\x7fELF\0" + f"{place}/share".encode() + b"\0") and binary.endswith(b"after")
        assert output(found, "where") == "3.0"
        assert output(found, "gamma-tool") == "3.0"
        assert output(found, "beta-tool") == "b"
        told = "import gamma, needs_gamma, os, sys; print(gamma.VERSION, sys.prefix, os.environ['WHERE_DATA'])"
        assert run(found, told) == f"3.0 {found.folder} {found.folder}/share"
        assert (
            run(found, "import gpuctl, sys, torch; print(torch.__file__.startswith(sys.prefix) if 0 else 'there')")
            == "there"
        )
        assert run(
            found, "import importlib.metadata as m; print(*(d.name for d in m.distributions(name='torch')))"
        ) == ("torch")
    packages = stored.environment.packages
    assert (packages["gamma"], packages["needs-gamma"], packages["beta"]) == ("3.0", "1.0", "1.5")
    assert "torch" not in packages and stored.environment.torch


def test_odd_packages_are_the_same_on_every_node(
    node: Callable[[str], Node], code: Path, channel: CondaChannel, index: PackageIndex
) -> None:
    """Links to folders and out of the environment, a ``lib64``, a folder in ``bin``, variables that are no UTF-8."""
    spec = job(code, channel, "odd", pip=("beta",), UV_DEFAULT_INDEX=index.url)
    one, two = node("node-1"), node("node-2")
    first = have(one, spec, code)
    published(store_of(one))
    for found in (first, have(two, spec, code, one)):
        assert (found.folder / "lib/linked/real.txt").read_bytes() == b"real"
        assert (found.folder / "lib64/libq.so").read_bytes() == b"q"
        assert (found.folder / "share/outside").readlink() == Path("/etc/hostname")
        assert run(found, "import os; print(os.environb[b'LATIN'] == b'caf\\xe9')") == "True"
    assert not any("built again" in line for line in two.said)


def test_what_pip_chose_makes_another_environment(
    node: Callable[[str], Node], code: Path, channel: CondaChannel, index: PackageIndex
) -> None:
    one = node("node-1")
    spec = job(code, channel, "gamma", pip=("alpha",), UV_DEFAULT_INDEX=index.url)
    first = have(one, spec, code)
    published(store_of(one))
    write_wheel(index.folder, "alpha", "3.0", requires=("beta",))
    registry.remove(store_of(one), first.environment.digest)
    second = have(one, replace(spec, job="train-2"), code)
    assert (first.environment.packages["alpha"], second.environment.packages["alpha"]) == ("2.0", "3.0")
    assert first.folder != second.folder and (second.folder / "conda-meta").is_dir()
    assert run(second, "import alpha, gamma; print(alpha.VERSION, gamma.VERSION)") == "3.0 3.0"


def test_a_channels_token_is_kept_nowhere(node: Callable[[str], Node], code: Path, channel: CondaChannel) -> None:
    spec = job(code, channel, "gamma", TOKEN="channel")
    url = channel.url.replace("/channel", "/${TOKEN}")
    (code / "environment.yml").write_text(f"channels: ['{url}']\ndependencies: [gamma]\n")
    found = have(node("node-1"), spec, code)
    records = [path.read_text() for path in (found.folder / "conda-meta").glob("gamma*.json")]
    assert records and all("/${TOKEN}/" in text and "/channel/" not in text for text in records)
    (code / "environment.yml").write_text("channels: ['file:///nowhere/${TOKEN}']\ndependencies: [x]\n")
    away = source.find(code)
    assert away is not None
    spec = replace(spec, job="train-2", environment=away.source, env={"TOKEN": "s3cret"})
    with pytest.raises(GpuctlError) as caught:
        have(node("node-2"), spec, code)
    assert "s3cret" not in caught.value.message


def test_condas_own_torch_is_not_layered_on_the_nodes(
    node: Callable[[str], Node], code: Path, channel: CondaChannel
) -> None:
    one = node("node-1")
    have(one, job(code, channel, "pytorch"), code)
    (stored,) = published(store_of(one))
    assert stored.environment.torch == "" and stored.environment.packages["pytorch"] == "2.15.0"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("nothing-like-it", "environment.yml: Cannot solve .*nothing-like-it"),
        ("python=2.7", "environment.yml: Cannot solve .*python"),
        ("gamma=3.1", "environment.yml: Cannot solve .*nowhere"),
        ("=", "environment.yml: "),
    ],
)
def test_what_cannot_be_solved_ends_it_with_the_solvers_reason(
    node: Callable[[str], Node], code: Path, channel: CondaChannel, wanted: str, message: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=message) as caught:
        have(node("node-1"), job(code, channel, f'"{wanted}"'), code)
    assert "\n" not in caught.value.message and "panicked" not in caught.value.message
    assert registry.listed(store_of(node("node-2"))) == []


def test_another_python_than_the_nodes_is_refused(
    node: Callable[[str], Node], code: Path, channel: CondaChannel
) -> None:
    with pytest.raises(EnvironmentFailed, match=r"Cannot solve .*python"):
        have(node("node-1"), job(code, channel, "python=3.99"), code)


def test_what_gpuctl_itself_needs_holds_for_it_too(
    node: Callable[[str], Node], code: Path, channel: CondaChannel
) -> None:
    """Its own modules run in the environment."""
    channel.add_pure("msgspec", "0.5")
    with pytest.raises(EnvironmentFailed, match=r"Cannot solve .*msgspec"):
        have(node("node-1"), job(code, channel, "msgspec"), code)


def test_pips_packages_must_fit_condas(
    node: Callable[[str], Node], code: Path, channel: CondaChannel, index: PackageIndex
) -> None:
    spec = job(code, channel, "gamma", pip=("torch==2.15.0",), UV_DEFAULT_INDEX=index.url)
    with pytest.raises(EnvironmentFailed, match=r"environment.yml: .*torch==2.15.0") as caught:
        have(node("node-1"), spec, code)
    assert "\n" not in caught.value.message


def test_a_packed_one_that_does_not_say_where_it_was_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    for text in ("", '{"prefix": "/short", "files": []}'):
        (tmp_path / "conda-meta" / "gpuctl-prefix.json").write_text(text)
        with pytest.raises(Damaged, match="the packed environment"):
            prefix.move(tmp_path, prefix.of(tmp_path))


def test_a_path_that_cannot_be_written_into_programs_is_told(tmp_path: Path) -> None:
    with pytest.raises(GpuctlError, match="is too long for a conda environment; use a shorter GPUCTL_STATE_DIR"):
        prefix.of(tmp_path / ("x" * prefix.BYTES))
