"""uv as a program: run beside the training of other jobs, ended with the job that wanted it, its errors in a line."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpuctl.cluster.errors import Fenced, GpuctlError

sysconfig.get_config_vars()
"""Before there are threads. Up to Python 3.11, one that asks while another one reads them for the first time is told
``None``, and then uv's own package, which asks for the suffix of programs, cannot say where uv is."""

_LOOK_S = 0.1
_NO_SPACE = "os error 28"
_AWAY = r"timed out|[Cc]onnection (refused|reset|closed)|dns error|error sending request|50[0234] [A-Z]|429 Too Many"
_OF_ANOTHER = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT")
"""Variables by which uv, or the Python that it asks, would look elsewhere."""


class EnvironmentFailed(GpuctlError):
    """The job can have no such environment, on this node or any other of its kind."""


class IndexAway(GpuctlError):
    """An index or a channel did not answer, and may do so later."""


class Uv:
    """Runs uv with a cache in ``folder``. ``env``: its variables, with those of the job, which may name an index and
    the secrets for it."""

    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        inherited = {name: value for name, value in env.items() if name not in _OF_ANOTHER}
        self.cache = folder
        self._env = {
            "HOME": str(Path.home()),
            **inherited,
            "UV_CACHE_DIR": str(folder),
            "UV_PYTHON_DOWNLOADS": "never",  # it would look for another Python elsewhere
            "UV_PREVIEW_FEATURES": "pylock",
            "UV_NO_PROGRESS": "1",
            "NO_COLOR": "1",
        }

    def with_indexes(self, urls: Sequence[str]) -> Uv:
        """The same, which knows these indexes too. ``${NAME}`` in a URL is a variable's value, such as a password."""
        expanded = [self.expanded(url) for url in urls]
        before = self._env.get("UV_EXTRA_INDEX_URL", "")
        other = copy.copy(self)
        other._env = {**self._env, "UV_EXTRA_INDEX_URL": " ".join(filter(None, [before, *expanded]))}
        return other

    def expanded(self, url: str) -> str:
        """A URL with variables' values in place of ``${NAME}``."""
        return re.sub(r"\$\{(\w+)\}", lambda name: self._env.get(name[1], ""), url)

    def values_in(self, url: str) -> dict[str, str]:
        """The values of the variables that ``url`` names, by how it names them."""
        return {f"${{{name}}}": self._env.get(name, "") for name in re.findall(r"\$\{(\w+)\}", url)}

    def run_tool(
        self, package: str, module: str, script: Path, *args: str, cwd: Path, what: str, is_over: Callable[[], bool]
    ) -> None:
        """Run ``script ARGS`` by a Python that has ``module``, from ``package``: this one, or one that uv makes for it.
        All else is as ``run`` has it."""
        if importlib.util.find_spec(module):
            self._run([sys.executable, str(script), *args], cwd, what, is_over)
        else:
            with_it = ["--no-project", "--no-build", "--with", package, "--python", sys.executable]
            self._run([_program(), "run", *with_it, str(script), *args], cwd, what, is_over)

    def run(self, *args: str, cwd: Path, what: str, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run ``uv ARGS``.

        Args:
            cwd: where relative paths begin.
            what: that is being made, for the message of an error: such as the name of a requirements file.
            is_over: asked now and then; once it says so, uv is ended.

        Raises ``EnvironmentFailed`` with what uv says, ``IndexAway`` if an index did not answer, ``OSError`` if the
        disk is full, ``Fenced`` if broken off.
        """
        self._run([_program(), *args], cwd, what, is_over)

    def _run(self, command: Sequence[str], cwd: Path, what: str, is_over: Callable[[], bool]) -> None:
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [*_gently(), *command],
                cwd=cwd,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
            with _broken_off(process, is_over) as broken_off:
                process.wait()  # without a timeout: Python would look now and then, and lose a tenth of a second
            if broken_off.is_set():
                raise Fenced("the environment is no longer needed")
            if process.returncode:
                said.seek(0)
                raise _failure(said.read().decode(errors="replace"), what, process.returncode)


@contextlib.contextmanager
def _broken_off(process: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> Iterator[threading.Event]:
    """End ``process`` with all that it has started once ``is_over``, and at the end of the block; the event tells which
    it was."""
    ended, broken_off = threading.Event(), threading.Event()

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            if is_over():
                broken_off.set()
                end()
                return

    thread = threading.Thread(target=watch, name="uv-watch", daemon=True)
    thread.start()
    try:
        yield broken_off
    finally:
        ended.set()
        thread.join()
        if process.returncode is None:
            end()
            process.wait()


def _gently() -> list[str]:
    """What is done for the next job leaves the processors to the one that runs."""
    nice = shutil.which("nice")
    return [nice, "-n", "10"] if nice else []


def _program() -> str:
    from uv import find_uv_bin

    return os.fspath(find_uv_bin())


def _failure(said: str, what: str, code: int) -> GpuctlError | OSError:
    if _NO_SPACE in said:
        return OSError(28, "No space left on device", what)
    reason = reason_of(said) or f"uv ended with exit code {code}"
    kind = IndexAway if re.search(_AWAY, said) else EnvironmentFailed
    return kind(reason if reason.startswith(what) else f"{what}: {reason}", _hint(said))


def reason_of(said: str) -> str:
    r"""What uv complains of, in a line: the cause where its first line says nothing.

    >>> reason_of("error: No solution found when …\n  cause: Because you require a<2\n  and a>3.\n")
    'Because you require a<2 and a>3'
    >>> reason_of("warning: x\nerror: Expected '==': r.txt:3:1\n\nhint: y\n")
    "Expected '==': r.txt:3:1"
    """
    _, _, error = said.rpartition("error: ")
    error = re.split(r"\n\s*(?:hint:|$)", error)[0]
    first, *causes = re.split(r"\n\s*cause: ", error)
    if first.startswith("No solution found"):
        first, causes = causes[0] if causes else first, []
    return ": ".join(" ".join(text.split()) for text in (first, *causes) if text.strip()).rstrip(".")


def _hint(said: str) -> str:
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, said)), "")


_HINTS = {
    r"401 Unauthorized|403 Forbidden": (
        "the index wants a user and password: --env UV_INDEX_NAME_USERNAME=… --env UV_INDEX_NAME_PASSWORD=…"
    ),
    r"no usable wheels|no wheels with|building (from source )?is disabled|compatible wheel": (
        "use a version that has a wheel for the nodes, or make one (pip wheel) and give it with --wheels FOLDER"
    ),
    r"not found in the (package registry|provided)": "check the name, and the index that the nodes use",
    r"timed out": "try again, or allow more seconds: --env UV_HTTP_TIMEOUT=120",
    r"needs to be updated": "run `uv lock` and try again",
    r"(require|depends on) gpuctl-spot": "nodes have the gpuctl of their cluster; leave its version out",
    r"(require|depends on) torch": "leave torch's version to the nodes, or lock another with uv.lock",
    r"requires-python|Python version|Python requirement|Python[><=]": "lock it for the nodes' Python",
}
