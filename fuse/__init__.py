"""A function of tensors, or a module, by kernels where they pay.

The module is the function: `from coda_agent import fuse` gives what can be called.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from coda_agent.fuse.fused import explain, fuse, mm

if TYPE_CHECKING:
    from coda_agent.fuse.model import apply_coda_kernels

__all__ = ["apply_coda_kernels", "explain", "fuse", "mm"]
__signature__ = inspect.signature(fuse)


def __getattr__(name: str) -> Any:
    if name.startswith("apply_coda_kernels"):  # it imports torch
        from coda_agent.fuse import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Callable(ModuleType):
    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.fuse(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
