"""`coda_agent.fuse`: a function of tensors, or a module, run by kernels where they pay.

The module is the function: `from coda_agent import fuse` gives what can be called.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from coda_agent.fuse.fused import explain, fuse, mm

__all__ = ["explain", "fuse", "mm"]
__signature__ = inspect.signature(fuse)


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fuse(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
