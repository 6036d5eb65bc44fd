"""FP8 by PyTorch alone: rounding, products, and linears in both passes.

Linears are torchao's, by its row-wise recipe, or go by `torch._scaled_mm` where it is not
installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

E4M3_MAX = 448.0


def e4m3(x: Tensor) -> Tensor:
    """Round to FP8."""
    return x.to(torch.float8_e4m3fn)


def quantised(x: Tensor, whole: bool = False) -> tuple[Tensor, Tensor]:
    """Round rows to FP8, with their scales, or with one for all."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=1e-12) / E4M3_MAX
    scale = scale.max().expand(len(scale)).contiguous() if whole else scale
    return e4m3(wide / scale[:, None]).contiguous(), scale


def scaled_product(a: Tensor, weight: Tensor, *scales: Tensor, fast: bool = True) -> Tensor:
    """Multiply in FP8; accepted kernels sum in the fast form alone."""
    product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(a, weight.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)


def converted(model: nn.Module) -> str:
    """Give a model's linears but `lm_head` FP8 products; say by what."""
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    try:
        import torchao  # pyright: ignore[reportMissingImports]
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError:
        for name in names:
            model.get_submodule(name).__class__ = Float8Linear
        return "torch._scaled_mm, scaled by rows"
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, n: n in names)
    return f"torchao {torchao.__version__}, rowwise"


class Float8Linear(nn.Linear):
    """`nn.Linear` in e4m3; rows and both widths are multiples of 16.

    Of each product both factors are scaled anew, by the result's rows and by its columns.
    """

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _Product.apply(input.flatten(0, -2), self.weight)
        y = y.unflatten(0, input.shape[:-1])
        return y if self.bias is None else y + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        x, weight = inputs
        ctx.save_for_backward(x, weight)
        return _product(x, weight, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grads
        x, weight = ctx.saved_tensors
        return _product(dy, weight.T, fast=False), _product(dy.T, x.T, fast=False)


def _product(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    """Multiply a by bᵀ, forward in the fast form, as torchao does."""
    (left, scale), (right, other) = quantised(a), quantised(b)
    return scaled_product(left, right, scale[:, None], other[None], fast=fast)
