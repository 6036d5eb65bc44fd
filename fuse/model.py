"""`apply_coda_kernels`: a model's training, compiled by the backend `coda` in place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from coda_agent.fuse.backend import coda
from coda_agent.fuse.fused import anew
from coda_agent.fuse.joint import SEEN
from coda_agent.fuse.show import Shown, products


class Report:
    """Say what became of a model: print it.

    Attributes:
        model: It.
        graphs: Those that were compiled, as they were cut; a model is compiled when it is first
            called with gradients.
    """

    def __init__(self, model: nn.Module, compiled: type[nn.Module]) -> None:
        self.model, self.graphs = model, list[Shown]()
        self._own, self._compiled = type(model), compiled

    def revert(self) -> None:
        """Give the model its own forward back.

        Raises:
            ValueError: it was wrapped since, as FSDP2 and accelerate do.
        """
        if type(self.model) is not self._compiled:
            raise ValueError(f"the model is {type(self.model).__name__} now, revert before that")
        if reason := _own_call(self.model):
            raise ValueError(f"the model {reason}: call revert() before that")
        self.model.__class__ = self._own

    def __str__(self) -> str:
        if not self.graphs:
            return f"{self._own.__name__} is compiled when it is first called with gradients"
        text = list[str]()
        for graph in self.graphs:
            reasons: dict[str, list[str]] = {}
            for name, reason in products(graph):
                reasons.setdefault(reason, []).append(name)
            left = sum(map(len, reasons.values()))
            text.append(f"{len(graph.kernels)} kernels; left to PyTorch: {left} products")
            text += [f"  {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        return "\n".join(text)


def apply_coda_kernels(model: nn.Module, *, fp8: bool = False, **options: Any) -> Report:
    """Compile a model's training with kernels where they pay, in place.

    A call with gradients is `torch.compile`'s, by the backend `coda`; any other call is the
    model's own. Of what transformers' models return with a loss, such a call leaves `logits` out:
    they would be whole. A copy of the model, and what is pickled, is the model as it was.

    Args:
        model: It, before it is wrapped for several GPUs.
        fp8: Whether the forward pass multiplies in FP8 (the backend's option).
        options: Those of torch.compile, such as `dynamic`.

    Returns:
        A report, which can be printed and reverts it.

    Raises:
        TypeError: it is no module.
        ValueError: the model is compiled so already, or its calls do not reach its class's forward.
    """
    own: Any = type(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{own.__name__} is no torch.nn.Module; coda_agent.fuse takes functions")
    if reason := _own_call(model):
        raise ValueError(f"the model {reason}: call apply_coda_kernels before that")
    if hasattr(own, "_coda_compiled"):
        raise ValueError(f"{own.__name__} is compiled already, call its report's revert() first")

    def without_logits(self: nn.Module, *args: object, **kwargs: object) -> object:
        found = own.forward(self, *args, **kwargs)
        # transformers' outputs are dicts with attributes, which take no item away.
        if isinstance(found, dict) and getattr(found, "loss", None) is not None:
            return type(found)(**{name: x for name, x in found.items() if name != "logits"})
        return found

    backend: Any = coda
    if fp8:  # torch.compile takes a mode or options, the backend both
        ours = {**(options.pop("options", None) or {}), "fp8": "forward"}
        backend = functools.partial(coda, options=ours)
    compiled: Any = torch.compile(anew(without_logits), backend=backend, **options)

    @functools.wraps(own.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return own.forward(self, *args, **kwargs)
        token = SEEN.set(report.graphs)
        try:
            return compiled(self, *args, **kwargs)
        finally:
            SEEN.reset(token)

    def reduced(self: Any, protocol: object) -> tuple[object, ...]:
        _, _, *state = super(kind, self).__reduce_ex__(protocol)
        return _new, (own,), *state

    named = {"forward": forward, "__reduce_ex__": reduced, "_coda_compiled": True}
    kind: Any = type(own.__name__, (own,), {**named, "__module__": own.__module__})
    report = Report(model, kind)
    model.__class__ = kind
    return report


def _own_call(model: nn.Module) -> str:
    """Say by what a model's calls pass its class's forward; "" where they reach it."""
    if "forward" in vars(model):
        return "has a forward of its own, as accelerate's prepare() and torch.compile give it one"
    return "is compiled by Module.compile()" if model._compiled_call_impl is not None else ""


def _new(kind: Any) -> object:
    return kind.__new__(kind)


apply_coda_kernels_to_llama = apply_coda_kernels_to_mistral = apply_coda_kernels
apply_coda_kernels_to_qwen2 = apply_coda_kernels_to_qwen3 = apply_coda_kernels
apply_coda_kernels_to_gemma3 = apply_coda_kernels
