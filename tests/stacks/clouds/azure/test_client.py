"""Whose log-in at Azure it is."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gpuctl.stacks.clouds.azure.client import connecting, reader
from tests.fakes.azure.api import SUBSCRIPTION, Static


def token(**claims: Any) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{payload}.signature"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (token(oid="12", scp="user_impersonation", upn="me@example.com"), "User:12"),
        (token(oid="12", idtyp="user"), "User:12"),
        (token(oid="12", idtyp="app", appid="34"), "ServicePrincipal:12"),
        (token(oid="12", appid="34"), "ServicePrincipal:12"),
        (token(appid="34"), ""),
        ("a.b.c", ""),
        ("opaque", ""),
    ],
)
def test_a_service_principal_is_told_from_a_person_by_the_token(told: str, expected: str) -> None:
    """Azure refuses a role for the one under the name of the other."""
    assert reader(connecting(SUBSCRIPTION, Static(told), "http://127.0.0.1:9")) == expected
