"""What a node does for a job's environment, with the real uv: one builds, the others fetch, all have the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.agent.replica_server import ReplicaServer
from gpuctl.bootstrap.environments import disk, installer, publish
from gpuctl.bootstrap.environments.disk import NodeEnvironment
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed
from gpuctl.bootstrap.environments.node_environments import NodeEnvironments
from gpuctl.cluster import layout
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.environments import registry, source
from gpuctl.cluster.errors import Fenced, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.records.environments import EnvironmentBuild
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.rounds import Member
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.upload import upload_file
from tests.fakes.package_index import PackageIndex, write_wheel
from tests.waiting import until


class Node:
    """A node's environments with the server that other nodes fetch from."""

    def __init__(self, folder: Path, name: str, store: Bucket) -> None:
        self.folder = folder / name / "environments"
        self.said: list[str] = []
        self.did: list[str] = []
        self.server = ReplicaServer(folder / name / "jobs", "secret", self.folder / "archives")
        self.port = self.server.start("127.0.0.1")
        own = EnvironmentBuild(node=name, incarnation="1", beat=0, address=f"127.0.0.1:{self.port}")
        env = {"PATH": os.environ["PATH"]}
        args = (self.folder, store, own, "secret", env, SystemClock(), self.said.append)
        self.environments = NodeEnvironments(*args, lambda: self.did.append(self.environments.doing))

    @property
    def member(self) -> Member:
        name = self.folder.parent.name
        return Member(node=name, incarnation="1", address="127.0.0.1", nproc=1, tier_port=self.port)

    def stop(self) -> None:
        self.environments.stop()
        self.server.stop()


@pytest.fixture
def store(tmp_path: Path) -> Bucket:
    return open_bucket((tmp_path / "bucket").as_uri())


@pytest.fixture
def node(tmp_path: Path, store: Bucket) -> Iterator[Callable[[str], Node]]:
    nodes: list[Node] = []

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


def job(code: Path, index: PackageIndex | None, text: str, name: str = "train-1", **env: str) -> JobSpec:
    (code / "requirements.txt").write_text(text)
    found = source.find(code)
    assert found is not None
    variables = {"UV_DEFAULT_INDEX": index.url, **env} if index else env
    return JobSpec(job=name, number=1, script="train.py", env=variables, environment=found.source)


def run(found: NodeEnvironment, code: str) -> str:
    env = found.variables({"PATH": os.environ["PATH"]})
    return subprocess.run(
        [found.python, "-c", code], env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def published(store: Bucket) -> list[registry.StoredEnvironment]:
    until(lambda: bool(registry.listed(store)), "an environment is in the bucket")
    until(lambda: not store.list("environments/building"), "the claim is over")
    return registry.listed(store)


def test_one_node_builds_and_another_fetches_the_same(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    one, two = node("node-1"), node("node-2")
    spec = job(code, index, "alpha\n")
    first = one.environments.have(spec, code)
    assert first is not None
    (stored,) = published(store)
    index.fetched.clear()
    second = two.environments.have(spec, code, [one.member])
    assert second is not None and index.fetched == [], "nothing is resolved or downloaded again"
    assert any("MB from node-1" in line for line in two.said), two.said
    for found in (first, second):
        assert run(found, "import alpha, beta, sys; print(alpha.VERSION, sys.prefix)") == f"2.0 {found.folder}"
        assert run(found, "import gpuctl, torch; print('torch' in torch.__name__)") == "True", "the node's own, behind"
        tool = subprocess.run([found.folder / "bin" / "beta-tool"], check=True, capture_output=True, text=True)
        assert tool.stdout == "b\n"
    assert stored.jobs == ("train-1",)
    assert stored.environment.packages == {"alpha": "2.0", "beta": "1.5"}


def test_a_node_that_comes_later_gets_what_the_first_one_got(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    spec = job(code, index, "alpha\n")
    node("node-1").environments.have(spec, code)
    published(store)
    write_wheel(index.folder, "alpha", "3.0")
    late = node("node-2").environments.have(spec, code)
    assert late is not None and run(late, "import alpha; print(alpha.VERSION)") == "2.0"


def test_after_a_removal_the_next_job_gets_a_new_one_on_every_node(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    one, two = node("node-1"), node("node-2")
    spec = job(code, index, "alpha\n")
    first = one.environments.have(spec, code)
    assert first is not None
    published(store)
    registry.remove(store, first.environment.digest)
    write_wheel(index.folder, "alpha", "3.0")
    again = replace(spec, job="train-2")
    for late in (two.environments.have(again, code), one.environments.have(again, code)):
        assert late is not None and run(late, "import alpha; print(alpha.VERSION)") == "3.0"


def test_many_nodes_at_once_build_once(node: Callable[[str], Node], code: Path, index: PackageIndex) -> None:
    nodes = [node(f"node-{number}") for number in range(3)]
    spec = job(code, index, "alpha\n")
    found: list[NodeEnvironment | None] = []
    threads = [threading.Thread(target=lambda n=one: found.append(n.environments.have(spec, code))) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {run(one, "import alpha; print(alpha.VERSION)") for one in found if one} == {"2.0"} and len(found) == 3
    built = [one for one in nodes if any("installed in" in line for line in one.said)]
    assert len(built) == 1
    waited = [doing for one in nodes if one not in built for doing in one.did if doing]
    assert any("waiting for node-" in doing for doing in waited) or any("fetching" in doing for doing in waited)


def test_a_second_job_and_a_restarted_agent_use_what_lies_on_the_disk(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    first = node("node-1")
    spec = job(code, index, "alpha\n")
    one = first.environments.have(spec, code)
    (stored,) = published(store)
    assert first.environments.have(replace(spec, job="train-2"), code) == one
    first.stop()
    assert one is not None
    shutil.rmtree(first.folder / "archives")
    store.delete([layout.environment_archive(stored.environment.digest, stored.environment.pack.sha256)])
    again = node("node-1").environments.have(replace(spec, job="train-3"), code)
    assert again is not None and again.folder == one.folder
    assert set(registry.listed(store)[0].jobs) == {"train-1", "train-2", "train-3"}


def test_after_a_crash_of_the_machine_it_is_unpacked_anew(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node("node-1")
    spec = job(code, index, "alpha\n")
    one = first.environments.have(spec, code)
    assert one is not None
    published(store)
    first.stop()
    module = next(one.folder.glob("lib/*/site-packages/alpha.py"))
    module.write_text("")  # a file that was not written yet
    (first.folder / "making.1234").mkdir()
    monkeypatch.setattr(disk, "_boot", lambda: "another")
    again = node("node-1")
    two = again.environments.have(spec, code)
    assert two is not None and run(two, "import alpha; print(alpha.VERSION)") == "2.0"
    assert not list(first.folder.glob("making.*"))


def test_one_that_is_damaged_in_the_bucket_is_built_again(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    spec = job(code, index, "alpha\n")
    first = node("node-1")
    first.environments.have(spec, code)
    (stored,) = published(store)
    first.stop()
    key = layout.environment_archive(stored.environment.digest, stored.environment.pack.sha256)
    data = store.get(key)
    assert data is not None
    store.put(key, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    second = node("node-2")
    found = second.environments.have(spec, code)
    assert found is not None and run(found, "import alpha; print(alpha.VERSION)") == "2.0"
    assert any("it is built again" in line for line in second.said)
    (again,) = published(store)
    assert again.environment.node == "node-2"


def test_a_builder_that_dies_is_replaced(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuctl.bootstrap.environments.claim._SILENT_S", 1.0)
    spec = job(code, index, "alpha\n")
    one = node("node-1")
    dead = EnvironmentBuild(node="node-9", incarnation="1", beat=3)
    monkeypatch.setattr(store, "create", _claimed_by(dead, store))
    found = one.environments.have(spec, code)
    assert found is not None and "waiting for node-9 to build the environment" in one.did
    assert len(published(store)) == 1


def _claimed_by(dead: EnvironmentBuild, store: Bucket) -> Callable[[str, bytes], bool]:
    """``create``, where the first claim finds one of a node that died."""
    from gpuctl.cluster.records.codec import encode

    create = store.create

    def first(key: str, data: bytes) -> bool:
        if key.startswith("environments/building/") and store.get(key) is None:
            create(key, encode(dead))
            return False
        return create(key, data)

    return first


def test_it_is_ready_before_it_is_in_the_bucket_and_other_nodes_need_not_wait(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def late(*args: Any) -> None:
        gate.wait(60)
        upload_file(*args)

    monkeypatch.setattr(publish, "upload_file", late)
    spec = job(code, index, "alpha\n")
    one, two = node("node-1"), node("node-2")
    assert one.environments.have(spec, code) is not None
    found = two.environments.have(spec, code)
    assert registry.listed(store) == [] and found is not None
    assert run(found, "import alpha; print(alpha.VERSION)") == "2.0"
    gate.set()
    assert len(published(store)) == 1


def test_bytecode_follows_once_a_script_was_imported(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    spec = job(code, index, "alpha\n")
    one = node("node-1")
    found = one.environments.have(spec, code)
    assert found is not None
    run(found, "import alpha")
    one.environments.warmed(found.environment.digest)
    until(lambda: bool(registry.listed(store)) and bool(registry.listed(store)[0].environment.bytecode), "bytecode")
    late = node("node-2").environments.have(spec, code)
    assert late is not None
    compiled = [path.name.split(".")[0] for path in late.folder.glob("lib/*/site-packages/__pycache__/*.pyc")]
    assert compiled == ["alpha"]


def test_what_cannot_be_is_told_and_nothing_is_left(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    one = node("node-1")
    with pytest.raises(EnvironmentFailed, match="nothing-of-it was not found"):
        one.environments.have(job(code, index, "nothing-of-it\n"), code)
    assert store.list("environments") == []
    assert [path.name for path in one.folder.iterdir()] == ["cache"]
    assert one.environments.doing == ""


PYLOCK = """\
lock-version = "1.0"
requires-python = ">=3.99"
created-by = "x"
[[packages]]
name = "alpha"
version = "2.0"
wheels = [{ url = "http://127.0.0.1:9/alpha-2.0-py3-none-any.whl", hashes = { sha256 = "%s" } }]
"""


def test_an_index_that_is_away_for_a_while_is_waited_for(
    node: Callable[[str], Node], code: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "_AGAIN_S", 0.0)
    index.failures = 3
    one = node("node-1")
    assert one.environments.have(job(code, index, "beta\n", UV_HTTP_RETRIES="0"), code) is not None
    waits = [told for told in one.did if told.startswith("waiting for a package index: requirements.txt: ")]
    assert len(waits) == 3 and all("503" in told for told in waits), one.did


def test_an_index_that_stays_away_ends_it(
    node: Callable[[str], Node], code: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "PATIENCE_S", -1.0)
    index.failures = 10**9
    with pytest.raises(EnvironmentFailed, match="503 Service Unavailable"):
        node("node-1").environments.have(job(code, index, "beta\n", UV_HTTP_RETRIES="0"), code)


class Refusing:
    """A bucket that does nothing at first, as one whose keys have run out, or that is away."""

    def __init__(self, store: Bucket, error: Exception, times: int) -> None:
        self._store, self._error, self._times = store, error, times

    def __getattr__(self, name: str) -> Any:
        if self._times > 0:
            self._times -= 1
            raise self._error
        return getattr(self._store, name)


@pytest.mark.parametrize("error", [StoreError("access denied"), StoreUnavailable("no route")], ids=["refuses", "away"])
def test_a_bucket_that_does_not_answer_is_waited_for(
    tmp_path: Path, store: Bucket, code: Path, index: PackageIndex, error: GpuctlError
) -> None:
    one = Node(tmp_path, "node-1", cast("Bucket", Refusing(store, error, 3)))
    try:
        assert one.environments.have(job(code, index, "beta\n"), code) is not None
    finally:
        one.stop()
    assert f"waiting for the bucket: {error.message}" in one.did


def test_a_lock_for_another_python_is_refused(node: Callable[[str], Node], code: Path) -> None:
    (code / "pylock.toml").write_text(PYLOCK % ("0" * 64))
    found = source.find(code)
    assert found is not None
    spec = JobSpec(job="train-1", number=1, script="train.py", environment=found.source)
    with pytest.raises(EnvironmentFailed, match=r"pylock\.toml: .*3\.99") as raised:
        node("node-1").environments.have(spec, code)
    assert raised.value.hint == "lock it for the nodes' Python"


def test_given_wheels_need_no_index(node: Callable[[str], Node], store: Bucket, code: Path, tmp_path: Path) -> None:
    spec = job(code, None, "alpha\n")
    assert spec.environment is not None
    keys = []
    for name in ("alpha", "beta"):
        wheel = write_wheel(tmp_path / "wheels", name, "1.0", requires=("beta",) if name == "alpha" else ())
        keys.append(layout.wheel(name * 10, wheel.name))
        store.put(keys[-1], wheel.read_bytes())
    spec = replace(spec, environment=replace(spec.environment, wheels=tuple(keys)))
    found = node("node-1").environments.have(spec, code)
    assert found is not None and run(found, "import alpha, beta; print(alpha.VERSION)") == "1.0"


def test_an_indexs_password_is_in_nothing_that_is_kept(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    index.password = "hunter2"
    where = f"http://user:${{TOKEN}}@{index.url.removeprefix('http://')}"
    one = node("node-1")
    found = one.environments.have(job(code, None, f"--index-url {where}\nalpha\n", TOKEN="hunter2"), code)
    assert found is not None
    published(store)
    kept = [*one.folder.rglob("*.json"), *one.folder.rglob("*.toml")]
    assert kept and not any(b"hunter2" in path.read_bytes() for path in kept)
    assert not any(b"hunter2" in (store.get(entry.key) or b"") for entry in store.list("environments"))
    assert not any("hunter2" in line for line in one.said)


@pytest.mark.parametrize("phase", ["building", "fetching"])
def test_a_disk_without_room_is_told_with_its_phase(
    node: Callable[[str], Node],
    store: Bucket,
    code: Path,
    index: PackageIndex,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    spec = job(code, index, "alpha\n")
    if phase == "fetching":
        node("node-1").environments.have(spec, code)
        published(store)
    monkeypatch.setattr(disk.EnvironmentDisk, "_free", lambda _: -1)
    two = node("node-2")
    with pytest.raises(GpuctlError, match=f"{phase} the environment needs .* GB on the disk that holds") as raised:
        two.environments.have(spec, code)
    assert not isinstance(raised.value, EnvironmentFailed), "another node may have room"
    assert not list(two.folder.glob("making.*")) and store.list("environments/building") == []


def test_it_is_broken_off_when_nobody_needs_it_any_more(
    node: Callable[[str], Node], store: Bucket, code: Path, index: PackageIndex
) -> None:
    index.delay_s = 20
    with pytest.raises(Fenced):
        node("node-1").environments.have(job(code, index, "alpha\n"), code, is_over=lambda: True)
    assert store.list("environments/building") == []
