"""Layers by exported kernels, as Hugging Face `kernels` binds them: a forward of the weights of the
module that adopts it.

- Each is made of the kernel that it runs by: one of an export, or the function of that name in
  `coda_agent.generated`. Products behind the kernel's, and the backward pass, are PyTorch's calls.
- A layer has no state, so a weight is taken in the order in which the module holds it.
- What a kernel does not take is its error, in one line. A second derivative is refused by PyTorch.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Kernel = Callable[..., Any]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Logits that a loss holds at a time: 1 GiB in 16 bits.
_LOGITS = 1 << 29
_SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu_tanh": lambda dy, z: torch.ops.aten.gelu_backward(dy, z, approximate="tanh"),
    "relu": lambda dy, z: torch.ops.aten.threshold_backward(dy, z, 0),
    "silu": lambda dy, z: torch.ops.aten.silu_backward(dy, z),
}


def linear_act(kernel: Kernel, activation: str) -> Callable[..., Tensor]:
    """act(x weightᵀ + bias) of x (…, M, K), weight (N, K) and bias (N,) or None, by
    `gemm_bias_act`, with gradients. The backward pass computes the product again.

    The kernel adds a matrix to the product, too. It is given zeros, which are written and read.
    """

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            x, weight, bias = inputs
            ctx.save_for_backward(*inputs)
            zeros, per_column = x.new_zeros(*x.shape[:-1], len(weight)), bias
            if bias is None:
                per_column = x.new_zeros(len(weight))
            return kernel(x, weight, zeros, per_column, 1.0, 0.0, activation=activation)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            x, weight, bias = ctx.saved_tensors
            dz = _SLOPES[activation](grads[0], F.linear(x, weight, bias))
            dbias = None if bias is None else dz.flatten(0, -2).sum(0)
            return (*_of_product(ctx, dz, x, weight), dbias)

    return Run.apply


def gated(kernel: Kernel) -> Callable[..., Tensor]:
    """silu(x gateᵀ) · (x upᵀ) of x (…, M, K) and a weight (2F, K) whose rows are gate's and up's in
    turn, by `gemm_swiglu`, with gradients."""

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            z, out = kernel(*inputs)
            ctx.save_for_backward(*inputs, z)
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            x, weight, z = ctx.saved_tensors
            gate, up = z[..., 0::2], z[..., 1::2]
            dgate = torch.ops.aten.silu_backward(grads[0] * up, gate)
            dz = torch.stack((dgate, grads[0] * F.silu(gate)), dim=-1).flatten(-2)
            return _of_product(ctx, dz, x, weight)

    return Run.apply


def cross_entropy(kernel: Kernel, gradient: Optional[Gradient] = None) -> Callable[..., Tensor]:
    """Σ cross-entropy(x weightᵀ, targets) over rows, of x (M, K), weight (V, K), targets (M,) int64
    and rows (M,) bool, by `gemm_partial_cross_entropy`, with gradients; float32.

    Logits are held for some rows at a time, and gradients are taken while they are there. They are
    those of the sum, so that float16 holds them: a mean's are scaled in the backward pass.
    torch.compile leaves it as it is: on an H200 with torch 2.11 it gave zeros (2026-11-23).

    Args:
        kernel: The kernel.
        gradient: That of logits (m, V), given their targets' (m,), log-sum-exps, targets and rows;
            by default PyTorch's calls.
    """
    slope = gradient or _logit_gradient

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            x, weight, targets, rows = inputs
            needs = ctx.needs_input_grad[:2]
            loss, dweight, dx = x.new_zeros((), dtype=torch.float32), None, []
            step = max(128, _LOGITS // len(weight) // 128 * 128)  # whole tiles
            for start in range(0, len(x), step):
                some = slice(start, start + step)
                z, target, lse = kernel(x[some], weight, targets[some])
                loss = loss + (lse - target).where(rows[some], 0).sum()
                if any(needs):
                    z = slope(z, target, lse, targets[some], rows[some])
                if needs[0]:
                    dx.append(z @ weight)
                if needs[1]:
                    dweight = _added(dweight, z.T, x[some])
            ctx.save_for_backward(torch.cat(dx) if dx else None, dweight)
            ctx.types = x.dtype, weight.dtype
            return loss

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            pairs = zip(ctx.saved_tensors, ctx.types)
            found = [None if t is None else (t * grads[0]).to(kind) for t, kind in pairs]
            return (*found, None, None)

    def run(*inputs: Any) -> Any:
        # `disable` imports torch._dynamo, which takes seconds: not before something is traced.
        traced = torch.compiler.is_compiling()
        return (torch.compiler.disable(Run.apply) if traced else Run.apply)(*inputs)

    return run


def reduced(
    run: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """The mean or the sum of cross-entropies, over rows whose target is not `ignore_index`.

    Args:
        run: Of `cross_entropy`.
        x, weight, targets: See there; rows of x and targets may have several dims.
        ignore_index: The target of rows that do not count.
        reduction: "mean" or "sum".
    """
    if not torch.is_grad_enabled():  # which a function of autograd is not told
        x, weight = x.detach(), weight.detach()
    targets = targets.flatten()
    rows = targets != ignore_index
    loss = run(x.flatten(0, -2), weight, targets.where(rows, 0), rows)
    return loss / rows.sum() if reduction == "mean" else loss


def refuse(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what the kernel of a loss has no form for.

    Args:
        name: Who refuses.
        options: Those that must be None, False, 0 or empty, and `reduction`.

    Raises:
        ValueError: one of them is asked for.
    """
    for option, value in options.items():
        if option == "reduction":
            known, expected = value in ("mean", "sum"), "mean or sum"
        else:
            known, expected = isinstance(value, (int, float, tuple)) and not value, "none"
        if not known and value is not None:
            got = "of a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} has {option} {got}, expected {expected}")


def layer(name: str, kernels: Mapping[str, Kernel]) -> type[nn.Module]:
    """The layer of a name in `LAYERS`."""
    kernel, make = LAYERS[name]
    made = make(kernels[kernel])
    made.__name__ = made.__qualname__ = name
    return made


def _linear(activation: str) -> Callable[[Kernel], type[nn.Module]]:
    def make(kernel: Kernel) -> type[nn.Module]:
        run = linear_act(kernel, activation)

        class Linear(nn.Module):
            """Linear and activation, of a module with `weight` (N, K) and `bias` (N,) or None."""

            can_torch_compile = has_backward = True
            weight: Tensor
            bias: Optional[Tensor]

            def forward(self, input: Tensor) -> Tensor:
                return run(input, self.weight, self.bias)

        return Linear

    return make


def _gelu_mlp(kernel: Kernel) -> type[nn.Module]:
    run = linear_act(kernel, "gelu_tanh")

    class MLP(nn.Module):
        """Linear, GELU by tanh and linear, of a module with those as `fc1` and `fc2`."""

        can_torch_compile = has_backward = True
        fc1: nn.Linear
        fc2: nn.Linear

        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.fc2(run(hidden_states, self.fc1.weight, self.fc1.bias))

    return MLP


def _swiglu_mlp(kernel: Kernel) -> type[nn.Module]:
    run = gated(kernel)

    class MLP(nn.Module):
        """SwiGLU and linear, of a module with `gate_up_proj`, whose rows are gate's and up's in
        turn, `down_proj`, and `interleaved = True`, which says so."""

        can_torch_compile = has_backward = True
        gate_up_proj: nn.Linear
        down_proj: nn.Linear
        interleaved: bool

        def forward(self, hidden_states: Tensor) -> Tensor:
            if not getattr(self, "interleaved", False):
                raise ValueError(
                    "rows of gate_up_proj must be gate's and up's in turn; "
                    "set `interleaved = True` on the module where they are"
                )
            return self.down_proj(run(hidden_states, self.gate_up_proj.weight))

    return MLP


def _loss(kernel: Kernel) -> type[nn.Module]:
    run = cross_entropy(kernel)

    class Loss(nn.Module):
        """The loss of `torch.nn.LinearCrossEntropyLoss` in float32, without label smoothing, class
        weights, bias or reduction "none"."""

        can_torch_compile, has_backward = False, True
        linear: nn.Linear
        weight: Optional[Tensor]
        ignore_index: Optional[int]
        reduction: str

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            options = "reduction", "weight", "label_smoothing", "out_features"
            given = {x: getattr(self, x, None) for x in options}
            refuse("LinearCrossEntropyLoss", {**given, "bias": self.linear.bias})
            ignored = -100 if self.ignore_index is None else self.ignore_index
            return reduced(run, input, self.linear.weight, target, ignored, self.reduction)

    return Loss


LAYERS: dict[str, tuple[str, Callable[[Kernel], type[nn.Module]]]] = {
    "LinearGeluTanh": ("gemm_bias_act", _linear("gelu_tanh")),
    "LinearRelu": ("gemm_bias_act", _linear("relu")),
    "LinearSilu": ("gemm_bias_act", _linear("silu")),
    "GeluTanhMLP": ("gemm_bias_act", _gelu_mlp),
    "SwiGLUMLP": ("gemm_swiglu", _swiglu_mlp),
    "LinearCrossEntropyLoss": ("gemm_partial_cross_entropy", _loss),
}
"""By name: the kernel that a layer runs by, and what makes it."""


def _of_product(ctx: Any, dz: Tensor, x: Tensor, weight: Tensor) -> tuple[Any, Any]:
    """The gradients of x and weight, where they are asked for, from that of x weightᵀ."""
    needs = ctx.needs_input_grad
    dx = dz @ weight if needs[0] else None
    return dx, dz.flatten(0, -2).T @ x.flatten(0, -2) if needs[1] else None


def _logit_gradient(
    z: Tensor, target: Tensor, lse: Tensor, targets: Tensor, rows: Tensor
) -> Tensor:
    """By passes in the type of z, which sum in float32. At the target the probability less one is
    taken in float32, since it may be all but zero."""
    at_target = torch.expm1(target - lse).to(z.dtype)
    dz = torch.softmax(z, dim=-1).scatter_(1, targets[:, None], at_target[:, None])
    return dz.masked_fill_(~rows[:, None], 0)


def _added(total: Optional[Tensor], a: Tensor, b: Tensor) -> Tensor:
    """total + a b in float32, in the memory of total."""
    if not a.is_cuda:
        return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
