"""What makes the first call of a kernel quicker where nothing has to be compiled."""

from __future__ import annotations

import functools
import sys
from typing import Any


@functools.lru_cache(maxsize=1)
def import_quack() -> None:
    """Imports of quack what asks torch.compile for functions when it is imported.

    quack 0.6.5 does so for quantisers (quack/blockscaled/quantize.py) that no epilogue of ours
    calls, and torch imports Inductor when it is asked: 0.85 s of the 2.65 s of CPU time that
    quack's imports take on 2 cores with torch 2.13. Here they are compiled at their first call.
    """
    import torch

    if "quack.blockscaled.quantize" in sys.modules:
        return
    compiled = torch.compile

    @functools.wraps(compiled)  # quack looks at its parameters
    def later(function: Any = None, **options: Any) -> Any:
        if not getattr(function, "__module__", "").startswith("quack."):
            return compiled(function, **options)  # another thread's
        made = functools.lru_cache(maxsize=1)(lambda: compiled(function, **options))

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return made()(*args, **named)

        return call

    torch.compile = later
    try:
        import quack.blockscaled.quantize  # noqa: F401
    finally:
        torch.compile = compiled
