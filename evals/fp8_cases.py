"""A block's forward pass in FP8 by coda_agent.layers.fp8, `torch._scaled_mm`, and torch.compile.

The block is that of `layer_cases`, from attention's output on. All contenders quantise alike: each
weight once before, each token by its own maximum, SwiGLU's values by one static scale, which is
calibrated on the same tokens; scales of weights are those of ours, so the one of query, key and
value is a single number. All sum in the fast form (`use_fast_accum`): the accepted kernels have no
other. Weights that one product takes are packed before, on either side.

`compile` has the products as `_scaled_mm` scales them row by row. `compile_unit` gives
`_scaled_mm` a scale of one for each tensor, which runs cuBLAS instead of CUTLASS, and scales in the
passes behind. The bare products are those with a scale of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from coda_agent.evals.contest import Clock
from coda_agent.evals.layer_cases import (
    EPS,
    TOKENS,
    Case,
    Values,
    Way,
    Widths,
    _distance,
    _normed,
    peak,
    prepared,
    timed,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Fp8Widths:
    """A block of width d with F columns of gate and up and `kv` of key and of value, in FP8."""

    d: int
    ffn: int
    kv: int
    PHASES: ClassVar = ("forward",)
    CONTENDERS: ClassVar = ("ours", "gemm", "eager", "compile", "compile_unit")

    def shrunk(self, by: int) -> Fp8Widths:
        """So many times as small, in multiples of 16."""
        return Fp8Widths(**{n: -(-x // by // 16) * 16 for n, x in asdict(self).items()})

    def on(self, device: str, shrink: int) -> Fp8Case:
        """The case on a device, so many times as small."""
        return Fp8Case(self.shrunk(shrink), device, TOKENS // shrink)


class Fp8Case(Case):
    """One block on one device: its values, quantised weights, and each contender's way.

    Args:
        widths: Of the block.
        device: "cpu" interprets and compiles nothing.
        tokens: Rows.
    """

    def __init__(self, widths: Fp8Widths, device: str, tokens: int) -> None:
        import torch

        from coda_agent.layers import fp8
        from coda_agent.layers.packing import interleave, pack_qkv

        super().__init__(Widths(widths.d, widths.ffn, widths.kv), device, tokens)
        self.values = t = {name: value.detach() for name, value in self.values.items()}
        self.o, self.down = fp8.quantised(t["wo"]), fp8.quantised(t["down"])
        self.gate_up = fp8.quantised(interleave(t["gate"], t["up"]))
        self.qkv = fp8.quantised_whole(pack_qkv(t["q"], t["k"], t["v"], self.heads))
        x, given = fp8.linear_residual_norm(t["a"], self.o, t["x"], t["gamma"], EPS)
        rest = self.gate_up, self.down, 1.0, t["gamma2"], EPS
        self.inner = float(fp8.mlp(x, given, *rest)[2].max()) / fp8.LARGEST
        # Theirs: gate above up, and query, key and value in the order of the model.
        scale = torch.full((len(self.qkv.values),), self.qkv.scale, device=device)
        qkv = (torch.cat([t[n] for n in "qkv"]).float() / self.qkv.scale).to(fp8.E4M3)
        self.theirs = {
            "o": self.o,
            "gate_up": fp8.quantised(torch.cat((t["gate"], t["up"]))),
            "down": self.down,
            "qkv": fp8.Quantised(qkv, scale),
        }
        self.inners = torch.full((tokens,), self.inner, device=device)
        self.one = torch.ones((), device=device)

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        """Times, peak memory in MiB, errors, why a contender is absent, and what torch.compile
        left as it was.

        `distances` are the largest of an output from float32's, over its norm, by contender;
        `errors` ours over PyTorch's.
        """
        import torch

        found: dict[str, Any] = {"absent": {}, "fallbacks": {}, "peak_mib": {}}
        with torch.no_grad():
            ways = self._ways(wanted, found)
            apart = self._apart(ways)
            found["distances"] = {n: round(max(d), 5) for n, d in apart.items()}
            ratios = [a / b for a, b in zip(apart["ours"], apart["eager"], strict=True)]
            found["errors"] = {"ours": round(max(ratios), 3)}
            calls = {name: lambda way=way: way(self.values) for name, way in ways.items()}
            if self.device == "cuda":
                found["peak_mib"] = {n: peak(c) for n, c in calls.items() if n != "gemm"}
            found["forward"] = timed(clock, calls, rounds)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return found

    def _ways(self, wanted: Iterable[str], found: dict[str, Any]) -> dict[str, Way]:
        import torch

        made: dict[str, Callable[[], Way]] = {
            "ours": lambda: self._our_block,
            "gemm": self._bare,
            "eager": lambda: self._scaled_block,
            "compile": lambda: torch.compile(self._scaled_block, dynamic=False),
            "compile_unit": lambda: torch.compile(self._unit_block, dynamic=False),
        }

        def ready(name: str) -> Way:
            way = made[name]()
            way(self.values)
            return way

        return prepared([n for n in made if n in wanted], ready, found, self.device)

    def _apart(self, ways: Mapping[str, Way]) -> dict[str, list[float]]:
        """By contender, each output's distance from that of float32, over its norm."""
        truth = self._eager_block({n: v.float() for n, v in self.values.items()})
        found = dict[str, list[float]]()
        for name, way in {"eager": self._scaled_block, **ways}.items():
            if name == "gemm":
                continue
            outs = way(self.values)
            if name == "ours":  # query and key have pairs in turn where the others have halves
                turned = (y.unflatten(-1, (-1, self.dh // 2, 2)).mT.flatten(1) for y in outs[:2])
                outs = *turned, *outs[2:]
            found[name] = [_distance(o, t) for o, t in zip(outs, truth, strict=True)]
        return found

    def _our_block(self, t: Values) -> tuple[Tensor, ...]:
        from coda_agent.layers import fp8

        x, given = fp8.linear_residual_norm(t["a"], self.o, t["x"], t["gamma"], EPS)
        last = self.inner, t["gamma2"], EPS
        x, given, _ = fp8.mlp(x, given, self.gate_up, self.down, *last)
        return *fp8.norm_linear(given, self.qkv, self.sizes, self.table), x

    def _scaled_block(self, t: Values) -> tuple[Tensor, ...]:
        return self._block(t, self._scaled)

    def _unit_block(self, t: Values) -> tuple[Tensor, ...]:
        return self._block(t, self._unit)

    def _block(self, t: Values, product: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        import torch.nn.functional as F

        x = t["x"] + product(*_quantised(t["a"]), "o")
        gate, up = product(*_quantised(_normed(x, t["gamma"])), "gate_up").chunk(2, 1)
        v = (F.silu(gate) * up / self.inner).clamp(-448.0, 448.0)
        x = x + product(_e4m3(v), self.inners, "down")
        y = product(*_quantised(_normed(x, t["gamma2"])), "qkv")
        q, k, v = y.split(self.sizes, dim=1)
        return self._rotated(q), self._rotated(k), v, x

    def _scaled(self, a: Tensor, scale: Tensor, name: str) -> Tensor:
        weight = self.theirs[name]
        return _product(a, weight.values, scale[:, None], weight.scale[None])

    def _unit(self, a: Tensor, scale: Tensor, name: str) -> Tensor:
        weight = self.theirs[name]
        y = _product(a, weight.values, self.one, self.one).float()
        return (y * scale[:, None] * weight.scale).bfloat16()

    def _bare(self) -> Way:
        """The bare products, of operands that are quantised before."""
        t = self.values
        a, x = (_quantised(t[n])[0] for n in "ax")
        v = _e4m3(t["x"].new_empty(self.tokens, self.widths.ffn).normal_())
        pairs = [
            (rows, self.theirs[n].values)
            for rows, n in ((a, "o"), (x, "gate_up"), (v, "down"), (x, "qkv"))
        ]
        return lambda _: tuple(_product(rows, w, self.one, self.one) for rows, w in pairs)


def _product(a: Tensor, weight: Tensor, *scales: Tensor) -> Tensor:
    import torch

    product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(a, weight.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=1e-12) / 448
    return _e4m3(wide / scale[:, None]), scale


def _e4m3(x: Tensor) -> Tensor:
    import torch

    return x.to(torch.float8_e4m3fn)
