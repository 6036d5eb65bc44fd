"""`coda_agent.fuse`: a function of tensors, or a module, run by kernels where they pay.

The module is the function: `from coda_agent import fuse` gives what can be called, and
`from coda_agent.fuse import fuse` the same function with its types.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_agent.agent.plans.fused import fuse, mm

__all__ = ["fuse", "mm"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from coda_agent.agent.plans import fused

        return getattr(fused, name)
    raise AttributeError(name)


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fuse(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
