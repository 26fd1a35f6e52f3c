"""One family of errors: each is a sentence that says what is wrong and a hint that says what to do."""

from __future__ import annotations

INTERRUPTED = 130
"""Exit code of what the user broke off, as the shell has it: 128 + SIGINT."""

CHECKPOINT_LOST = 74
"""Exit code of a job that trained to its end and could not keep its last checkpoint: EX_IOERR of sysexits(3)."""


class GpuctlError(Exception):
    """A failure that the user can act on. The command line prints ``message`` and ``hint`` and no traceback.

    ``exit_code`` is what the process returns: 1 for a failure, 2 for bad input (the shell's convention for usage).
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class BadInput(GpuctlError):
    """The command line, the environment or a file the user wrote is not acceptable."""

    exit_code = 2


class StoreError(GpuctlError):
    """The bucket answered with a failure that a retry will not fix (permission, no such bucket)."""


class NoBucket(StoreError):
    """There is no such bucket."""


class StoreUnavailable(GpuctlError):
    """The bucket did not answer, or said to come back later. The outcome of a write is then unknown."""


class Fenced(GpuctlError):
    """A newer round has begun: what this process was about to write for keeps is no longer wanted."""


class CorruptRecord(GpuctlError):
    """A document in the bucket does not have the shape this version of gpuctl writes."""


class Damaged(GpuctlError):
    """A file of a committed checkpoint is missing or is not what was written."""
