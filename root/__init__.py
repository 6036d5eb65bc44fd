"""Fused GEMM-epilogue kernels for Hopper GPUs, and what writes and judges them.

- `fuse` runs functions of tensors and models by kernels where they are faster.
- `generated` has the accepted kernels.
- `primitives` is the language that kernels are written in.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_agent import generated as generated
    from coda_agent import integrations as integrations
    from coda_agent import primitives as primitives
    from coda_agent import specs as specs
    from coda_agent.fuse import fuse as fuse  # the module, which can be called, as no type says

__version__: str
_ROOMS = ("fuse", "generated", "integrations", "primitives", "specs")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("coda-agent")
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_ROOMS, "__version__"]
