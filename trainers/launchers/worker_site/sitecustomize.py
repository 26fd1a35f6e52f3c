"""Python imports this first in each interpreter that a worker is or starts (docs.python.org/3/library/site.html), since
its folder comes first in their ``PYTHONPATH``. It then runs the ``sitecustomize`` that it has come before, if any.

The standard library only, from Python 3.8 on: images have interpreters of their own.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def _run(spec: ModuleSpec | None) -> Any:
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return None


_run(PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != _HERE]))
for _name in ("gloo_exit", "stack_signal", "log_output", "failing_exit", "jax_world"):
    _run(spec_from_file_location(_name, str(_HERE.parent.parent / f"{_name}.py"))).install()
