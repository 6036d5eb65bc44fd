"""A region's kernel beside the calls that it replaces, by numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import ancestors
from coda_agent.agent.authors.composer.check import run_exactly
from coda_agent.agent.authors.composer.retrace import plain
from coda_agent.fuse.around import alone
from coda_agent.fuse.kept import kept, path_of
from coda_agent.fuse.kernels import arguments
from coda_agent.fuse.nodes import described, entered, evaluate
from coda_agent.fuse.regions import Region, ports_of
from coda_agent.primitives.imports import import_quack
from coda_agent.runtime.program_operator import function_of

WORSE = 2.0
"""How many times PyTorch's own error a kernel's result may have, beside a rounding."""
_LARGE, _PART = 2**29, 2**24
"""From so many elements on the truth is taken in float32; elements compared at once."""


def known_fault(region: Region, text: str, device: torch.device) -> str:
    """Say what `fault` does; a GPU's is kept in the user's cache.

    It is kept by the region with its sizes, the kernel with its tile, the card, how PyTorch
    multiplies, and the versions.
    """
    if device.type != "cuda":
        return fault(region, text, device)
    function, extents = function_of(text), region.local.extents
    shape = int(extents["M"]), int(extents["N"]), int(extents["K"])
    tile = function.choose(*shape, function.types[0], None)
    values = [node.meta.get("val") for node in region.part.nodes]
    sizes = [tuple(x.shape) for x in values if isinstance(x, torch.Tensor)]  # symbols' hints
    path = path_of(
        "numbers",
        *(described(region.part), str(sizes), text, str(tile)),
        *(torch.cuda.get_device_name(device), _multiplication()),
    )
    return kept(path, lambda: fault(region, text, device))


def _multiplication() -> str:
    """How PyTorch multiplies on a GPU, beside whose errors a kernel's stand."""
    by = torch.backends.cuda
    short = by.matmul.allow_fp16_reduced_precision_reduction
    return (
        f"{short} {by.matmul.allow_bf16_reduced_precision_reduction} {by.preferred_blas_library()}"
    )


def fault(region: Region, text: str, device: torch.device) -> str:
    """Compare a kernel with PyTorch's calls, both against float64, on random numbers.

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
    inputs = drawn(region.part, region, device)
    largest = max(node.meta["val"].numel() for node in region.nodes)
    wide = torch.float64 if largest < _LARGE else torch.float32
    own, got = module(*inputs), alone(region).by_kernel(text)(*inputs)
    inputs = [x.to(wide) if _is_float(x) else x for x in inputs]
    with _exact_products():
        exact = run_exactly(module, inputs, dtype=wide)
    (end,) = (node for node in region.part.nodes if node.op == "output")
    for node, x, y, z in zip(end.args[0], exact, own, got, strict=True):
        if not x.is_floating_point():
            continue
        errors = distance(y, x), distance(z, x)
        if not errors[1] <= WORSE * errors[0] + torch.finfo(y.dtype).eps:
            return f"{node.name} is off by {errors[1]:.1e}, and PyTorch's by {errors[0]:.1e}"
    return ""


def distance(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Give a difference's norm over the truth's, where that is finite."""
    found = torch.zeros(2, dtype=torch.float64, device=x.device)
    # By parts: some results take gigabytes.
    for part, exact in zip(*(v.flatten().split(_PART) for v in (x, truth)), strict=True):
        exact = exact.double()  # FP8 has no isfinite on a GPU
        finite = exact.isfinite()
        pair = (part.double() - exact).where(finite, 0), exact.where(finite, 0)
        found += torch.stack([v.square().sum() for v in pair])
    off, whole = found.sqrt().tolist()
    return off / max(whole, 1e-30)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply float32 as such, whatever the user has chosen."""
    matmul = torch.backends.cuda.matmul
    chosen, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = chosen


def _is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def operands_of(
    region: Region, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Draw A, B and the operands of a region's kernel, these by name."""
    known = region.local
    wanted = ancestors(node for port in ports_of(known) for node in port.nodes)
    values = entered(region.part, drawn(region.part, region, device))
    evaluate([node for node in region.part.nodes if node in wanted], values)
    a, b, some = arguments(known, lambda x: x.canonical(*map(values.__getitem__, x.nodes)))
    return a, b, dict(zip(known.program.operands, some, strict=True))


def drawn(part: fx.Graph, region: Region, device: torch.device) -> list[Any]:
    """Draw what a graph takes: numbers about 1; whole ones name columns."""
    generator = torch.Generator(device).manual_seed(0)
    extents, weights = region.local.extents, region.local.weights
    given: list[Any] = []
    for node in part.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            given.append(plain(value))
            continue
        strides, whole = [plain(x) for x in value.stride()], [plain(x) for x in value.shape]
        shape = [n if stride else 1 for n, stride in zip(whole, strides, strict=True)]
        if not value.is_floating_point():
            high = 2 if value.dtype is torch.bool else extents["N"]
            x = torch.randint(high, shape, generator=generator, device=device).to(value.dtype)
        else:
            x = torch.randn(shape, generator=generator, device=device)
            x = (x * extents["K"] ** -0.5 if node in weights else x).to(value.dtype)
        empty = torch.empty_strided(shape, strides, dtype=x.dtype, device=device)
        given.append(empty.copy_(x).expand(whole))  # of an expanded value one number
    return given
