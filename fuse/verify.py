"""A region's kernel beside the calls that it replaces, by numbers, at their own sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.check import run_exactly
from coda_agent.agent.authors.composer.retrace import plain
from coda_agent.fuse.imports import import_quack
from coda_agent.fuse.kernels import called
from coda_agent.fuse.regions import Region

_WORSE = 2.0
"""How many times PyTorch's own error a kernel's result may have, beside a rounding."""


def fault(region: Region, text: str, device: torch.device) -> str:
    """Compare a kernel with PyTorch's calls on numbers drawn at random, both against float64.

    Args:
        region: What it computes.
        text: The kernel, as the operator takes it.
        device: Where both run.

    Returns:
        A sentence about the first result that is worse than PyTorch's by more than a rounding; ""
        where none is.
    """
    if device.type == "cuda":
        import_quack()
    module = fx.GraphModule({}, region.part)
    inputs = drawn(region, device)
    wide = [x.double() if _is_float(x) else x for x in inputs]
    exact, own = run_exactly(module, wide), module(*inputs)
    got = with_kernel(region, text)(*inputs)
    (end,) = (node for node in region.part.nodes if node.op == "output")
    for node, x, y, z in zip(end.args[0], exact, own, got, strict=True):
        if not x.is_floating_point():
            continue
        eps, finite = torch.finfo(y.dtype).eps, x.isfinite()
        x, y, z = (v.double().where(finite, 0) for v in (x, y, z))
        scale = x.norm().clamp(min=1e-30)
        errors = [float((v - x).norm() / scale) for v in (y, z)]
        if not errors[1] <= _WORSE * errors[0] + eps:
            return f"{node.name} is off by {errors[1]:.1e}, and PyTorch's by {errors[0]:.1e}"
    return ""


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def with_kernel(region: Region, text: str) -> Callable[..., list[torch.Tensor]]:
    """Make the function that a region's part is, by its kernel."""
    (end,) = (node for node in region.part.nodes if node.op == "output")

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        run = _Values(fx.GraphModule({}, region.part))
        run.run(*inputs)
        entered = lambda port: port.canonical(*map(run.values.__getitem__, port.nodes))
        results = called(region.local, text, entered)
        return [results[node] for node in end.args[0]]

    return call


def drawn(region: Region, device: torch.device) -> list[Any]:
    """Draw what a region's part takes: numbers about 1, and whole ones that name a column."""
    generator = torch.Generator(device).manual_seed(0)
    extents, weights = region.local.extents, region.local.b.nodes
    given: list[Any] = []
    for node in region.part.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            given.append(plain(value))
            continue
        shape = [plain(x) for x in value.shape]
        if not value.is_floating_point():
            high = 2 if value.dtype is torch.bool else extents["N"]
            x = torch.randint(high, shape, generator=generator, device=device).to(value.dtype)
        else:
            x = torch.randn(shape, generator=generator, device=device)
            x = (x * extents["K"] ** -0.5 if node in weights else x).to(value.dtype)
        strides = [plain(x) for x in value.stride()]
        given.append(torch.empty_strided(shape, strides, dtype=x.dtype, device=device).copy_(x))
    return given


class _Values(fx.Interpreter):
    """A run that keeps the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = result = super().run_node(n)
        return result
