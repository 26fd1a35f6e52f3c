"""The agent as its machine starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from gpuctl.bootstrap.identity import Identity


def test_an_agent_without_a_cluster_names_the_bucket_and_not_its_keys(tmp_path: Path, s3_url: str) -> None:
    """What it says goes to the journal, and from there into the bucket."""
    assert "secret_access_key=" in s3_url, "the test is about the keys"
    identity = Identity(node="node-0", address="127.0.0.1", bucket=s3_url)
    (tmp_path / "identity.json").write_bytes(msgspec.json.encode(identity))
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl.bootstrap.agent", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert said.endswith(f": there is no cluster at {s3_url.partition('?')[0]}; create it with `gpuctl up`\n")
    assert "access_key" not in said
