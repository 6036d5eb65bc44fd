"""What a kernel is timed against, each built for one kernel at one size.

- A contender is called with the round number, rotates over the case's two sets of inputs, and
  returns its outputs under the spec's names, some as functions that yield them. What it leaves out,
  it does not compute. Three names are not the spec's: `product` = A Bᵀ, `loss` = lse - z_tgt, and
  `normed`, a finished RMSNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    import torch

    from coda_agent.generated.kernel import Kernel

Outputs = dict[str, Any]
Run = Callable[[int], Outputs]
Call = Callable[[], Outputs]

HEAD, EPS = 128, 1e-6


class Absent(CodaError):
    """Why a contender takes no part."""

    def __init__(self, message: str = "has nothing for this kernel") -> None:
        super().__init__(message)


@dataclass(frozen=True)
class Case:
    """One kernel at one size: its two sets of inputs and the float64 truth of the first."""

    kernel: Kernel
    sizes: Mapping[str, int]
    inputs: tuple[dict[str, Any], dict[str, Any]]
    truth: Outputs

    @property
    def name(self) -> str:
        return self.kernel.spec.name

    @property
    def norms_first(self) -> bool:
        """Whether what the kernel replaces begins by normalising A."""
        return self.name.startswith("gemm_rmsnorm")

    def operands(self, x: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """A (M, K) and B (N, K) of a set."""
        a, b = self.kernel.spec.gemm
        return x[a], x[b]

    @property
    def mnk(self) -> tuple[int, int, int]:
        a, b = self.operands(self.inputs[0])
        return a.shape[0], b.shape[0], a.shape[1]

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer, in A's element type unless told otherwise."""
        a, _ = self.operands(self.inputs[0])
        return a.new_empty(shape, dtype=dtype)

    def product(self) -> torch.Tensor:
        """A buffer for A Bᵀ, (M, N)."""
        return self.new(*self.mnk[:2])

    def rotating(self, build: Callable[[dict[str, Any], torch.Tensor, torch.Tensor], Call]) -> Run:
        """A contender of a call for each set, built from the inputs, A and B."""
        calls = [build(x, *self.operands(x)) for x in self.inputs]
        return lambda i: calls[i % 2]()


def make_case(kernel: Kernel, sizes: Mapping[str, int], dtype: str, device: str) -> Case:
    """Draw both sets as the spec says, then make them what a Transformer would pass: a forward `r`
    is the row scale of A, a backward `z` the row mean of its gradient times its norm's output, and
    `cs` one table for all heads, with the identity for the last third, V."""
    import torch

    from coda_agent.specs import draw_inputs, run_reference

    spec = kernel.spec
    types = dict.fromkeys(spec.types, dtype)
    sets: list[dict[str, Any]] = []
    for seed in (0, 1):
        x: dict[str, Any] = draw_inputs(spec, sizes, types, seed=seed, device=device)
        a, b = (x[g] for g in spec.gemm)
        if spec.name.startswith("gemm_rmsnorm"):
            x["r"] = torch.rsqrt(a.float().square().mean(-1) + EPS)
        if {"C", "r", "gamma", "z"} <= x.keys():
            gradient = (a @ b.t()).float() * x["gamma"].float()
            x["z"] = (gradient * x["C"].float()).mean(-1) * x["r"]
        if "cs" in x:
            heads = x["cs"].view(a.shape[0], -1, HEAD)
            rotated = heads.shape[1] // 3 * 2
            heads[:, :rotated] = heads[:, :1].clone()
            heads[:, rotated:] = torch.tensor([1, 0] * (HEAD // 2), device=device)
        sets.append(x)
    truth = dict(run_reference(spec, sets[0], exact=True))
    truth["product"] = sets[0][spec.gemm[0]].double() @ sets[0][spec.gemm[1]].double().t()
    if {"lse", "z_tgt"} <= truth.keys():
        truth["loss"] = truth["lse"] - truth["z_tgt"]
    if {"D", "O", "s"} <= truth.keys():
        truth["normed"] = truth["O"] * torch.rsqrt(truth["s"] + EPS)[:, None]
    return Case(kernel, dict(sizes), (sets[0], sets[1]), truth)


def error(case: Case, outputs: Outputs) -> float:
    """The largest ‖out - truth‖ / ‖truth‖ of the outputs; infinite where one is not finite."""
    errors = [0.0]
    for name, out in outputs.items():
        truth = case.truth[name]
        got: Any = out() if callable(out) else out
        off = float((got.reshape(truth.shape).double() - truth).norm() / truth.norm())
        errors.append(off if off == off else float("inf"))
    return max(errors)


def ours(case: Case, config: TileConfig, *, raw: bool = False) -> Run:
    """The accepted kernel in one launch and the finalisers of its reductions; those of a `raw` one
    run only when its outputs are looked at."""
    import torch

    from coda_agent.primitives.function import finalised
    from coda_agent.primitives.interpret import interpret
    from coda_agent.primitives.launch import allocate, launch

    spec, (m, n, _) = case.kernel.spec, case.mnk
    program = case.kernel.programs[spec.variant()]
    a, _ = case.operands(case.inputs[0])
    types = dict.fromkeys(spec.types, str(a.dtype).removeprefix("torch."))
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    buffers = allocate(program, m, n, dtypes, config, a.device)
    place = spec.in_place if program.accumulated else None
    if place:  # Once: rounds then add to one another, which changes values and not the work.
        buffers[place.output].copy_(case.inputs[0][place.input])

    def outputs() -> Outputs:
        return finalised(program, buffers, m, n, config)

    def build(x: dict[str, Any], a: torch.Tensor, b: torch.Tensor) -> Call:
        start = {place.output: x[place.input]} if place else {}

        def run() -> Outputs:
            if not a.is_cuda:
                block, rows = config.tile_n, config.tile_m
                given = {**x, **start}
                return interpret(program, a, b, given, dtypes=dtypes, block=block, row_block=rows)
            launch(program, a, b, x, buffers, config)
            return {o: lambda o=o: outputs()[o] for o in buffers} if raw else outputs()

        return run

    return case.rotating(build)


def gemm(case: Case) -> Run:
    """The bare cuBLAS product."""
    import torch

    out = case.product()
    return case.rotating(lambda x, a, b: lambda: {"product": torch.mm(a, b.t(), out=out)})


def compiled(case: Case, mode: str) -> Run:
    """The spec's reference, or what it says a user would run, under torch.compile."""
    import torch

    from coda_agent.specs import reference_callable

    reference = reference_callable(case.kernel.spec, baseline=True)
    function = torch.compile(reference, dynamic=False, mode=mode)
    return case.rotating(lambda x, a, b: lambda: function(**x))


def quack_gemm(case: Case, config: TileConfig) -> Run:
    """quack's own product, without an epilogue program."""
    from quack.gemm import gemm

    out, options = case.product(), tile_options(config)

    def run(a: torch.Tensor, b: torch.Tensor) -> Outputs:
        gemm(a, b, out, None, None, **options)
        return {"product": out}

    return case.rotating(lambda x, a, b: lambda: run(a, b))


def tile_options(config: TileConfig) -> dict[str, Any]:
    """The configuration as quack's keyword arguments."""
    return {
        "tile_M": config.tile_m, "tile_N": config.tile_n, "cluster_M": config.cluster_m,
        "cluster_N": config.cluster_n, "pingpong": config.pingpong,
        "max_swizzle_size": config.swizzle,
    }  # fmt: skip
