"""Contenders of the kernel suites from elsewhere: cuBLAS, torch.compile, quack, Liger, FlashInfer.

- A contender is built for a workload, and says why it takes no part by what it raises.
- quack: its bare product, and its own epilogue library in one launch, in the fastest right tile.
- Liger and FlashInfer: a cuBLAS product and their kernels around it, weights laid out beforehand as
  they like them. Norms before the product take the place of `r`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coda_agent.agent.judge import timing
from coda_agent.agent.judge.baselines import bare_gemm
from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.tuner import SEARCH_ROUNDS, ranked
from coda_agent.evals.cases import Absent, Call, Outputs, Setup
from coda_agent.evals.workloads import EPS, Function, Workload
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import reference_callable

TILES = tuple(
    TileConfig(*tile)
    for tile in (
        (128, 128, 1, 1, True), (128, 128, 1, 2, True), (128, 128, 2, 1, True),
        (128, 160, 2, 1, True), (128, 192, 2, 1, True), (128, 256, 2, 1, False),
        (256, 128, 1, 2, False),
    )
)  # fmt: skip
"""Those over which quack's contenders are searched."""
NOTHING = "has nothing for this kernel"


def gemm(workload: Workload) -> Call:
    """Multiply by cuBLAS, without an epilogue."""
    product = bare_gemm(*workload.operands(workload.inputs[0]))
    return workload.rotating(lambda x, a, b: lambda: {"product": product(a, b)})


def compiled(mode: str) -> Callable[[Workload], Call]:
    """Make the contender of the spec's reference under torch.compile."""

    def build(workload: Workload) -> Call:
        reference = reference_callable(workload.kernel.spec, baseline=True)
        function = torch.compile(reference, dynamic=False, mode=mode)
        return workload.rotating(lambda x, a, b: lambda: function(**x))

    return build


def quack_gemm(workload: Workload) -> Call:
    """Multiply by quack, without an epilogue."""
    from quack.gemm import gemm

    out = workload.product()

    def build(config: TileConfig) -> Call:
        options = _tile_options(config)

        def run(a: torch.Tensor, b: torch.Tensor) -> Outputs:
            gemm(a, b, out, None, None, **options)
            return {"product": out}

        return workload.rotating(lambda x, a, b: lambda: run(a, b))

    return _fastest(workload, build)


def quack(workload: Workload) -> Call:
    """Run quack's own epilogue library."""
    from quack.rmsnorm import rmsnorm

    def build(config: TileConfig) -> Call:
        def bound(x: Inputs, a: torch.Tensor, b: torch.Tensor) -> Function:
            mod, d, c, values, finish = _quack_call(workload, x, config)

            def run() -> Outputs:
                # No ready epilogue scales and rotates by a table.
                left = rmsnorm(a, eps=EPS) if workload.name == "gemm_rmsnorm_rope" else a
                mod.gemm(left, b, d, c, epi_args=values, **_tile_options(config))
                return finish()

            return run

        return workload.rotating(bound)

    return _fastest(workload, build)


def _fastest(workload: Workload, build: Callable[[TileConfig], Call]) -> Call:
    """Choose the fastest of the tiles that compute the right result."""
    setup, runs = Setup({}, workload.truth, workload.limit, workload.rows), dict[TileConfig, Call]()
    for tile in TILES:
        try:
            run = build(tile)
            if max(setup.errors(run(0)).values()) <= setup.limit:
                runs[tile] = run
        except Absent:
            raise
        except Exception:  # foreign code, and not every tile carries every epilogue
            continue
    if not runs:
        raise Absent("no tile computes the right result")
    best, _ = ranked(runs, SEARCH_ROUNDS, timing.interleave)[0]
    return build(best)  # anew, as what is accumulated in place


def liger(workload: Workload) -> Call:
    """Compose Liger's kernels around a product."""
    return compose(workload, _liger_kernels())


def flashinfer(workload: Workload) -> Call:
    """Compose FlashInfer's kernels around a product: no cross-entropy and nothing backward."""
    return compose(workload, _flashinfer_kernels())


CONTENDERS: Mapping[str, Callable[[Workload], Call]] = {
    "gemm": gemm,
    "quack GEMM": quack_gemm,
    "quack": quack,
    "compile": compiled("default"),
    # With CUDA graphs (plain max-autotune) every call would copy its inputs first.
    "compile, max-autotune": compiled("max-autotune-no-cudagraphs"),
    "liger": liger,
    "flashinfer": flashinfer,
}


@dataclass(frozen=True)
class Library:
    """Kernels of a library to compose with; None where it has none.

    Attributes:
        norm: (x (M, K), weight (K,)) to x normalised.
        silu_mul: [gate | up] (M, N) to (M, N/2).
        add_norm: (x, residual (M, N), weight) to their sum and its norm.
        table: (cos, sin (M, width / 2)) to what `rope` wants of them; not timed.
        rope: (q, k (M, heads, width), that table), in place.
        halves: Whether `rope` pairs column j with j + width / 2 of contiguous q and k; else 2j
            with 2j + 1 of strided ones.
        cross_entropy: (logits (M, N), targets (M,)) to the loss (M,).
        silu_mul_backward: ([gate | up] (M, 2N), gradient (M, N)) to the gradient (M, 2N).
        norm_backward: (gradient, x (M, N), weight, rstd (M,)) to those of x and of the weight.
    """

    norm: Function
    silu_mul: Function
    add_norm: Function
    table: Function
    rope: Function
    halves: bool
    cross_entropy: Function | None = None
    silu_mul_backward: Function | None = None
    norm_backward: Function | None = None


def _liger_kernels() -> Library:
    ops, rms_norm, swiglu, utils = (
        importlib.import_module(f"liger_kernel.ops{name}")
        for name in ("", ".rms_norm", ".swiglu", ".utils")
    )

    def rope(q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> None:
        q, k = (x[None].transpose(1, 2) for x in (q, k))  # (1, heads, M, width), as models have
        ops.LigerRopeFunction.apply(q, k, *table, None, 1, q.shape[-1])

    def norm_backward(g: Tensor, x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        llama = 0  # its casting mode: statistics in float32
        args = (0.0, llama, *utils.calculate_settings(x.shape[-1]), True, None)
        return rms_norm.rms_norm_backward(g, x, w, r, *args)

    entropy = ops.LigerCrossEntropyFunction
    return Library(
        norm=lambda x, w: ops.LigerRMSNormFunction.apply(x, w, EPS),
        silu_mul=lambda d: swiglu.swiglu_fused_gate_up_forward(d)[1],
        add_norm=lambda x, c, w: ops.LigerFusedAddRMSNormFunction.apply(x, c, w, EPS)[::-1],
        table=lambda cos, sin: (cos, sin),
        rope=rope,
        halves=True,
        cross_entropy=lambda z, y: entropy.apply(z, y, None, -100, 0.0, 0.0, "none")[0],
        silu_mul_backward=swiglu.swiglu_fused_gate_up_backward,
        norm_backward=norm_backward,
    )


def _flashinfer_kernels() -> Library:
    fi = importlib.import_module("flashinfer")

    def rope(q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> None:
        rotate = fi.apply_rope_with_cos_sin_cache_inplace
        rotate(table[0], q.flatten(1), k.flatten(1), q.shape[-1], table[1], is_neox=False)

    def add_norm(x: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        fi.fused_add_rmsnorm(x, c, w, EPS)
        return c, x

    def table(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(len(cos), device=cos.device), torch.cat((cos, sin), -1).float()

    norm = lambda x, w: fi.rmsnorm(x, w, EPS)
    return Library(norm, fi.silu_and_mul, add_norm, table, rope, halves=False)


def compose(workload: Workload, library: Library) -> Call:
    """Put a cuBLAS product between a library's kernels.

    Raises:
        Absent: it has nothing for this kernel.
    """
    out, ones = workload.product(), torch.ones_like(workload.operands(workload.inputs[0])[0][0])

    def build(x: Inputs, a: torch.Tensor, b: torch.Tensor) -> Function:
        norms_first = workload.name.startswith("gemm_rmsnorm")
        left = (lambda: library.norm(a, ones)) if norms_first else lambda: a
        if workload.name in ("gemm_rope", "gemm_rmsnorm_rope"):
            return _rope(workload, library, left, x["cs"], b, out)
        weight, finish = _finish(workload, library, x, b)
        return lambda: finish(torch.mm(left(), weight.t(), out=out))

    return workload.rotating(build)


def _finish(workload: Workload, library: Library, x: Inputs, b: Tensor) -> tuple[Tensor, Function]:
    """Lay out the weight; make what makes outputs of the product."""
    m, n, _ = workload.mnk
    match workload.name.removeprefix("gemm_rmsnorm_").removeprefix("gemm_"):
        case "swiglu":
            both = lambda d: {"D": d.view(m, 2, n // 2).mT, "O": library.silu_mul(d)}
            return torch.cat((b[0::2], b[1::2])), both
        case "rmsnorm":
            return b, lambda d: {"O": d}
        case "residual_partial_rmsnorm":
            c, names = x["C"].clone(), ("D", "normed")  # FlashInfer adds into it
            add_norm = lambda d: library.add_norm(d, c, x["gamma"])
            return b, lambda d: dict(zip(names, add_norm(d), strict=True))
        case "partial_cross_entropy" if loss := library.cross_entropy:
            return b, lambda d: {"Z": d, "loss": loss(d, x["y"])}
        case "partial_swiglu_bwd" if backward := library.silu_mul_backward:
            z = torch.cat((x["Z"][:, 0::2], x["Z"][:, 1::2]), -1)
            return b, lambda d: {"dZ": backward(z, d).view(m, 2, n).mT}
        case "residual_partial_rmsnorm_bwd" if backward := library.norm_backward:

            def added(d: Tensor) -> Outputs:
                dx, dgamma = backward(d, x["C"], x["gamma"], x["r"])
                return {"O": dx + x["X"], "dgamma": dgamma}

            return b, added
    raise Absent(NOTHING)


def _rope(
    workload: Workload, library: Library, left: Function, cs: Tensor, b: Tensor, out: Tensor
) -> Function:
    """Rotate q and k in place, so that O overwrites D.

    A library that wants q and k contiguous gets each from a product of its own.
    """
    (m, _, k), width, columns = workload.mnk, workload.head, workload.columns
    # What the kernel calls sin turns the other way.
    table = library.table(cs[:, 0:width:2].contiguous(), -cs[:, 1:width:2])
    if library.halves:
        b = b.view(-1, width // 2, 2, k).transpose(1, 2).reshape(-1, k)
    weights, parts = b.split(columns), out.split(columns, 1)
    if library.halves:
        parts = [workload.new(m, n) for n in columns]

    def interleaved() -> torch.Tensor:
        return torch.cat([p.view(m, -1, 2, width // 2).mT.reshape(m, -1) for p in parts], 1)

    def run() -> Outputs:
        a = left()
        if library.halves:
            for part, rows in zip(parts, weights, strict=True):
                torch.mm(a, rows.t(), out=part)
        else:
            torch.mm(a, b.t(), out=out)
        library.rope(*(part.view(m, -1, width) for part in parts[:2]), table)
        return {"O": interleaved if library.halves else out}

    return run


def _quack_call(workload: Workload, x: Inputs, config: TileConfig) -> Any:
    """Make the epilogue, D, C, arguments, and what returns outputs."""
    from quack.epilogue import library

    (m, n, _), d = workload.mnk, workload.product()
    partials = workload.new(m, -(-n // config.tile_n), dtype=torch.float32)
    options = {"has_c": False, "has_rowvec": False}
    match workload.name:
        case "gemm_rope" | "gemm_rmsnorm_rope":
            turned = x["cs"] * torch.tensor([1, -1], device=d.device, dtype=d.dtype).repeat(n // 2)
            return library.rope_epi, d, None, {"table": turned}, lambda: {"O": d}
        case "gemm_swiglu" | "gemm_rmsnorm_swiglu":
            o, scale = workload.new(m, n // 2), "r" in x
            make = library.norm_act_mod if scale else library.linear_act_mod
            mod = make("swiglu", gated=True, has_colvec=scale, **options)
            values = {"mAuxOut": o} | ({"mColVecBroadcast": x["r"][None]} if scale else {})
            return mod, d, None, values, lambda: {"D": d, "O": o}
        case "gemm_rmsnorm":
            mod = library.norm_act_mod(None, gated=False, has_colvec=True, **options)
            values = {"mAuxOut": d, "mColVecBroadcast": x["r"][None]}
            return mod, None, None, values, lambda: {"O": d}
        case "gemm_residual_partial_rmsnorm":
            o = workload.new(m, n)
            values = {"weight": x["gamma"][None], "resid_out": d, "sqsum": partials}
            finish = lambda: {"D": d, "O": o, "s": partials.sum(-1) / n}
            return library.rms_partial_epi, o, x["C"], values, finish
        case "gemm_partial_cross_entropy":
            z = workload.new(m, dtype=torch.float32)
            values = {"lse": partials, "target_logit": z, "target": x["y"][None]}
            finish = lambda: {"Z": d, "z_tgt": z, "lse": partials.logsumexp(-1)}
            return library.lse_target_epi, d, None, values, finish
        case "gemm_rmsnorm_partial_cross_entropy":
            values = {"rstd": x["r"][None], "lse": partials}
            y = x["y"][:, None]
            finish = lambda: {"Z": d, "z_tgt": d.gather(1, y)[:, 0], "lse": partials.logsumexp(-1)}
            return library.rstd_lse_epi, d, None, values, finish
        case "gemm_partial_swiglu_bwd":
            dz = workload.new(m, 2 * n)
            values = {"postact": d, "dsum": partials}
            finish = lambda: {"dZ": dz, "O": d, "z": partials.sum(-1) / n}
            return library.dswiglu_dpreact_mod, dz, x["Z"], values, finish
    raise Absent(NOTHING)


def _tile_options(config: TileConfig) -> dict[str, Any]:
    """Write the configuration as quack's keyword arguments."""
    return {
        "tile_M": config.tile_m, "tile_N": config.tile_n, "cluster_M": config.cluster_m,
        "cluster_N": config.cluster_n, "pingpong": config.pingpong,
        "max_swizzle_size": config.swizzle,
    }  # fmt: skip
