"""User-data: valid, small for every type of every cloud, and without a secret."""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gpuctl.bootstrap import boot
from gpuctl.bootstrap.agent.host_files import HostFiles
from gpuctl.bootstrap.boot import FROM_WHEEL
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.bootstrap.launch.job_cgroup import SERVICE
from gpuctl.bootstrap.node_spec import AGENT_STOP_S, NodeSpec, Package, Promise
from gpuctl.bootstrap.user_data.render import MOST_BYTES, PACKAGE, files, render
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName, MachineType, catalog
from gpuctl.stacks.clouds.user_data import compressed
from gpuctl.stacks.providers.node_package import wheel
from tests.fakes.clock import HandClock

BUCKETS = {
    "aws": "s3://gpuctl-a-cluster-of-thirty-letters-xx-0123456789/a-cluster-of-thirty-letters-xx?region=ap-southeast-2",
    "gcp": "gs://gpuctl-a-cluster-of-thirty-letters-xx-0123456789/a-cluster-of-thirty-letters-xx",
    "azure": "az://gpuctl/a-cluster-of-thirty-letters-xx?account_name=gpuctlaclustof0123456789",
    "ssh": "s3://bucket/lab?endpoint=https://minio.lab.example:9000&region=us-east-1",
}
SHA = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
SHB = "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752"


def spec(provider: str, machine: MachineType | None = None, **changes: Any) -> NodeSpec:
    """With names as long as they may be, and something in every field."""
    promise = Promise()
    if machine:
        promise = Promise(
            gpus=machine.gpus,
            gpu_memory_gb=machine.gpu_memory_gb,
            fabric=machine.fabric,
            fabric_cards=machine.fabric_cards,
        )
    usual: dict[str, Any] = {
        "cluster": "a-cluster-of-thirty-letters-xx",
        "provider": provider,
        "bucket": BUCKETS[provider],
        "package": Package(
            wheel=f"boot/{SHA}/gpuctl-10.11.12-py3-none-any.whl",
            sha256=SHA,
            constraints=f"boot/{SHB}/constraints.txt",
            constraints_sha256=SHB,
        ),
        "promise": promise,
        "region": "ap-southeast-2",
        "env": {
            "PIP_INDEX_URL": "https://packages.example.com/simple/",
            "HTTPS_PROXY": "http://proxy.example.com:3128",
        },
        "sources": {"driver": "deb [trusted=yes] https://packages.example.com/cuda ./"},
    }
    return NodeSpec(**{**usual, **changes})


@pytest.mark.parametrize("cloud", CLOUDS)
def test_user_data_is_small_for_every_type_in_the_catalog(cloud: CloudName) -> None:
    types = [machine for machine in catalog().types if machine.provider == cloud]
    assert types
    sizes = {machine.name: len(compressed(render(spec(cloud, machine)))) for machine in types}
    assert max(sizes.values()) <= MOST_BYTES, sizes


@pytest.mark.slow
@pytest.mark.parametrize("provider", BUCKETS)
def test_cloud_init_finds_it_valid(provider: str, tmp_path: Path) -> None:
    program = shutil.which("cloud-init")
    if program is None:
        pytest.skip("there is no cloud-init to check with; .ci/install-system installs it")
    path = tmp_path / "user-data.yaml"
    path.write_text(render(spec(provider)))
    ran = subprocess.run(
        [program, "schema", "--config-file", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert "Valid" in ran.stdout


def told(provider: str = "aws", **changes: Any) -> dict[str, dict[str, str]]:
    """The files that cloud-init would write, by path."""
    config = yaml.safe_load(render(spec(provider, **changes)))
    return {entry["path"]: entry for entry in config["write_files"]}


def test_every_file_arrives_as_it_was_meant() -> None:
    written, meant = told(), files(spec("aws"))
    assert {path: entry["content"] for path, entry in written.items()} == {path: f.text for path, f in meant.items()}
    assert written["/etc/gpuctl/node.json"]["permissions"] == "0600"


def test_the_machine_reads_the_same_spec_with_no_field_left_out() -> None:
    read = json.loads(told()["/etc/gpuctl/node.json"]["content"])
    assert set(read) == set(NodeSpec.__struct_fields__)
    assert set(read["promise"]) == set(Promise.__struct_fields__)
    assert msgspec.convert(read, NodeSpec) == spec("aws")


@pytest.mark.parametrize("text", ["{{ 7 * 7 }}", "{% raw %}", "a: 'b' \"c\" # d\n  e", "\u00fc\u2028", "--- ..."])
def test_whatever_the_spec_says_is_text_and_no_template_and_no_yaml(text: str) -> None:
    read = json.loads(told(env={"TEXT": text})["/etc/gpuctl/node.json"]["content"])
    assert read["env"] == {"TEXT": text}


def test_upgrades_are_held_first_then_the_idle_watch_is_armed_then_boot_starts_and_is_not_waited_for() -> None:
    config = yaml.safe_load(render(spec("aws")))
    assert (config["package_update"], config["package_upgrade"]) == (False, False)
    first = next(iter(told().values()))
    assert (first["path"], first["content"]) == ("/etc/apt/apt.conf.d/99-gpuctl", 'APT::Periodic::Enable "0";\n')
    assert config["runcmd"] == ["systemctl enable --now --no-block gpuctl-idle.service gpuctl-boot.service"]
    boots = told()["/etc/systemd/system/gpuctl-boot.service"]["content"]
    assert "After=network-online.target gpuctl-idle.service\n" in boots
    assert "Type=oneshot" not in boots


def test_what_a_draining_agent_needs_stops_after_it() -> None:
    """systemd stops at once what has no place in the order; booted machines show it (``machines/test_shutdown.py``)."""
    agent = told()["/etc/systemd/system/gpuctl-agent.service"]["content"]
    (after,) = [line for line in agent.splitlines() if line.startswith("After=")]
    needed = {"network.target", "docker.service", "nvidia-fabricmanager.service", "sku-customizations.service"}
    needed |= {"blk-availability.service", "opt-dlami-nvme.mount", "var-lib-containers.mount"}
    assert needed <= {*after.removeprefix("After=").split()}


def test_systemd_waits_longer_for_the_agent_than_it_takes_for_its_notice() -> None:
    (waits,) = re.findall(r"\nTimeoutStopSec=(\d+)\n", told()["/etc/systemd/system/gpuctl-agent.service"]["content"])
    assert int(waits) > AGENT_STOP_S


def test_the_agent_may_divide_its_cgroup() -> None:
    assert "\nDelegate=yes\n" in told()[f"/etc/systemd/system/{SERVICE}"]["content"]


def test_who_rank_0_was_and_what_is_ill_is_forgotten_with_the_agent(tmp_path: Path) -> None:
    """A file that it can no longer keep current would mislead who reads it (BOOT-REVIEW D15)."""
    agent = told()["/etc/systemd/system/gpuctl-agent.service"]["content"]
    (after,) = [line for line in agent.splitlines() if line.startswith("ExecStopPost=")]
    node = NodeIdentity(node="n", address="a", bucket="b", provider="gcp", root=str(tmp_path))
    told_files = HostFiles(node, HandClock())
    told_files.write_rank0(b"{}")
    told_files.write_ill("GPU 0")
    removed = [tmp_path / path.removeprefix("/") for path in after.split()[2:]]
    assert [path.read_text() for path in removed] == ["{}", "GPU 0"], "what is removed is what was written"


@pytest.mark.slow
def test_the_units_are_what_systemd_takes(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze (Debian's package systemd) to check with")
    services = {path: entry["content"] for path, entry in told().items() if path.endswith(".service")}
    assert len(services) == 3
    for path, text in services.items():
        unit = tmp_path / Path(path).name
        # What they start is not here.
        unit.write_text(re.sub(r"/opt/gpuctl/venv/bin/python|/usr/bin/python3", "/bin/true", text))
        ran = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
        assert str(unit.name) not in ran.stderr, ran.stderr


def test_it_is_the_same_text_every_time() -> None:
    assert render(spec("gcp")) == render(spec("gcp"))


def test_a_program_without_its_comments_is_the_same_program(tmp_path: Path) -> None:
    folder = tmp_path / PACKAGE.lstrip("/")
    for path, file in files(spec("aws")).items():
        if path.startswith(PACKAGE):
            assert ast.get_docstring(ast.parse(file.text, feature_version=(3, 10))) is None
            folder.mkdir(parents=True, exist_ok=True)
            (folder / Path(path).name).write_text(file.text)
    script = "import gpuctl_boot.__main__ as program; print(program.main(['dance']))"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(folder.parent)!r}); {script}"],
        env={"GPUCTL_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "node.json" in ran.stderr  # it got as far as looking for that


def test_what_is_not_in_user_data_is_in_the_wheel_and_needs_nothing_but_the_standard_library() -> None:
    shipped = {Path(path).stem for path in files(spec("aws")) if path.startswith(PACKAGE)}
    there = {path.stem for path in Path(boot.__file__).parent.glob("*.py")}
    assert shipped | set(FROM_WHEEL) == there
    assert not shipped & set(FROM_WHEEL)
    for path in Path(boot.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 1 or node.module, f"{path.name} imports from further up"
                names = [node.module or ""] if not node.level else []
            for name in names:
                assert name.partition(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_the_template_is_in_the_wheel() -> None:
    names = zipfile.ZipFile(io.BytesIO(wheel())).namelist()
    assert "gpuctl/bootstrap/user_data/user-data.yaml.j2" in names
    assert {f"gpuctl/bootstrap/boot/{name}.py" for name in FROM_WHEEL} <= set(names)


@pytest.mark.parametrize(
    "changes",
    [
        {"bucket": "s3://b/p?access_key_id=AKIA&secret_access_key=wJalr"},
        {"bucket": "az://c/p?account_name=a&account_key=wJalr"},
        {"bucket": "az://c/p?account_name=a&sas_key=wJalr"},
        {"bucket": "gs://b/p?bearer_token=wJalr"},
        {"env": {"AWS_SECRET_ACCESS_KEY": "wJalr"}},
        {"env": {"HF_TOKEN": "wJalr"}},
        {"env": {"PIP_INDEX_URL": "https://me:wJalr@packages.example.com/simple/"}},
        {"sources": {"driver": "deb [trusted=yes] https://me:wJalr@packages.example.com/cuda ./"}},
    ],
)
def test_a_secret_is_refused_in_a_line_that_does_not_tell_it(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="secret") as caught:
        render(spec("aws", **changes))
    assert "wJalr" not in str(caught.value)
    assert (
        "wJalr" in files(spec("ssh", **changes))["/etc/gpuctl/node.json"].text
    )  # which SSH brings, for its owner only


def test_what_up_renders_knows_no_secret_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "wJalr")
    assert "wJalr" not in render(spec("aws"))
