"""What a failed change of a stack is called."""

from __future__ import annotations

from gpuctl.stacks.engine.errors import FailureKind, ResourceFailure, failure

IN_USE = ResourceFailure(
    "gcp:compute/instanceTemplate:InstanceTemplate", "demo", "delete-replaced", "it is already being used"
)
REFUSED = ResourceFailure("gcp:compute/firewall:Firewall", "demo", "update", "Error 403")


def test_what_was_replaced_and_is_in_use_stays_and_all_else_that_fails_has_failed() -> None:
    assert failure("demo", "error: update failed", [IN_USE]).kind is FailureKind.LEFT
    assert failure("demo", "error: update failed", [IN_USE, REFUSED]).kind is FailureKind.RESOURCE
    assert failure("demo", "error: update failed", []).kind is FailureKind.OTHER
