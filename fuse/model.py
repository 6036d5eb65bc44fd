"""`apply_coda_kernels`: a model in people's training, compiled by the backend `coda` in place."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from coda_agent.fuse.backend import coda
from coda_agent.fuse.joint import SEEN
from coda_agent.fuse.show import Shown, products


class Report:
    """What became of a model.

    Attributes:
        model: It.
        graphs: Those that were compiled, as they were cut; a model is compiled when it is first
            called with gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.graphs = model, list[Shown]()
        self._name, self._parts = type(model).__name__, list[tuple[nn.Module, Any, Any]]()

    def exchange(self, kind: Any, modules: Iterable[nn.Module]) -> None:
        """Give modules a class, until `revert`."""
        for module in modules:
            self._parts.append((module, type(module), kind))
            module.__class__ = kind

    def revert(self) -> None:
        """Give the model its own forward back.

        Raises:
            ValueError: it was wrapped since, as FSDP2 does.
        """
        for module, _, kind in self._parts:
            if type(module) is not kind:
                raise ValueError(f"the model is {type(module).__name__} now, revert before that")
        for module, own, _ in self._parts:
            module.__class__ = own

    def __str__(self) -> str:
        if not self.graphs:
            return f"{self._name} is compiled when it is first called with gradients"
        text = list[str]()
        for graph in self.graphs:
            reasons: dict[str, list[str]] = {}
            for name, reason in products(graph):
                reasons.setdefault(reason, []).append(name)
            left = sum(map(len, reasons.values()))
            text.append(f"{len(graph.kernels)} kernels; left to PyTorch: {left} products")
            text += [f"  {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        return "\n".join(text)


def apply_coda_kernels(
    model: nn.Module, *, fp8: bool = False, by_layer: bool = False, **options: Any
) -> Report:
    """Compile a model's training with kernels where they pay, in place.

    A call with gradients is `torch.compile`'s, by the backend `coda`; any other call is the
    model's own. Of what transformers' models return with a loss, such a call leaves `logits` out:
    they would be whole. A copy of the model, and what is pickled, is the model as it was.

    Args:
        model: It, before it is wrapped for several GPUs.
        fp8: Whether the forward pass multiplies in FP8 (the backend's option).
        by_layer: Whether layers are compiled one by one: those that are alike once.
        options: Those of torch.compile, such as `dynamic`.

    Returns:
        A report, which can be printed and reverts it.

    Raises:
        ValueError: the model is compiled so already, or has no layers that are alike.
    """
    own = type(model)
    if hasattr(own, "_coda_compiled"):
        raise ValueError(f"{own.__name__} is compiled already, call its report's revert() first")
    layers: dict[type, list[nn.Module]] = {}
    for layer in _layers(model) if by_layer else ():
        layers.setdefault(type(layer), []).append(layer)
    if by_layer and not layers:
        raise ValueError(f"{own.__name__} has no list of layers that are alike, leave by_layer out")
    if fp8:
        options["options"] = {**options.get("options", {}), "fp8": "forward"}
    report = Report(model)
    for kind, alike in layers.items():
        run = torch.compile(kind.forward, backend=coda, **options)
        report.exchange(_compiled(kind, run, report.graphs, apart=True), alike)
    if by_layer:
        options.pop("fullgraph", None)

    def without_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own.forward(self, *args, **kwargs)
        if getattr(found, "loss", None) is not None and getattr(found, "logits", None) is not None:
            found.logits = None
        return found

    run = torch.compile(without_logits, backend=coda, **options)
    report.exchange(_compiled(own, run, report.graphs), [model])
    return report


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of the outermost lists whose members are alike."""
    for child in module.children():
        parts = [*child.children()]
        alike = len(parts) > 1 and len({*map(type, parts)}) == 1 and any(parts[0].children())
        yield from parts if alike and isinstance(child, _LISTS) else _layers(child)


_LISTS = nn.ModuleList, nn.Sequential


def _compiled(own: Any, run: Any, graphs: list[Shown], *, apart: bool = False) -> Any:
    """A module's class whose calls with gradients are `run`'s.

    Args:
        own: The class.
        run: Its forward, compiled.
        graphs: Where it describes them.
        apart: Whether it is no part of the graph of what calls it.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A checkpoint that is reentrant runs its layers without gradients first.
        if not (torch.is_grad_enabled() or (apart and SEEN.get() is graphs)):
            return own.forward(self, *args, **kwargs)
        token = SEEN.set(graphs)
        try:
            return run(self, *args, **kwargs)
        finally:
            SEEN.reset(token)

    def reduced(self: Any, protocol: Any) -> Any:
        _, _, *state = super(kind, self).__reduce_ex__(protocol)
        return _new, (own,), *state

    shown: Any = functools.wraps(own.forward)(forward)
    if apart:
        shown = torch.compiler.disable(shown, recursive=False)
    named = {"forward": shown, "__reduce_ex__": reduced, "_coda_compiled": True}
    kind: Any = type(own.__name__, (own,), {**named, "__module__": own.__module__})
    return kind


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


apply_coda_kernels_to_llama = apply_coda_kernels_to_mistral = apply_coda_kernels
apply_coda_kernels_to_qwen2 = apply_coda_kernels_to_qwen3 = apply_coda_kernels
apply_coda_kernels_to_gemma3 = apply_coda_kernels
