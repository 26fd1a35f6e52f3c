"""A lock installed into an environment: a virtual environment of the node's Python, which sees the node's own packages
after those in it.

(``--system-site-packages`` would show those of the interpreter below the node's own environment, without torch.)
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from gpuctl.bootstrap.environments.install.lock import Lock
from gpuctl.bootstrap.environments.install.uv import Uv
from gpuctl.bootstrap.environments.pack import NODE_PACKAGES


def make_empty(folder: Path, uv: Uv, *, what: str, is_over: Callable[[], bool] = lambda: False) -> None:
    """Make an environment without packages at ``folder``, which can be moved later. Raises as ``Uv.run`` does."""
    options = ["--relocatable", "--no-project", "--python", sys.executable, "-q"]
    uv.run("venv", *options, str(folder), cwd=folder.parent, what=what, is_over=is_over)
    show_node_packages(folder)


def show_node_packages(folder: Path) -> None:
    """Make the Python of the environment at ``folder`` see the node's own packages, after those in it."""
    # Not the folders alone: theirs may hold .pth files as well, such as that of an editable gpuctl.
    shown = "".join(f"import site; site.addsitedir({path!r})\n" for path in _node_packages())
    site_packages(folder).mkdir(parents=True, exist_ok=True)
    (site_packages(folder) / NODE_PACKAGES).write_text(shown)


def install(lock: Lock, folder: Path, uv: Uv, *, what: str, is_over: Callable[[], bool] = lambda: False) -> None:
    """Install the packages of ``lock`` into the environment at ``folder``. Raises as ``Uv.run`` does."""
    where = ["--python", str(folder / "bin" / "python"), "--allow-empty-requirements"]
    only = ["--only-binary", ":all:", *(["--config-file", str(lock.config)] if lock.config else [])]
    uv = uv.with_indexes(lock.indexes)
    uv.run("pip", "sync", *where, *only, str(lock.path), "-q", cwd=lock.folder, what=what, is_over=is_over)


def site_packages(folder: Path) -> Path:
    """Where the environment's packages lie."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _node_packages() -> list[str]:
    """The folders with packages of the interpreter that runs this, in the order in which it looks."""
    usual = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [path for path in dict.fromkeys([*own, *usual]) if Path(path).is_dir()]
