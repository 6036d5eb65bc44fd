"""Blocks and heads by coda_agent.layers beside PyTorch, torch.compile, Liger and the bare products:
forward, backward and both, their peak memory, and errors against float32.

A block is a decoder layer without attention: from the output projection to the next layer's query,
key and value with their rotation. A head is the final norm, the product with the vocabulary, and
the loss.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.samples import speedup
from coda_agent.evals import pages
from coda_agent.evals.contest import Clock, require_hopper
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, HEAD_DIM, EPS = 16384, 128, 1e-5
ROUNDS = 15
PHASES = ("forward", "backward", "both")
CONTENDERS = {
    "ours": "ours", "gemm": "the bare products", "eager": "PyTorch", "compile": "torch.compile",
    "liger": "Liger", "liger_compile": "Liger under torch.compile",
}  # fmt: skip


@dataclass(frozen=True)
class Widths:
    """What is measured: a block of width d with F columns of gate and up and `kv` of key and of
    value, or a head of width d and so many words."""

    d: int
    ffn: int = 0
    kv: int = 0
    bias: bool = False
    words: int = 0

    def shrunk(self, by: int) -> Widths:
        """So many times as small, in multiples of 16."""
        sizes = {n: -(-x // by // 16) * 16 for n, x in asdict(self).items() if n != "bias"}
        return Widths(**sizes, bias=self.bias)


CASES = {
    "block 2048": Widths(2048, 5632, 512),
    "block 4096": Widths(4096, 11008, 1024),
    "block 8192": Widths(8192, 28672, 1024),
    "block Llama-3-8B": Widths(4096, 14336, 1024),
    "block Qwen2.5-7B": Widths(3584, 18944, 512, bias=True),
    "head 4096": Widths(4096, words=32000),
    "head Llama-3-8B": Widths(4096, words=128256),
}
Values = dict[str, "Tensor"]
Way = Callable[[Values], "tuple[Tensor, ...]"]


def measure(
    root: Path,
    *,
    clock: Clock,
    machine: Mapping[str, Any],
    cases: Sequence[str] = (),
    names: Sequence[str] = (),
    rounds: int | None = None,
    seconds: float | None = None,
    device: str = "cuda",
    shrink: int = 1,
    say: Callable[[str], None] = print,
) -> Path:
    """Measure what the record, evals/results/layers-<gpu>.json, does not hold yet; its path.

    Args:
        clock: What times.
        machine: `gpu` (name, driver) and `packages`, kept with each cell.
        cases: Some of `CASES`; none means all.
        names: Some of `CONTENDERS`; none means all. Ours and the products always take part.
        rounds: Timed rounds a cell.
        seconds: Begin no further case after so long.
        device: "cpu" interprets and compiles nothing, for tests.
        shrink: Divides all sizes, for tests.
        say: Takes a line a case.

    Raises:
        CodaError: an unknown case or contender.
        MachineError: no Hopper GPU.
    """
    began = time.monotonic()
    for what, given, known in (("case", cases, CASES), ("contender", names, CONTENDERS)):
        if unknown := [name for name in given if name not in known]:
            raise CodaError(f"no {what} {unknown[0]!r}, expected {', '.join(known)}")
    if device == "cuda":
        require_hopper()
    path = pages.gpu_record(root, "layers", machine, device)
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.is_file() else {}
    wanted = {"ours", "gemm", *(names or CONTENDERS)}
    for done, case in enumerate(cases or CASES):
        widths = CASES[case].shrunk(shrink)
        about = [machine["gpu"], machine["packages"], asdict(widths), clock.PROTOCOL]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        held = cells.get(case, {})
        if held.get("digest") == digest and {*held["forward"]["times"], *held["absent"]} >= wanted:
            say(f"{case}: in the record")
            continue
        if done and seconds is not None and time.monotonic() - began > seconds:
            say(f"{case} and what follows: left, after {seconds:g} s")
            break
        started = time.monotonic()
        found = _Case(widths, device, TOKENS // shrink).measured(wanted, clock, rounds or ROUNDS)
        took = round(time.monotonic() - started, 1)
        cells[case] = {
            "digest": digest, "widths": asdict(widths), "tokens": TOKENS // shrink,
            "machine": machine, **found, "seconds": took,
        }  # fmt: skip
        pages.write_record(path, {"suite": "layers", "date": pages.today()}, cells)
        over = {n: r["ratio"] for n, r in found["both"]["over"].items() if n != "ours"}
        said = ", ".join(f"{name} {ratio:.3f}" for name, ratio in over.items())
        say(f"{case}: forward and backward over {said} ({took} s)")
    return path


class _Case:
    """One case on one device: its values, and each contender's way."""

    def __init__(self, widths: Widths, device: str, tokens: int) -> None:
        self.widths, self.device, self.tokens = widths, device, tokens
        self.dh = HEAD_DIM if widths.d % HEAD_DIM == 0 and widths.kv % HEAD_DIM == 0 else 16
        self.values = self._drawn()

    def _drawn(self) -> Values:
        import torch

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
        else:
            found = {
                "a": stream(), "x": stream(), "wo": weight(w.d, w.d), "gamma": gamma(),
                "gate": weight(w.ffn, w.d), "up": weight(w.ffn, w.d), "down": weight(w.d, w.ffn),
                "gamma2": gamma(), "q": weight(w.d, w.d), "k": weight(w.kv, w.d),
                "v": weight(w.kv, w.d),
            }  # fmt: skip
            if w.bias:
                found |= {f"{n}_bias": weight(1, len(found[n]))[0] for n in "qkv"}
        if w.words:
            self.targets = torch.randint(0, w.words, (rows,), device=self.device)
        else:
            turns = 10000.0 ** (-torch.arange(0, self.dh, 2, device=self.device) / self.dh)
            angle = torch.arange(rows, device=self.device)[:, None] % 4096 * turns
            angle = torch.cat((angle, angle), -1)
            self.places = angle.cos().bfloat16(), angle.sin().bfloat16()
        return {name: value.requires_grad_() for name, value in found.items()}

    def measured(self, wanted: Iterable[str], clock: Clock, rounds: int) -> dict[str, Any]:
        """Times by phase, peak memory in MiB, errors, and why a contender is absent."""
        import torch
        import torch._functorch.config as functorch

        found: dict[str, Any] = {"absent": {}}
        with functorch.patch(donated_buffer=False):  # gradients are taken more than once
            ways = self._ways(wanted, found["absent"])
            found |= {"errors": self._errors(ways), "peak_mib": {}}
            for phase in PHASES:
                calls = {name: self._call(*way, phase) for name, way in ways.items()}
                if self.device == "cuda" and phase == "both":
                    found["peak_mib"] = {n: _peak(c) for n, c in calls.items() if n != "gemm"}
                samples = clock.interleave({n: _numbered(c) for n, c in calls.items()}, rounds)
                kept = {"median_us", "interval_us"}
                found[phase] = {
                    "times": {n: s.timing().model_dump(include=kept) for n, s in samples.items()},
                    "over": {
                        n: speedup(samples["ours"], s).model_dump() for n, s in samples.items()
                    },
                }
                del calls
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return found

    def _ways(self, wanted: Iterable[str], absent: dict[str, str]) -> dict[str, tuple[Way, Values]]:
        import torch

        plain, ours = (
            (self._eager_head, self._our_head)
            if self.widths.words
            else (self._eager_block, self._our_block)
        )
        own = self.values if self.widths.words else self._packed()
        made: dict[str, Callable[[], tuple[Way, Values]]] = {
            "ours": lambda: (ours, own),
            "gemm": lambda: (self._products, self.values),
            "eager": lambda: (plain, self.values),
            "compile": lambda: (torch.compile(plain, dynamic=False), self.values),
            "liger": lambda: (self._liger(), self.values),
            "liger_compile": lambda: (torch.compile(self._liger(), dynamic=False), self.values),
        }
        found = dict[str, tuple[Way, Values]]()
        for name in made:
            if name not in wanted:
                continue
            if "compile" in name and self.device != "cuda":
                absent[name] = "needs a GPU"
                continue
            try:
                torch.compiler.reset()
                way = made[name]()
                if name != "gemm":
                    self._call(*way, "both")()
                found[name] = way
            except Exception as fault:  # foreign code: anything may come out of it
                if name in ("ours", "gemm", "eager"):
                    raise
                said = (str(fault).strip().splitlines() or [""])[0]
                absent[name] = f"{type(fault).__name__}: {said}"[:200]
        return found

    def _call(self, way: Way, values: Values, phase: str) -> Callable[[], Any]:
        import torch

        if way == self._products:
            return lambda: self._multiplied(phase)
        inputs = [*values.values()]
        if phase == "forward":
            return lambda: way(values)
        outs = way(values)
        grads = [torch.ones_like(out) for out in outs]
        if phase == "backward":
            return lambda: torch.autograd.grad(outs, inputs, grads, retain_graph=True)
        return lambda: torch.autograd.grad(way(values), inputs, grads)

    def _errors(self, ways: Mapping[str, tuple[Way, Values]]) -> dict[str, float]:
        """By contender, the largest error of an output or gradient over that of PyTorch's bf16."""
        import torch

        with torch.no_grad():
            wide = {n: v.detach().float().requires_grad_() for n, v in self.values.items()}
        truth = self._results(ways["eager"][0], wide)
        plain = self._results(*ways["eager"])
        base = {n: _distance(plain[n], t) for n, t in truth.items()}
        found = dict[str, float]()
        for name in ways.keys() & {"ours", "liger"}:
            got = self._results(*ways[name])
            if name == "ours" and not self.widths.words:
                got = self._unpacked(got)
            found[name] = round(max(_distance(got[n], t) / base[n] for n, t in truth.items()), 3)
        return found

    def _results(self, way: Way, values: Values) -> Values:
        import torch

        outs = way(values)
        made = torch.Generator(self.device).manual_seed(1)
        draws = (torch.randn(o.shape, device=self.device, generator=made) for o in outs)
        grads = [g.to(o.dtype) for g, o in zip(draws, outs, strict=True)]
        if way == self._our_block:  # query and key have pairs in turn where the others have halves
            grads[:2] = [self._in_turn(g) for g in grads[:2]]
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

    def _packed(self) -> Values:
        import torch

        from coda_agent.layers.packing import interleave, pack_qkv, rotary_table

        w, t = self.widths, self.values
        counts = w.d // self.dh, w.kv // self.dh
        with torch.no_grad():
            found = {n: t[n].detach().clone() for n in ("a", "x", "wo", "gamma", "down", "gamma2")}
            found["gate_up"] = interleave(t["gate"], t["up"])
            found["qkv"] = pack_qkv(t["q"], t["k"], t["v"], counts)
            if w.bias:
                q, k, v = (t[f"{n}_bias"][:, None] for n in "qkv")
                found["qkv_bias"] = pack_qkv(q, k, v, counts)[:, 0].contiguous()
            self.table = rotary_table(*self.places, sum(counts), len(found["qkv"]))
        return {name: value.requires_grad_() for name, value in found.items()}

    def _our_block(self, p: Values) -> tuple[Tensor, ...]:
        from coda_agent.layers import linear_residual_norm, mlp, norm_linear

        w = self.widths
        x, given = linear_residual_norm(p["a"], p["wo"], p["x"], p["gamma"], EPS)
        both = p["gate_up"], p["down"]
        x, given = mlp(x, given, p["gamma"], *both, p["gamma2"], EPS)
        sizes, bias = (w.d, w.kv, w.kv), p.get("qkv_bias")
        return norm_linear(x, given, p["gamma2"], p["qkv"], sizes, self.table, bias)

    def _our_head(self, t: Values) -> tuple[Tensor, ...]:
        from coda_agent.layers import head_loss, normed

        x, gamma = t["x"], t["gamma"]
        return (head_loss(x, normed(x, gamma, EPS), gamma, t["weight"], self.targets),)

    def _unpacked(self, got: Values) -> Values:
        from coda_agent.layers.packing import separate, unpack_qkv

        w = self.widths
        sizes, counts = (w.d, w.kv, w.kv), (w.d // self.dh, w.kv // self.dh)
        gate, up = separate(got["gate_up"])
        parts = unpack_qkv(got["qkv"], sizes, counts)
        found = got | {"gate": gate, "up": up} | dict(zip("qkv", parts, strict=True))
        for i in (0, 1):
            pairs = got[f"out {i}"].unflatten(-1, (-1, self.dh // 2, 2))
            found[f"out {i}"] = pairs.transpose(-1, -2).flatten(1)
        if w.bias:
            rows = unpack_qkv(got["qkv_bias"][:, None], sizes, counts)
            found |= {f"{n}_bias": row[:, 0] for n, row in zip("qkv", rows, strict=True)}
        return found

    def _in_turn(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, 2, self.dh // 2)).transpose(-1, -2).flatten(1)

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


def _numbered(call: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda _: call()


def _distance(got: Tensor, truth: Tensor) -> float:
    found = float((got.float() - truth).norm() / truth.norm())
    return found if math.isfinite(found) else math.inf


def _peak(call: Callable[[], Any]) -> int:
    """MiB that a call takes beyond what was there before it."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def write_page(root: Path) -> list[Path]:
    """Write docs/layers.md of a workspace from the latest record; the record and the page.

    Raises:
        CodaError: no record.
    """
    if not (found := pages.latest(root, "layers")):
        raise CodaError("there is no record of layers", hint="`coda-agent bench --suite layers`")
    record, file = found
    cells = {case: cell for case in CASES if (cell := record["cells"].get(case))}
    others = [n for n in CONTENDERS if n != "ours"]
    rows = [("", "", "ours, µs", *(f"over {CONTENDERS[n]}" for n in others))]
    for case, cell in cells.items():
        for phase in PHASES:
            over = cell[phase]["over"]
            shown = [pages.filled(pages.interval("it"), {"it": over[n]}) if n in over else ""
                     for n in others]  # fmt: skip
            rows.append((case, phase, f"{cell[phase]['times']['ours']['median_us']:.0f}", *shown))
    memory = [("", *(CONTENDERS[n] for n in CONTENDERS if n != "gemm"), "error")]
    for case, cell in cells.items():
        peaks = (str(cell["peak_mib"].get(n, "")) for n in CONTENDERS if n != "gemm")
        memory.append((case, *peaks, str(cell["errors"]["ours"])))
    page = pages.write(
        root / "docs" / "layers.md", "layers.md", record=file.relative_to(root).as_posix(),
        date=record["date"], rows=rows, memory=memory, cells=cells,
        left=[case for case in CASES if case not in cells],
        absent=[f"{case}: {CONTENDERS[n]}: {why}" for case, cell in cells.items()
                for n, why in cell["absent"].items()],
        machines=dict.fromkeys(pages.machine(cell["machine"]) for cell in cells.values()),
    )  # fmt: skip
    return [file, page]
