"""What is there of a cluster where ``up`` or ``down`` did not come to its end: what it costs, and how to go on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.interface import Cloud
from gpuctl.stacks.providers.interface import Say
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.state.clusters import command

_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_NOTHING = "nothing remains"


@contextmanager
def telling_what_is_there(there: Cloud, request: StackRequest, say: Say) -> Iterator[None]:
    """Context of an ``up``: whatever ends it early also tells what is there, what it costs, and how to end that."""
    up, down = (command(verb, request.cluster) for verb in ("up", "down"))
    try:
        yield
    except KeyboardInterrupt:
        is_noted = last_request.find(request.cluster) is not None  # without that, `up` would know nothing of it
        on = f"`{up}` continues, `{down}` removes it" if is_noted else "repeat the same command to go on"
        say(f"interrupted: {what_is_there(there, request)}; {on}")
        raise
    except GpuctlError as error:
        what = what_is_there(there, request)
        if what != _NOTHING and f"`{down}`" not in error.hint:
            what = f"{what}; `{down}` removes it"
        error.hint = f"{error.hint} ({what})" if error.hint else what
        raise
    except OSError as error:  # of this machine's, such as a full disk: machines may run all the same
        if error.errno not in _NO_WRITING:
            raise
        raise GpuctlError(
            f"cannot write {error.filename or 'to this disk'}: {error.strerror}",
            f"free some space; `{up}` continues, `{down}` removes it ({what_is_there(there, request)})",
        ) from error


def what_is_there(there: Cloud, request: StackRequest) -> str:
    """A summary of what is there and what it costs, in half a sentence, for whoever has to decide now."""
    try:
        before = last_request.find(request.cluster)
        regions = {request.region, before.request.region if before else request.region}
        scan = there.leftovers(sorted(regions), request.cluster)
    except GpuctlError as error:
        return f"could not check what remains: {error.message}"
    if scan.unseen:
        return f"remaining: {scan.summary() or 'nothing'}; could not check {', '.join(scan.unseen)}"
    return f"remaining: {scan.summary()}" if scan.found else _NOTHING
