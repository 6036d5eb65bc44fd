"""The suites of accepted kernels: the paper's, models', a workspace's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.shapes import PLACES, place_sizes
from coda_agent.agent.tables import shape_text
from coda_agent.agent.workspace import Workspace, kernel_names, resolve_kernel
from coda_agent.evals.cases import Absent, Call, Case, Contender, Outputs, Setup, Suite
from coda_agent.evals.libraries import CONTENDERS, NOTHING
from coda_agent.evals.workloads import Workload, make_workload
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.runtime.kernel import Kernel
from coda_agent.runtime.loading import load_kernel
from coda_agent.specs import load_spec

SIZES = (2048, 4096, 8192)
PAPER: Mapping[str, Mapping[str, int]] = {
    "gemm_rope": {"N": 3}, "gemm_swiglu": {}, "gemm_partial_cross_entropy": {"N": 32768},
    "gemm_residual_partial_rmsnorm": {}, "gemm_rmsnorm": {}, "gemm_rmsnorm_swiglu": {},
    "gemm_rmsnorm_rope": {"N": 3}, "gemm_rmsnorm_partial_cross_entropy": {"N": 32768},
    "gemm_residual_partial_rmsnorm_bwd": {}, "gemm_partial_swiglu_bwd": {},
}  # fmt: skip
"""The ten kernels of the paper. Their dims are S, but for these: so many S, or columns."""
ROWS = (16, 128, 512, 2048, 8192, 1, 32, 64, 256, 1024, 4096, 16384)
MODELS: Mapping[str, Mapping[str, int]] = {
    "llama-3-8b": {"hidden": 4096, "q": 4096, "kv": 1024, "head": 128, "mlp": 14336,
                   "vocabulary": 128256},
    # One GPU's part at tensor-parallel 8, without the all-reduce in front of the residual.
    "llama-3-70b-tp8": {"hidden": 8192, "q": 1024, "kv": 128, "head": 128, "mlp": 3584,
                        "vocabulary": 16032},
    "qwen2.5-7b": {"hidden": 3584, "q": 3584, "kv": 512, "head": 128, "mlp": 18944,
                   "vocabulary": 152064},
    "tinyllama-1.1b": {"hidden": 2048, "q": 2048, "kv": 256, "head": 64, "mlp": 5632,
                       "vocabulary": 32000},
}  # fmt: skip
"""Widths; `q` and `kv` are columns of the queries and of the keys, or values."""
RAW, _BLOCK, _DTYPE = "ours, raw partials", 128, "bfloat16"
Place = tuple[Mapping[str, int], Mapping[str, int]]
"""The extents of a kernel, and the widths of its model, if there is one."""

_PAPER = """The ten kernels of the CODA paper, bfloat16, M = N = K = S, but N = 3 S of rotations and
N = 32768 of cross-entropies. Ours runs in the tile that a call dispatches, and final values count;
raw partials are of blocks of 128 columns. quack runs in the best of seven tiles. Liger and
FlashInfer have their kernels around `torch.mm`, and normalise A themselves for `gemm_rmsnorm…`.
Errors are against float64."""
_SHAPES = """Seventeen kernels at the products of layers of four models, at 1 to 16,384 rows. Ours
runs in the tile that a call dispatches. A loop is of eager calls, by the host's clock. A cell that
has no steady figure is one in which the device waited for the host."""


def paper(root: Path) -> Suite:
    """List the ten kernels of the paper at three sizes."""

    def place(kernel: str, size: int, shrink: int) -> Place:
        more = {d: v * size if v < 16 else v for d, v in PAPER[kernel].items()}
        return _shrunk({**dict.fromkeys("MNK", size), **more}, shrink, 128), {}

    cases = [
        _case(root, f"{kernel} {size}", ("ours", RAW, *CONTENDERS), kernel,
              partial(place, kernel, size))
        for kernel, size in product(PAPER, SIZES)
    ]  # fmt: skip
    return Suite("paper", _PAPER, cases, ("idle", "warm", "steady"), 50, _size)


def shapes(root: Path) -> Suite:
    """List kernels at the products of four models, by rows."""

    def place(name: str, model: str, rows: int, shrink: int) -> Place:
        widths = MODELS[model]
        small = {**_shrunk(widths, shrink, widths["head"]), "head": widths["head"]}
        return place_sizes(name, small, max(1, rows // shrink)), small

    contenders = ("ours", "gemm", "compile", "liger", "flashinfer")
    cases = [
        _case(root, f"{model} {kernel} {name} {rows}", contenders, kernel,
              partial(place, name, model, rows))
        for model, rows, kernel in product(MODELS, ROWS, PLACES) for name in PLACES[kernel]
    ]  # fmt: skip
    # From 30 rounds on, the clock traces every contender as well.
    return Suite("shapes", _SHAPES, cases, ("warm", "steady", "loop"), 29, _model_and_rows)


def own(root: Path) -> Suite:
    """List accepted kernels, the workspace's first, at their bench shapes."""

    def place(shape: Mapping[str, int], shrink: int) -> Place:
        return _shrunk(shape, shrink, 128), {}

    cases = [
        _case(root, f"{spec.name} {shape_text(shape)}", ("ours", "gemm", "compile"), spec.name,
              partial(place, shape))
        for _, kernel in sorted(kernel_names(Workspace(root, root)).items())
        for spec in (load_spec(kernel.spec),)
        for shape in spec.bench_shapes
    ]  # fmt: skip
    return Suite("kernels", "Accepted kernels at the bench shapes of their specs.", cases)


def _size(case: str) -> str:
    return f"S = {case.split()[1]}"


def _model_and_rows(case: str) -> str:
    model, *_, rows = case.split()
    limits = {128: "1 to 128", 1024: "256 to 1024", 16384: "2048 to 16384"}
    return f"{model}, {next(t for n, t in limits.items() if int(rows) <= n)} rows"


def _shrunk(sizes: Mapping[str, int], by: int, unit: int) -> dict[str, int]:
    """Divide extents, in multiples of a unit."""
    return {d: -(-x // by // unit) * unit if by > 1 else x for d, x in sizes.items()}


def _case(
    root: Path, name: str, contenders: Sequence[str], kernel: str, place: Callable[[int], Place]
) -> Case:
    """Make a kernel's case; `place` takes what divides its sizes."""

    def make(device: str, shrink: int) -> Setup:
        sizes, widths = place(shrink)
        workload = make_workload(load(root, kernel), sizes, _DTYPE, device, widths)
        makers = {name: partial(_contender, workload, name) for name in contenders}
        return Setup(makers, workload.truth, workload.limit, workload.rows)

    def job() -> CompileJob:
        found = load(root, kernel)
        spec, (m, n, k) = found.spec, (place(1)[0][dim] for dim in found.spec.gemm_dims)
        dtype = spec.dtype_of(spec.gemm[0], dict.fromkeys(spec.types, _DTYPE))
        tile = found.tiles.choose(m, n, k, dtype) or DEFAULT_CONFIGS["sm_90a"]
        return CompileJob.of(found.programs[spec.variant()], tile, "sm_90a", spec, _DTYPE)

    return Case(name, contenders, make, job=job)


@cache
def load(root: Path, name: str) -> Kernel:
    """Load a kernel of a workspace, else the package's."""
    return load_kernel(resolve_kernel(name, Workspace(root, root)).folder)


def _contender(workload: Workload, name: str) -> Contender:
    """Build a contender that notes its tile and what it lacks."""
    call, given = (_OWN.get(name) or CONTENDERS[name])(workload), list[str]()
    tile = workload.kernel.tiles.choose(*workload.mnk, workload.dtype) if name == "ours" else None

    def outputs() -> Outputs:
        found = call(0)
        given[:] = found
        return found

    def note() -> str:
        return "; ".join(filter(None, (tile and tile.label, _less(workload, given))))

    return Contender(call, outputs, note)


def _less(workload: Workload, given: Sequence[str]) -> str:
    """Say which outputs a contender lacks, and what it gives instead."""
    names = workload.kernel.spec.outputs
    other, missing = [o for o in given if o not in names], [o for o in names if o not in given]
    if not missing or "product" in other:
        return ""
    instead = f"{', '.join(other)} for " if other else "without "
    return instead + ", ".join(missing)


def _ours(workload: Workload, block: int | None = None) -> Call:
    """Call the public function; what it overwrites is a copy."""
    kernel, spec = workload.kernel, workload.kernel.spec
    changed = {*spec.updated(spec.bindings()[0]).values()}
    sets = [
        [x[name].clone() if name in changed else x[name] for name in spec.inputs]
        for x in workload.inputs
    ]

    def run(i: int) -> Outputs:
        found: Any = kernel(*sets[i % 2], block_size=block)
        return dict(zip(spec.outputs, found if isinstance(found, tuple) else (found,), strict=True))

    return run


def _raw(workload: Workload) -> Call:
    """Leave reductions as partials, which are not checked."""
    reduced = workload.kernel.programs[workload.kernel.spec.variant()].reductions
    if not reduced:
        raise Absent(NOTHING)
    run = _ours(workload, _BLOCK)
    return lambda i: {o: x for o, x in run(i).items() if o not in reduced}


_OWN: Mapping[str, Callable[[Workload], Call]] = {"ours": _ours, RAW: _raw}
