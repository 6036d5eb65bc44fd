"""A quicker first call of a kernel, where nothing is compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


@functools.lru_cache(maxsize=1)
def import_quack() -> None:
    """Imports of quack what asks torch.compile for something when it is imported.

    quack 0.6.5 does so for quantisers, an autotuner and an operator that no epilogue of ours calls,
    and torch imports Inductor and Dynamo when it is asked: 2.6 s of the 4.3 s of CPU time that
    quack's imports take on 2 cores with torch 2.13. Here it is asked at their first call.
    """
    import torch

    if "quack.gemm_runtime.torch_op" in sys.modules:
        return
    compiled, disabled, dynamo = torch.compile, torch.compiler.disable, _Dynamo("torch._dynamo")
    torch.compile, torch.compiler.disable = _later(compiled), _later(disabled)
    if "torch._dynamo" not in sys.modules:
        torch.__dict__["_dynamo"] = dynamo
    try:
        import quack.gemm_runtime.torch_op  # noqa: F401
    finally:
        torch.compile, torch.compiler.disable = compiled, disabled
        if torch.__dict__.get("_dynamo") is dynamo:
            del torch.__dict__["_dynamo"]


def _later(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """Give quack's function to `decorate` at its first call."""

    @functools.wraps(decorate)  # quack looks at its parameters
    def later(function: Any = None, **options: object) -> object:
        if not getattr(function, "__module__", "").startswith("quack."):
            return decorate(function, **options)  # another thread's
        made = functools.lru_cache(maxsize=1)(lambda: decorate(function, **options))

        @functools.wraps(function)
        def call(*args: object, **named: object) -> object:
            return made()(*args, **named)

        return call

    return later


class _Dynamo(ModuleType):
    """torch._dynamo, imported for all but the mark on one function of quack's."""

    @staticmethod
    def assume_constant_result(function: Any) -> Any:
        function._dynamo_marked_constant = True  # as torch 2.11 and 2.13 do
        return function

    def __getattr__(self, name: str) -> object:
        import torch

        if torch.__dict__.get("_dynamo") is self:
            del torch.__dict__["_dynamo"]
        return getattr(torch._dynamo, name)  # which torch imports now
