"""A signal on which a worker writes the stacks of its threads to stderr: what it hangs in is known then.

Python's own ``faulthandler`` does it in C, so also where no thread of Python's gets its turn. The standard library
only, from Python 3.8 on: the interpreters of images read this too.
"""

from __future__ import annotations

import faulthandler
import signal

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else 0
"""A real-time signal, as scripts and libraries use the others; 0: there is none on this system."""


def install() -> None:
    """Have this process write its stacks when ``STACK_SIGNAL`` comes, and go on."""
    if STACK_SIGNAL:
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
