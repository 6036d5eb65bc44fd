"""The suite of layers: blocks, heads and training steps, beside others.

- A block is a decoder layer without attention: from the output projection to the next layer's
  query, key and value with their rotation. A head is the final norm, the product with the
  vocabulary, and the loss.
- All contenders take the same weights, as a model has them; ours is the backend `coda`.
- Blocks' forward passes are there in FP8, too. All contenders quantise alike, in front: each row of
  a weight by its own maximum (query, key and value by one in all), each token by its own, and
  SwiGLU's values by one static scale.
- Training steps are in `training.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.evals import training
from coda_agent.evals.cases import Case, Contender, Setup, Suite, differentiated, operators_of
from coda_agent.evals.float8 import E4M3_MAX, e4m3, quantised, scaled_product
from coda_agent.fuse.backend import coda

TOKENS, HEAD_DIM, EPS, LIMIT, FP8_LIMIT = 16384, 128, 1e-5, 0.05, 0.1
PHASES = ("forward", "backward", "both")
Values = Mapping[str, Tensor]
Way = Callable[[Values], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Widths:
    """The widths of a block, or with words of a head.

    Attributes:
        d: Of the stream.
        ffn: Columns of gate and of up.
        kv: Of key and of value.
        bias: Whether query, key and value have biases.
        words: Of the vocabulary.
    """

    d: int
    ffn: int = 0
    kv: int = 0
    bias: bool = False
    words: int = 0

    def shrunk(self, by: int) -> Widths:
        """Divide the widths, in multiples of 16."""
        sizes = (-(-x // by // 16) * 16 for x in (self.d, self.ffn, self.kv, self.words))
        d, ffn, kv, words = sizes
        return Widths(d, ffn, kv, self.bias, words)

    @property
    def head_dim(self) -> int:
        return HEAD_DIM if self.d % HEAD_DIM == 0 and self.kv % HEAD_DIM == 0 else 16


BLOCKS = {
    "2048": Widths(2048, 5632, 512),
    "4096": Widths(4096, 11008, 1024),
    "8192": Widths(8192, 28672, 1024),
    "Llama-3-8B": Widths(4096, 14336, 1024),
    "Qwen2.5-7B": Widths(3584, 18944, 512, bias=True),
}
HEADS = {"4096": Widths(4096, words=32000), "Llama-3-8B": Widths(4096, words=128256)}


_ABOUT = """Blocks, heads and training steps, at 16,384 tokens. A block is a decoder layer without
attention: from the output projection to the next layer's query, key and value with their rotation.
A head is the final norm, the product with the vocabulary, and the loss. Ours is the backend `coda`.
`gemm` are the bare products. A step is forward, backward and a fused AdamW of Llama-3.2-1B, 8
sequences of 4096 tokens for each GPU, 4 in FP8; on two GPUs FSDP2 shards it, and time is the
host's; or of six layers of another model, with its head. `compile` is a transformers model under
torch.compile, whose attention gets a mask; `compile, mask folded` has causal attention instead."""


def suite(_: Path) -> Suite:
    """List blocks, heads and training steps; means are taken over widths."""
    return Suite("layers", _ABOUT, [*cases(), *training.cases()], group=_without_width)


def _without_width(case: str) -> str:
    kind, *rest = case.split()
    return case if kind == "train-1b" else " ".join((kind, *rest[1:]))


def cases() -> list[Case]:
    """List blocks and heads by phase, and the blocks in FP8."""
    others = "gemm", "eager", "compile"
    made = (("block", BLOCKS, _block), ("head", HEADS, _head))
    found = [
        Case(f"{kind} {name} {phase}", ("ours", *others, "liger", "liger, compiled"),
             partial(make, widths, phase))
        for kind, known, make in made for name, widths in known.items() for phase in PHASES
    ]  # fmt: skip
    return found + [
        Case(f"block {name} fp8 forward", ("ours", *others, "compile, scales behind"),
             partial(_fp8_block, widths))
        for name, widths in BLOCKS.items() if not widths.bias
    ]  # fmt: skip


class Ops:
    """What a block is made of, by PyTorch.

    Args:
        cos, sin: (tokens, head_dim), the second half of the columns like the first.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def products(self, t: Values, x: Tensor, *names: str) -> Sequence[Tensor]:
        """Multiply by each weight."""
        return [F.linear(x, t[name], t.get(f"{name}_bias")) for name in names]

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return _normed(x, gamma)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def rotate(self, *parts: Tensor) -> Sequence[Tensor]:
        """Rotate the heads of query and key."""
        found = []
        for y in parts:
            cos, sin = (table.to(y.dtype)[:, None] for table in (self.cos, self.sin))
            y = y.unflatten(-1, (-1, cos.shape[-1]))
            left, right = y.chunk(2, -1)
            found.append((y * cos + torch.cat((-right, left), -1) * sin).flatten(1))
        return found

    def block(self, t: Values) -> tuple[Tensor, ...]:
        """Compute query, key, value and the stream."""
        x = t["x"] + self.products(t, t["a"], "wo")[0]
        gate, up = self.products(t, self.norm(x, t["gamma"]), "gate", "up")
        x = x + self.products(t, self.gate(gate, up), "down")[0]
        q, k, v = self.products(t, self.norm(x, t["gamma2"]), "q", "k", "v")
        return *self.rotate(q, k), v, x


class LigerOps(Ops):
    """The same by Liger's kernels."""

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        from liger_kernel.ops.rms_norm import (  # pyright: ignore[reportMissingImports]
            LigerRMSNormFunction,
        )

        return LigerRMSNormFunction.apply(x, gamma, EPS, 0.0, "llama", False)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import (  # pyright: ignore[reportMissingImports]
            LigerSiLUMulFunction,
        )

        return LigerSiLUMulFunction.apply(gate, up)

    def rotate(self, *parts: Tensor) -> Sequence[Tensor]:
        from liger_kernel.ops.rope import (  # pyright: ignore[reportMissingImports]
            LigerRopeFunction,
        )

        heads = (y.view(1, len(y), -1, self.cos.shape[-1]).transpose(1, 2) for y in parts)
        turned = LigerRopeFunction.apply(*heads, self.cos[None], self.sin[None])
        return [y.transpose(1, 2).reshape(y.shape[2], -1) for y in turned]


class Fp8Ops(Ops):
    """A block with products in FP8 by `torch._scaled_mm`.

    Args:
        behind: Whether products have a scale of one, which runs cuBLAS instead of CUTLASS, and the
            passes behind them scale.
        inner: The static scale of SwiGLU's values.
    """

    def __init__(self, t: Values, cos: Tensor, sin: Tensor, inner: float, behind: bool) -> None:
        super().__init__(cos, sin)
        self.behind, self.inner, self.one = behind, inner, torch.ones((), device=cos.device)
        groups: list[tuple[str, ...]] = [("wo",), ("gate", "up"), ("down",), ("q", "k", "v")]
        self.weights = {g: quantised(torch.cat([t[n] for n in g]), g[0] == "q") for g in groups}

    def products(self, t: Values, x: Tensor, *names: str) -> Sequence[Tensor]:
        weight, columns = self.weights[names]
        if names == ("down",):
            narrow = e4m3((x / self.inner).clamp(-E4M3_MAX, E4M3_MAX))
            rows = torch.full((len(x),), self.inner, device=x.device)
        else:
            narrow, rows = quantised(x)
        if self.behind:
            y = scaled_product(narrow, weight, self.one, self.one).float()
            y = (y * rows[:, None] * columns).bfloat16()
        else:
            y = scaled_product(narrow, weight, rows[:, None], columns[None])
        return y.split([len(t[name]) for name in names], dim=1)


def values(w: Widths, tokens: int, device: str) -> tuple[Values, Tensor, Tensor]:
    """Draw what a block takes, and the rotation's cosines and sines."""
    torch.manual_seed(0)

    def drawn(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * std).bfloat16()

    def weight(*shape: int) -> Tensor:
        return drawn(*shape, std=shape[-1] ** -0.5)

    gammas = [(torch.rand(w.d, device=device) + 0.5).bfloat16() for _ in range(2)]
    found = {"x": drawn(tokens, w.d), "gamma": gammas[0]}
    if w.words:
        return found | {"weight": weight(w.words, w.d)}, gammas[0], gammas[1]
    found |= {
        "a": drawn(tokens, w.d), "wo": weight(w.d, w.d), "gate": weight(w.ffn, w.d),
        "up": weight(w.ffn, w.d), "down": weight(w.d, w.ffn), "gamma2": gammas[1],
        "q": weight(w.d, w.d), "k": weight(w.kv, w.d), "v": weight(w.kv, w.d),
    }  # fmt: skip
    if w.bias:
        found |= {f"{n}_bias": weight(1, len(found[n]))[0] for n in "qkv"}
    turns = 10000.0 ** (-torch.arange(0, w.head_dim, 2, device=device) / w.head_dim)
    angle = torch.arange(tokens, device=device)[:, None] % 4096 * turns
    angle = torch.cat((angle, angle), -1)
    return found, angle.cos().bfloat16(), angle.sin().bfloat16()


def _normed(x: Tensor, gamma: Tensor) -> Tensor:
    wide = x.float()
    return gamma * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def wide(t: Values) -> Values:
    return {n: v.detach().float().requires_grad_(v.requires_grad) for n, v in t.items()}


def compiled(
    way: Way, t: Values, phase: str, backend: str | Callable[..., object] = "inductor"
) -> Contender:
    """Make a contender by torch.compile."""
    import torch._functorch.config as functorch

    # A backward pass that is taken again has to leave what it reads; else that memory is reused.
    with functorch.patch(donated_buffer=phase != "backward"):
        call = differentiated(torch.compile(way, dynamic=False, backend=backend), t, phase)
        call(0)
    if backend is not coda:
        return Contender(call)
    ran = operators_of(partial(call, 0)).get("coda_agent::kernel", 0)
    return Contender(call, note=lambda: f"{ran} kernels of the backend")


def _multiplied(pairs: Sequence[tuple[Tensor, Tensor]], phase: str) -> Contender:
    """Make bare products; in a backward pass two more of each."""
    grads = [torch.randn(len(a), len(b), device=a.device, dtype=a.dtype) for a, b in pairs]

    def call(_: int) -> dict[str, Tensor]:
        for (a, b), grad in zip(pairs, grads, strict=True):
            if phase != "backward":
                torch.mm(a, b.T)
            if phase != "forward":
                torch.mm(grad, b)
                torch.mm(grad.T, a)
        return {}

    return Contender(torch.no_grad()(call))


def _block(widths: Widths, phase: str, device: str, shrink: int) -> Setup:
    w = widths.shrunk(shrink)
    t, cos, sin = values(w, TOKENS // shrink, device)
    t = {name: value.requires_grad_() for name, value in t.items()}

    def pairs() -> Sequence[tuple[Tensor, Tensor]]:
        act = torch.randn(len(t["x"]), w.ffn, device=device).bfloat16()
        gate_up, qkv = torch.cat((t["gate"], t["up"])), torch.cat((t["q"], t["k"], t["v"]))
        return (t["a"], t["wo"]), (t["x"], gate_up), (act, t["down"]), (t["x"], qkv)

    return _setup(Ops(cos, sin).block, LigerOps(cos, sin).block, pairs, t, phase)


def _head(widths: Widths, phase: str, device: str, shrink: int) -> Setup:
    w = widths.shrunk(shrink)
    t, *_ = values(w, TOKENS // shrink, device)
    t = {name: value.requires_grad_() for name, value in t.items()}
    targets = torch.randint(0, w.words, (len(t["x"]),), device=device)

    def plain(t: Values) -> tuple[Tensor, ...]:
        logits = F.linear(_normed(t["x"], t["gamma"]), t["weight"])
        return (F.cross_entropy(logits.float(), targets),)

    def liger(t: Values) -> tuple[Tensor, ...]:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyFunction,
        )

        n = LigerOps(t["gamma"], t["gamma"]).norm(t["x"], t["gamma"])
        return (LigerFusedLinearCrossEntropyFunction.apply(n, t["weight"], targets)[0],)

    return _setup(plain, liger, lambda: [(t["x"], t["weight"])], t, phase)


def _setup(
    plain: Way, liger: Way, pairs: Callable[[], Sequence[tuple[Tensor, Tensor]]], t: Values,
    phase: str,
) -> Setup:  # fmt: skip
    """Set up PyTorch, Liger and bare products of `pairs`."""
    makers = {
        "ours": lambda: compiled(plain, t, phase, coda),
        "gemm": lambda: _multiplied([(a.detach(), b.detach()) for a, b in pairs()], phase),
        "eager": lambda: Contender(differentiated(plain, t, phase)),
        "compile": lambda: compiled(plain, t, phase),
        "liger": lambda: Contender(differentiated(liger, t, phase)),
        "liger, compiled": lambda: compiled(liger, t, phase),
    }
    return Setup(makers, differentiated(plain, wide(t), phase)(0), LIMIT)


def _fp8_block(widths: Widths, device: str, shrink: int) -> Setup:
    w = widths.shrunk(shrink)
    t, cos, sin = values(w, TOKENS // shrink, device)
    plain = Ops(cos, sin)
    with torch.no_grad():
        x = t["x"] + plain.products(t, t["a"], "wo")[0]
        act = plain.gate(*plain.products(t, plain.norm(x, t["gamma"]), "gate", "up"))
        inner = float(act.abs().max()) / E4M3_MAX
        truth = differentiated(plain.block, wide(t), "forward")(0)
    scaled, behind = (Fp8Ops(t, cos, sin, inner, late) for late in (False, True))

    def bare() -> Contender:
        narrow = [(quantised(t["a"])[0], "wo"), (quantised(t["x"])[0], "gate")]
        narrow += [(e4m3(act / inner), "down"), (quantised(t["x"])[0], "q")]
        weights = {names[0]: weight for names, (weight, _) in scaled.weights.items()}
        one = scaled.one
        return Contender(
            lambda _: [scaled_product(a, weights[n], one, one) for a, n in narrow], lambda: {}
        )

    makers = {
        "ours": lambda: compiled(scaled.block, t, "forward", coda),
        "gemm": bare,
        "eager": lambda: Contender(differentiated(scaled.block, t, "forward")),
        "compile": lambda: compiled(scaled.block, t, "forward"),
        "compile, scales behind": lambda: compiled(behind.block, t, "forward"),
    }
    return Setup(makers, truth, FP8_LIMIT)
