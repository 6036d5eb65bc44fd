"""Accepted kernels as functions: `from coda_agent.generated import gemm_rmsnorm_swiglu`.

Each folder here is one kernel: its program, its frozen spec, its evidence and its tuned tiles.
Type checkers read of `__init__.pyi` how each is called.
A function takes the spec's inputs by the spec's names and returns its outputs in the spec's
order.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from coda_agent.primitives.suggest import near_matches

if TYPE_CHECKING:
    from coda_agent.runtime.kernel import Kernel

_ROOT = Path(__file__).parent


def __getattr__(name: str) -> Kernel | list[str]:
    if name == "__all__":
        return __dir__()
    if (_ROOT / name / "kernel.py").is_file():
        from coda_agent.runtime.loading import load_kernel

        kernel = globals()[name] = load_kernel(_ROOT / name)
        return kernel
    message = f"no accepted kernel named {name!r}, {near_matches(name, __dir__())}"
    # `from … import` would drop what an AttributeError says.
    importing = sys._getframe(1).f_globals["__name__"] == "importlib._bootstrap"
    if importing and find_spec(f"{__name__}.{name}") is None:
        raise ImportError(message, name=__name__, path=__file__)
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(p.parent.name for p in _ROOT.glob("*/kernel.py"))
