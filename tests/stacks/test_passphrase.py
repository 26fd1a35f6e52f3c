"""What the states of Pulumi are sealed with."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.stacks.passphrase import passphrase


def test_states_that_others_share_are_sealed_with_what_they_agree_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("PULUMI_CONFIG_PASSPHRASE", raising=False)
    own = passphrase()
    assert passphrase("s3://team-state") == own
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "agreed")
    assert passphrase("s3://team-state") == "agreed"
    assert passphrase() == own, "a folder of this user's was sealed with another one"
