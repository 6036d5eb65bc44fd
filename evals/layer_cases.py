"""A block or a head by coda_agent.layers, PyTorch, torch.compile, Liger and the bare products:
their times, peak memory, and errors against float32.

A block is a decoder layer without attention: from the output projection to the next layer's query,
key and value with their rotation. A head is the final norm, the product with the vocabulary, and
the loss. All take the same weights, as a model has them: what ours packs, it packs in each call.
One contender, `packed`, has what it packs as parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from coda_agent.agent.judge.samples import Samples, speedup
from coda_agent.evals.contest import Clock

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, HEAD_DIM, EPS = 16384, 128, 1e-5
Values = dict[str, "Tensor"]
Way = Callable[[Values], "tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Widths:
    """What is measured: a block of width d with F columns of gate and up and `kv` of key and of
    value, or a head of width d and so many words."""

    d: int
    ffn: int = 0
    kv: int = 0
    bias: bool = False
    words: int = 0
    PHASES: ClassVar = ("forward", "backward", "both")

    @property
    def CONTENDERS(self) -> tuple[str, ...]:
        """Who takes part; a head packs nothing."""
        packed = () if self.words else ("packed",)
        return ("ours", *packed, "gemm", "eager", "compile", "liger", "liger_compile")

    def shrunk(self, by: int) -> Widths:
        """So many times as small, in multiples of 16."""
        sizes = {n: -(-x // by // 16) * 16 for n, x in asdict(self).items() if n != "bias"}
        return Widths(**sizes, bias=self.bias)

    def on(self, device: str, shrink: int) -> Case:
        """The case on a device, so many times as small."""
        return Case(self.shrunk(shrink), device, TOKENS // shrink)


class Case:
    """One case on one device: its values, and each contender's way.

    Args:
        widths: Of what.
        device: "cpu" interprets and compiles nothing.
        tokens: Rows.
    """

    def __init__(self, widths: Widths, device: str, tokens: int) -> None:
        self.widths, self.device, self.tokens = widths, device, tokens
        whole = self.widths.d % HEAD_DIM == 0 and self.widths.kv % HEAD_DIM == 0
        self.dh = HEAD_DIM if whole else 16
        self.values = self._drawn()

    def _drawn(self) -> Values:
        import torch

        from coda_agent.layers.packing import rotary_table

        torch.manual_seed(0)
        w, rows = self.widths, self.tokens

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, device=self.device) * shape[-1] ** -0.5).bfloat16()

        def gamma() -> Tensor:
            return (torch.rand(w.d, device=self.device) + 0.5).bfloat16()

        def stream() -> Tensor:
            return torch.randn(rows, w.d, device=self.device).bfloat16()

        if w.words:
            found = {"x": stream(), "gamma": gamma(), "weight": weight(w.words, w.d)}
            self.targets = torch.randint(0, w.words, (rows,), device=self.device)
        else:
            found = {
                "a": stream(), "x": stream(), "wo": weight(w.d, w.d), "gamma": gamma(),
                "gate": weight(w.ffn, w.d), "up": weight(w.ffn, w.d), "down": weight(w.d, w.ffn),
                "gamma2": gamma(), "q": weight(w.d, w.d), "k": weight(w.kv, w.d),
                "v": weight(w.kv, w.d),
            }  # fmt: skip
            if w.bias:
                found |= {f"{n}_bias": weight(1, len(found[n]))[0] for n in "qkv"}
            turns = 10000.0 ** (-torch.arange(0, self.dh, 2, device=self.device) / self.dh)
            angle = torch.arange(rows, device=self.device)[:, None] % 4096 * turns
            angle = torch.cat((angle, angle), -1)
            self.places = angle.cos().bfloat16(), angle.sin().bfloat16()
            self.sizes, self.heads = (w.d, w.kv, w.kv), (w.d // self.dh, w.kv // self.dh)
            self.table = rotary_table(*self.places, sum(self.heads), sum(self.sizes))
        return {name: value.requires_grad_() for name, value in found.items()}

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        """Times by phase, peak memory in MiB, errors, why a contender is absent, and what
        torch.compile left as it was."""
        import torch
        import torch._functorch.config as functorch

        found: dict[str, Any] = {"absent": {}, "fallbacks": {}, "peak_mib": {}}
        # Only a backward pass that is taken again has to leave what it reads: elsewhere
        # torch.compile may reuse that memory.
        for donated, phases in ((True, ("forward", "both")), (False, ("backward",))):
            with functorch.patch(donated_buffer=donated):
                ways = self._ways(wanted, found)
                if donated:
                    found["errors"] = self._errors(ways)
                for phase in phases:
                    calls = {name: self._call(way, phase) for name, way in ways.items()}
                    if self.device == "cuda" and phase == "both":
                        found["peak_mib"] = {n: peak(c) for n, c in calls.items() if n != "gemm"}
                    found[phase] = timed(clock, calls, rounds)
                    del calls
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return found

    def _ways(self, wanted: Iterable[str], found: dict[str, Any]) -> dict[str, Way]:
        import torch

        head = bool(self.widths.words)
        plain, ours = (
            (self._eager_head, self._our_head) if head else (self._eager_block, self._our_block)
        )
        made: dict[str, Callable[[], Way]] = {
            "ours": lambda: ours,
            "packed": lambda: self._packed_block,
            "gemm": lambda: self._products,
            "eager": lambda: plain,
            "compile": lambda: torch.compile(plain, dynamic=False),
            "liger": self._liger,
            "liger_compile": lambda: torch.compile(self._liger(), dynamic=False),
        }

        def ready(name: str) -> Way:
            way = made[name]()
            if name != "gemm":
                self._call(way, "both")()
            return way

        return prepared([n for n in made if n in wanted], ready, found, self.device)

    def _call(self, way: Way, phase: str) -> Callable[[], Any]:
        import torch

        values = self._own if way == self._packed_block else self.values
        if way == self._products:
            return lambda: self._multiplied(phase)
        if phase == "forward":
            return lambda: way(values)
        outs = way(values)
        grads = [torch.ones_like(out) for out in outs]

        def backward(outs: tuple[Tensor, ...], again: bool) -> None:
            # As in a training step, each gradient comes to lie as its weight does.
            torch.autograd.backward(outs, grads, retain_graph=again)
            for value in values.values():
                value.grad = None

        if phase == "backward":
            return lambda: backward(outs, True)
        return lambda: backward(way(values), False)

    def _errors(self, ways: Mapping[str, Way]) -> dict[str, float]:
        """By contender, the largest error of an output or gradient over that of PyTorch's bf16."""
        import torch

        with torch.no_grad():
            wide = {n: v.detach().float().requires_grad_() for n, v in self.values.items()}
        truth = self._results(ways["eager"], wide)
        plain = self._results(ways["eager"], self.values)
        base = {n: _distance(plain[n], t) for n, t in truth.items()}
        found = dict[str, float]()
        for name in ways.keys() & {"ours", "liger"}:
            got = self._results(ways[name], self.values)
            found[name] = round(max(_distance(got[n], t) / base[n] for n, t in truth.items()), 3)
        return found

    def _results(self, way: Way, values: Values) -> Values:
        import torch

        outs = way(values)
        if way == self._our_block:  # query and key have pairs in turn where the others have halves
            turned = (y.unflatten(-1, (-1, self.dh // 2, 2)).transpose(-1, -2) for y in outs[:2])
            outs = *(y.flatten(1) for y in turned), *outs[2:]
        made = torch.Generator(self.device).manual_seed(1)
        draws = (torch.randn(o.shape, device=self.device, generator=made) for o in outs)
        grads = [g.to(o.dtype) for g, o in zip(draws, outs, strict=True)]
        taken = torch.autograd.grad(outs, [*values.values()], grads)
        named = {f"out {i}": out.detach() for i, out in enumerate(outs)}
        return named | dict(zip(values, taken, strict=True))

    def _eager_block(self, t: Values) -> tuple[Tensor, ...]:
        import torch.nn.functional as F

        x = t["x"] + F.linear(t["a"], t["wo"])
        n = _normed(x, t["gamma"])
        x = x + F.linear(F.silu(F.linear(n, t["gate"])) * F.linear(n, t["up"]), t["down"])
        n = _normed(x, t["gamma2"])
        q, k, v = (F.linear(n, t[name], t.get(f"{name}_bias")) for name in "qkv")
        return self._rotated(q), self._rotated(k), v, x

    def _rotated(self, y: Tensor) -> Tensor:
        import torch

        cos, sin = (place.to(y.dtype)[:, None] for place in self.places)
        y = y.unflatten(-1, (-1, self.dh))
        left, right = y.chunk(2, -1)
        return (y * cos + torch.cat((-right, left), -1) * sin).flatten(1)

    def _eager_head(self, t: Values) -> tuple[Tensor, ...]:
        import torch.nn.functional as F

        logits = F.linear(_normed(t["x"], t["gamma"]), t["weight"])
        return (F.cross_entropy(logits.float(), self.targets),)

    def _liger(self) -> Way:
        import torch.nn.functional as F
        from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyFunction,
        )
        from liger_kernel.ops.rms_norm import (  # pyright: ignore[reportMissingImports]
            LigerRMSNormFunction,
        )
        from liger_kernel.ops.rope import (  # pyright: ignore[reportMissingImports]
            LigerRopeFunction,
        )
        from liger_kernel.ops.swiglu import (  # pyright: ignore[reportMissingImports]
            LigerSiLUMulFunction,
        )

        def normed(x: Tensor, gamma: Tensor) -> Any:
            return LigerRMSNormFunction.apply(x, gamma, EPS, 0.0, "llama", False)

        def head(t: Values) -> tuple[Tensor, ...]:
            n, weight = normed(t["x"], t["gamma"]), t["weight"]
            return (LigerFusedLinearCrossEntropyFunction.apply(n, weight, self.targets)[0],)

        def block(t: Values) -> tuple[Tensor, ...]:
            x: Any = t["x"] + F.linear(t["a"], t["wo"])
            n = normed(x, t["gamma"])
            gated: Any = LigerSiLUMulFunction.apply(F.linear(n, t["gate"]), F.linear(n, t["up"]))
            x = x + F.linear(gated, t["down"])
            n = normed(x, t["gamma2"])
            q, k, v = (F.linear(n, t[name], t.get(f"{name}_bias")) for name in "qkv")
            heads = (y.view(1, len(y), -1, self.dh).transpose(1, 2) for y in (q, k))
            turned: Any = LigerRopeFunction.apply(*heads, *(place[None] for place in self.places))
            q, k = (y.transpose(1, 2).reshape(len(v), -1) for y in turned)
            return q, k, v, x

        return head if self.widths.words else block

    def _our_block(self, t: Values) -> tuple[Tensor, ...]:
        """As patched models do it (layers/patch.py)."""
        return self._packed_block(self._packed(t))

    def _packed(self, t: Values) -> Values:
        from coda_agent.layers.packing import interleave, pack_qkv

        rest = {n: t[n] for n in ("a", "x", "wo", "gamma", "down", "gamma2")}
        rest["gate_up"] = interleave(t["gate"], t["up"])
        rest["qkv"] = pack_qkv(t["q"], t["k"], t["v"], self.heads)
        if self.widths.bias:
            rest["bias"] = pack_qkv(t["q_bias"], t["k_bias"], t["v_bias"], self.heads)
        return rest

    @cached_property
    def _own(self) -> Values:
        packed = self._packed(self.values)
        return {n: value.detach().clone().requires_grad_() for n, value in packed.items()}

    def _packed_block(self, t: Values) -> tuple[Tensor, ...]:
        from coda_agent.layers import linear_residual_norm, mlp, norm_linear

        x, given = linear_residual_norm(t["a"], t["wo"], t["x"], t["gamma"], EPS)
        x, given = mlp(x, given, t["gamma"], t["gate_up"], t["down"], t["gamma2"], EPS)
        packed = t["qkv"], self.sizes, self.table, t.get("bias"), (sum(self.heads), self.dh)
        return norm_linear(x, given, t["gamma2"], *packed)

    def _our_head(self, t: Values) -> tuple[Tensor, ...]:
        from coda_agent.layers import head_loss, normed

        x, gamma = t["x"], t["gamma"]
        return (head_loss(x, normed(x, gamma, EPS), gamma, t["weight"], self.targets),)

    def _products(self, t: Values) -> tuple[Tensor, ...]:
        """The bare products of the forward pass."""
        import torch.nn.functional as F

        return tuple(F.linear(a.detach(), b.detach()) for a, b in self._pairs(t))

    def _pairs(self, t: Values) -> list[tuple[Tensor, Tensor]]:
        import torch

        if self.widths.words:
            return [(t["x"], t["weight"])]
        if not hasattr(self, "joined"):
            with torch.no_grad():
                gate_up, qkv = torch.cat((t["gate"], t["up"])), torch.cat((t["q"], t["k"], t["v"]))
                act = t["x"].new_empty(self.tokens, self.widths.ffn).normal_()
                self.joined = gate_up, qkv, act
        gate_up, qkv, act = self.joined
        return [(t["a"], t["wo"]), (t["x"], gate_up), (act, t["down"]), (t["x"], qkv)]

    def _multiplied(self, phase: str) -> None:
        import torch

        with torch.no_grad():
            pairs = self._pairs(self.values)
            if not hasattr(self, "grads"):
                self.grads = [a.new_empty(len(a), len(b)).normal_() for a, b in pairs]
            for (a, b), grad in zip(pairs, self.grads, strict=True):
                if phase != "backward":
                    torch.mm(a, b.T)
                if phase != "forward":
                    torch.mm(grad, b)
                    torch.mm(grad.T, a)


def _normed(x: Tensor, gamma: Tensor) -> Tensor:
    import torch

    wide = x.float()
    return gamma * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def prepared(
    names: Iterable[str], ready: Callable[[str], Any], found: dict[str, Any], device: str
) -> dict[str, Any]:
    """Contenders by name, each made and called once by `ready`. Why one has no part is put into
    `found["absent"]`, and what torch.compile left as it was into `found["fallbacks"]`.

    Raises:
        Exception: what ours, the products or PyTorch raise.
    """
    import torch

    torch.compiler.reset()  # what was compiled with other options
    made = dict[str, Any]()
    for name in names:
        if "compile" in name and device != "cuda":
            found["absent"][name] = "needs a GPU"
            continue
        try:
            with fallbacks() as said:
                made[name] = ready(name)
        except Exception as fault:  # foreign code: anything may come out of it
            if name in ("ours", "packed", "gemm", "eager"):
                raise
            line = (str(fault).strip().splitlines() or [""])[0]
            found["absent"][name] = f"{type(fault).__name__}: {line}"[:200]
            continue
        if said and "compile" in name:
            found["fallbacks"][name] = "; ".join(dict.fromkeys(said))[:400]
    return made


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Fills a list with what torch.compile, within this context, left as it was, and why: a graph
    that breaks, a frame it gives up on, a kernel of which it assumes the worst."""
    from torch._dynamo.utils import counters

    counters["graph_break"].clear()
    said = list[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fault = (record.exc_info or (None, None))[1]
            because = f" ({type(fault).__name__})" if fault else ""
            said.append(f"{record.getMessage().splitlines()[0][:150]}{because}")

    listener = Listener(logging.WARNING)
    heard = [logging.getLogger(f"torch.{n}") for n in ("_dynamo", "_higher_order_ops")]
    for logger in heard:
        logger.addHandler(listener)
    try:
        yield said
    finally:
        for logger in heard:
            logger.removeHandler(listener)
        said += [f"graph break: {why.splitlines()[0][:150]}" for why in counters["graph_break"]]


def timed(clock: Clock, calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Interleaved medians, and how many times as fast ours is."""
    rotations = {name: lambda _, call=call: call() for name, call in calls.items()}
    samples: Mapping[str, Samples] = clock.interleave(rotations, rounds)
    kept = {"median_us", "interval_us"}
    return {
        "times": {n: s.timing().model_dump(include=kept) for n, s in samples.items()},
        "over": {n: speedup(samples["ours"], s).model_dump() for n, s in samples.items()},
    }


def _distance(got: Tensor, truth: Tensor) -> float:
    found = float((got.float() - truth).norm() / truth.norm())
    return found if math.isfinite(found) else math.inf


def peak(call: Callable[[], Any]) -> int:
    """MiB that a call takes beyond what was there before it."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)
