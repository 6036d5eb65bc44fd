"""What was done to a model, and how it is undone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn

from coda_agent.layers.patched import Layer, Tables


@dataclass
class Report:
    """What `apply_coda_kernels` did.

    Attributes:
        replaced: What runs by kernels, and which parts of it.
        left: What does not, and why.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _layers: list[Layer] = field(default_factory=list)
    _around: tuple[nn.Module, ...] = ()
    _tables: Tables = field(default_factory=Tables)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)

    def revert(self) -> None:
        """Give the model its own code back.

        Raises:
            TypeError: packed weights have been sharded since; nothing is undone then.
        """
        for layer in self._layers if self._undo else ():
            if layer.packed is not None:
                layer.packed.check()
        while self._undo:
            self._undo.pop()()

    def forget(self) -> None:
        """Drop what is kept for later calls: packed weights, and the table of rotations."""
        self._tables.last = None
        for layer in self._layers:
            layer.kept = None

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give `module` another forward, which may have one of another patch."""
        before = vars(module).get("forward")

        @wraps(module.forward)  # its signature is what trainers look at
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                warn_traced()
            return forward(*args, **kwargs)

        if not hasattr(module, "_coda_bound"):
            # Before the forward: what copies or pickles a module meets it first.
            module._coda_bound = _Bound()  # pyright: ignore[reportArgumentType]
            self._undo.append(lambda: delattr(module, "_coda_bound"))
        module.forward = replaced
        if before is None:
            self._undo.append(lambda: delattr(module, "forward"))
        else:
            self._undo.append(lambda: setattr(module, "forward", before))

    def warn(self, name: str, why: str) -> None:
        """Warn that a module runs by the model's own code: of each reason once."""
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(
                f"coda-agent: {name} runs by the model's own code, and so does whatever has the "
                f"same reason: {why}",
                stacklevel=4,
            )

    def __str__(self) -> str:
        lines = [f"{name}: by kernels: {what}" for name, what in self.replaced.items()]
        lines += [f"{name}: left as it is: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


@torch.compiler.assume_constant_result
def warn_traced() -> int:
    """Warn, while torch.compile traces and without a graph break, that no kernel will run."""
    warnings.warn(
        "coda-agent: under torch.compile a patched model runs by the model's own code; call "
        "report.revert(), or leave torch.compile out",
        stacklevel=2,
    )
    return 0


class _Bound:
    """Kept in a module whose forward belongs to it alone."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            "a model that runs by the kernels was copied, and the copy would run the weights of "
            "this one; copy it before apply_coda_kernels, or after revert()"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model that runs by the kernels cannot be pickled; call revert() first, or save its "
            "state_dict()"
        )
