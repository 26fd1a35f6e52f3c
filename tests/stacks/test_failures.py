"""What a failed change of a stack is called."""

from __future__ import annotations

from gpuctl.stacks.failures import Failure, Refusal, failure

IN_USE = Refusal("gcp:compute/instanceTemplate:InstanceTemplate", "demo", "delete-replaced", "it is already being used")
REFUSED = Refusal("gcp:compute/firewall:Firewall", "demo", "update", "Error 403")


def test_what_was_replaced_and_is_in_use_stays_and_all_else_that_fails_has_failed() -> None:
    assert failure("demo", "error: update failed", [IN_USE]).kind is Failure.LEFT
    assert failure("demo", "error: update failed", [IN_USE, REFUSED]).kind is Failure.RESOURCE
    assert failure("demo", "error: update failed", []).kind is Failure.OTHER
