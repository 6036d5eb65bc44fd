"""torch, imported at its first use: commands and imports that need none of it start at once."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

# `imports.py` and tests put others in their places for a while.
_UNKEPT = {"_dynamo", "compile", "compiler"}


class _Torch(ModuleType):
    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in _UNKEPT:
            setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _Torch("torch")
