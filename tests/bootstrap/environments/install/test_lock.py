"""Sources resolved by the real uv against an index on loopback: which packages, and why not."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from uv import find_uv_bin

from gpuctl.bootstrap.environments.facts import NodeFacts
from gpuctl.bootstrap.environments.install import build, lock
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed, IndexAway, Uv
from gpuctl.cluster.environments import source
from gpuctl.cluster.errors import Fenced
from tests.bootstrap.environments.conftest import FACTS
from tests.fakes.package_index import PackageIndex, write_wheel


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


def resolved(
    code: Path, index: PackageIndex | None, facts: NodeFacts = FACTS, wheels: Path | None = None, **env: str
) -> lock.Lock:
    found = source.find(code)
    assert found is not None
    scratch = code.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], **({"UV_DEFAULT_INDEX": index.url} if index else {}), **env}
    return lock.resolve(found.source, code, scratch, Uv(env, code.parent / "cache"), facts, wheels=wheels)


def requirements(code: Path, text: str) -> None:
    (code / "requirements.txt").write_text(text)


def project(code: Path, index: PackageIndex, *packages: str, dev: tuple[str, ...] = ()) -> None:
    """A locked project."""
    quoted = ", ".join(f'"{one}"' for one in packages)
    groups = ", ".join(f'"{one}"' for one in dev)
    (code / "pyproject.toml").write_text(
        f'[project]\nname = "mine"\nversion = "0"\nrequires-python = ">=3.11"\ndependencies = [{quoted}]\n'
        f"[dependency-groups]\ndev = [{groups}]\n"
    )
    env = {"PATH": os.environ["PATH"], "HOME": str(code.parent), "UV_DEFAULT_INDEX": index.url}
    subprocess.run([find_uv_bin(), "lock", "-q", "--python", sys.executable], cwd=code, env=env, check=True)


def test_requirements_become_the_newest_versions_with_what_they_need(code: Path, index: PackageIndex) -> None:
    requirements(code, "alpha\n")
    found = resolved(code, index)
    assert found.packages == {"alpha": "2.0", "beta": "1.5"}
    requirements(code, "alpha==2.0\nbeta\n")
    assert resolved(code, index).digest == found.digest, "the same packages by other words"
    requirements(code, "alpha<2\n")
    assert resolved(code, index).digest != found.digest


def test_the_nodes_torch_stays_and_its_dependents_go_with_it(code: Path, index: PackageIndex) -> None:
    requirements(code, "torch\nvision\n")
    found = resolved(code, index)
    assert (found.packages, found.torch) == ({"vision": "0.28"}, "2.13.0+cpu")
    on_another = resolved(code, index, replace(FACTS, torch="2.13.0+cu130"))
    assert on_another.digest != found.digest, "a node with another build has an environment of its own"


def test_gpuctl_is_that_of_the_cluster_and_need_not_be_in_an_index(code: Path, index: PackageIndex) -> None:
    requirements(code, "gpuctl-spot[aws]\nbeta\n")
    assert resolved(code, index).packages == {"beta": "1.5"}
    requirements(code, "gpuctl-spot==0.0.1\n")
    with pytest.raises(EnvironmentFailed, match=r"you require gpuctl-spot==0\.0\.1") as raised:
        resolved(code, index)
    assert raised.value.hint == "nodes have the gpuctl of their cluster; leave its version out"


def test_a_lock_with_gpuctl_leaves_it_out_with_what_only_it_needs(code: Path, index: PackageIndex) -> None:
    write_wheel(index.folder, "gpuctl-spot", "0.0.1", requires=("mspec", "alpha"))
    project(code, index, "gpuctl-spot", "beta")
    assert resolved(code, index).packages == {"beta": "1.5"}


def test_wheels_may_need_the_nodes_torch(code: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "vision", "0.28", requires=("torch==2.13.0",))
    requirements(code, "vision\n")
    assert resolved(code, None, wheels=tmp_path / "wheels").packages == {"vision": "0.28"}


def test_a_node_without_torch_gets_one_from_the_index(code: Path, index: PackageIndex) -> None:
    requirements(code, "torch\n")
    found = resolved(code, index, replace(FACTS, torch=""))
    assert (found.packages, found.torch) == ({"torch": "2.15.0", "nvidia-big": "13.0"}, "")


def test_what_gpuctl_needs_is_kept_in_its_range(code: Path, index: PackageIndex) -> None:
    requirements(code, "mspec\n")
    assert resolved(code, index).packages == {"mspec": "2.5"}


@pytest.mark.parametrize(
    ("text", "reason", "hint"),
    [
        ("torch==2.15.0", "you require torch==2.15.0 and torch==2.13.0", "leave torch's version to the nodes"),
        (
            "vision==0.29",
            "vision>=0.29 depends on torch==2.15.0",
            "leave torch's version to the nodes",
        ),
        ("mspec<2", "you require mspec<2 and mspec>=2,<3", ""),
        ("nothing-of-it", "nothing-of-it was not found in the package registry", "check the name, and the index"),
        ("alpha==9", "there is no version of alpha==9", ""),
        ("source-only", "source-only==1.0 has no usable wheels", "make one (pip wheel) and give it with --wheels"),
        ("other-python", "other-python==1.0 has no wheels with a matching Python", "give it with --wheels"),
    ],
)
def test_what_cannot_be_is_said_with_the_resolvers_reason(
    code: Path, index: PackageIndex, text: str, reason: str, hint: str
) -> None:
    requirements(code, f"{text}\n")
    with pytest.raises(EnvironmentFailed) as raised:
        resolved(code, index)
    assert raised.value.message.startswith("requirements.txt: ") and reason in raised.value.message
    assert hint in raised.value.hint and "\n" not in str(raised.value)


def test_an_index_that_wants_a_password_gets_it_from_the_jobs_variables(code: Path, index: PackageIndex) -> None:
    index.password = "hunter2"
    requirements(code, "--index-url http://user:${TOKEN}@" + index.url.removeprefix("http://") + "\nalpha\n")
    assert resolved(code, None, TOKEN="hunter2").packages["alpha"] == "2.0"
    with pytest.raises(EnvironmentFailed) as raised:
        resolved(code, None, TOKEN="wrong-pass", UV_HTTP_RETRIES="0")
    assert "the index wants a user and password: --env UV_INDEX_NAME_USERNAME" in raised.value.hint
    assert "wrong-pass" not in str(raised.value)


def test_an_index_can_stand_in_uvs_settings_with_its_password_in_a_variable(code: Path, index: PackageIndex) -> None:
    index.password = "hunter2"
    (code / "uv.toml").write_text(f'[[index]]\nname = "ours"\nurl = "{index.url}"\ndefault = true\n')
    requirements(code, "alpha\n")
    variables = {"UV_INDEX_OURS_USERNAME": "user", "UV_INDEX_OURS_PASSWORD": "hunter2"}
    found = resolved(code, None, UV_INDEX_OURS_USERNAME="user", UV_INDEX_OURS_PASSWORD="hunter2")
    assert found.packages["alpha"] == "2.0"
    uv = Uv({"PATH": os.environ["PATH"], **variables}, code.parent / "cache")
    build.make_empty(code.parent / "made", uv, what="x")
    build.install(found, code.parent / "made", uv, what="x")
    assert (build.site_packages(code.parent / "made") / "alpha.py").is_file()


def test_an_index_that_does_not_answer_is_given_up(code: Path, index: PackageIndex) -> None:
    index.delay_s = 30
    requirements(code, "alpha\n")
    with pytest.raises(IndexAway, match="timed out") as raised:
        resolved(code, index, UV_HTTP_TIMEOUT="1", UV_HTTP_RETRIES="0")
    assert "UV_HTTP_TIMEOUT" in raised.value.hint


def test_the_resolver_ends_with_the_job(code: Path, index: PackageIndex) -> None:
    index.delay_s = 30
    requirements(code, "alpha\n")
    found = source.find(code)
    assert found is not None
    scratch = code.parent / "scratch"
    scratch.mkdir()
    uv = Uv({"PATH": os.environ["PATH"], "UV_DEFAULT_INDEX": index.url}, code.parent / "cache")
    with pytest.raises(Fenced):
        lock.resolve(found.source, code, scratch, uv, FACTS, is_over=lambda: True)


def test_given_wheels_are_the_only_ones(code: Path, index: PackageIndex, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "alpha", "1.7")
    requirements(code, "alpha\n")
    assert resolved(code, index, wheels=tmp_path / "wheels").packages == {"alpha": "1.7"}
    requirements(code, "alpha\nbeta\n")
    with pytest.raises(EnvironmentFailed, match="beta was not found in the provided package locations"):
        resolved(code, index, wheels=tmp_path / "wheels")


def test_a_uv_lock_gives_its_versions_without_the_dev_group(code: Path, index: PackageIndex) -> None:
    project(code, index, "alpha<2", dev=("mspec",))
    write_wheel(index.folder, "alpha", "1.9", requires=("beta",))
    assert resolved(code, index).packages == {"alpha": "1.0", "beta": "1.5"}


def test_hashes_of_a_requirements_file_are_what_counts(code: Path, index: PackageIndex) -> None:
    (wheel,) = index.folder.glob("beta-*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (code / "requirements.txt").write_text(f"beta==1.5 \\\n    --hash=sha256:{digest}\n")
    assert resolved(code, index).packages == {"beta": "1.5"}
    (code / "requirements.txt").write_text(f"Beta==1.5 --hash=sha256:{'a' * 64}\n")
    with pytest.raises(EnvironmentFailed, match=r"requirements.txt: beta-1.5-py3-none-any.whl is not what its hashes"):
        resolved(code, index)


def test_a_uv_lock_that_is_out_of_date_is_refused(code: Path, index: PackageIndex) -> None:
    project(code, index, "alpha")
    path = code / "pyproject.toml"
    path.write_text(path.read_text().replace('"alpha"', '"alpha", "mspec"'))
    with pytest.raises(EnvironmentFailed, match=r"uv\.lock.*needs to be updated") as raised:
        resolved(code, index)
    assert raised.value.hint == "run `uv lock` and try again"


def test_a_lock_with_the_nodes_torch_leaves_it_out_with_what_it_needs(code: Path, index: PackageIndex) -> None:
    project(code, index, "torch==2.13.0", "vision", "beta")
    found = resolved(code, index)
    assert (found.packages, found.torch) == ({"vision": "0.28", "beta": "1.5"}, "2.13.0+cpu")


def test_a_lock_with_another_torch_brings_it(code: Path, index: PackageIndex) -> None:
    project(code, index, "torch==2.15.0", "vision")
    found = resolved(code, index)
    assert found.packages == {"torch": "2.15.0", "vision": "0.29", "nvidia-big": "13.0"} and found.torch == ""


def test_a_lock_that_gpuctl_could_not_run_with_is_refused(code: Path, index: PackageIndex) -> None:
    project(code, index, "mspec<2")
    with pytest.raises(EnvironmentFailed, match=r"uv.lock: it has mspec 1.0, and gpuctl needs mspec<3,>=2|mspec>=2,<3"):
        resolved(code, index)


def test_a_pylock_is_used_as_it_is_but_for_the_nodes_torch(code: Path, index: PackageIndex) -> None:
    project(code, index, "torch==2.13.0", "vision", "beta")
    env = {"PATH": os.environ["PATH"], "HOME": str(code.parent), "UV_DEFAULT_INDEX": index.url}
    export = [find_uv_bin(), "export", "-q", "--format", "pylock.toml", "--no-emit-project", "-o", "pylock.toml"]
    subprocess.run(export, cwd=code, env=env, check=True)
    for name in ("uv.lock", "pyproject.toml"):
        (code / name).unlink()
    assert resolved(code, index).packages == {"beta": "1.5", "vision": "0.28"}
    whole = resolved(code, index, replace(FACTS, torch="2.15.0"))
    assert set(whole.packages) == {"beta", "vision", "torch", "nvidia-big"}
