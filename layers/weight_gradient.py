"""Gradients of weights, added where they are kept by the product that computes them.

A weight may have a `main_grad`, as Megatron-LM gives its parameters: a buffer in float32 or in the
weight's type. Then its gradient is added there and `.grad` gets none, so that no step moves it
twice. `weight.main_grad = weight.grad` accumulates in `.grad` itself. A weight that is read by
others too, such as a tied embedding, gets their gradients in `.grad`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mains(*weights: Tensor) -> list[Tensor | None]:
    """The weights that have a `main_grad`. torch.compile takes none: it gives gradients back.

    Raises:
        TypeError: a `main_grad` that cannot take the weight's gradient.
    """
    found: list[Tensor | None] = [None] * len(weights)
    for i, weight in enumerate(() if torch.compiler.is_compiling() else weights):
        main = getattr(weight, "main_grad", None)
        if main is None:
            continue
        if main.shape != weight.shape or main.dtype not in (torch.float32, weight.dtype):
            raise TypeError(
                f"main_grad is {tuple(main.shape)} {main.dtype}, expected "
                f"{tuple(weight.shape)} float32 or {weight.dtype}, as its weight is"
            )
        found[i] = weight
    return found


def added(main: Tensor | None, a: Tensor, b: Tensor) -> Tensor | None:
    """a b, a weight's gradient. Of a weight with a `main_grad`, it is added there."""
    if main is None:
        return a @ b
    total: Tensor = main.main_grad  # pyright: ignore[reportAttributeAccessIssue]
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.float(), b.float())
    return announced(main)


def announced(weight: Any) -> Tensor | None:
    """What a weight gets for a gradient that is in its `main_grad`. Where it has the flag of
    Megatron-LM, that is raised, and zeros are given, so that the weight's hooks run."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


def sum_product(total: Tensor | None, a: Tensor, b: Tensor, *, last: bool) -> Tensor:
    """total + a b of 16-bit factors, in float32 and in the memory of total. A sum of one term is
    rounded at once in bfloat16; float16 may not hold it."""
    if total is None and last and a.dtype == torch.bfloat16:
        return a @ b
    if a.is_cuda and total is not None:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())
