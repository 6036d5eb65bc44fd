"""Do a program's own instructions compute what it says they mean?

They run on the CPU over all of float32, not only what the spec draws: every exponent in both signs,
small integers and their halves, the ends of the range, infinities, NaN.

- A result may be off by 2⁻⁹ of its size. One approximation of a GPU errs by at most 2⁻¹¹ (tanh),
  but for lg2 near 1 and sin and cos near their roots. Here they are the nearest float32, so what a
  GPU's own errors grow to in later instructions is seen there alone.
- A subnormal number may count as 0, as it does with `.ftz`.
- Where torch's function is infinite, NaN, or beyond float32, the result may be any of infinity and
  NaN, and has to be one. Elsewhere an intermediate value that overflows is no excuse.
- Arguments that the program gives as numbers keep their values.
- A remainder is compared where the quotient is below 2²²: more takes a loop.
"""

from __future__ import annotations

from collections.abc import Mapping

from coda_agent.agent.judge.records import Finding
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.program import Program
from coda_agent.primitives.ptx import operation

_BOUND = 2.0**-9
_POINTS = 8192


def check_instructions(programs: Mapping[str, Program]) -> list[Finding]:
    """Find operations that are not torch's function, each with a first argument."""
    brought: dict[tuple[str, tuple[float | None, ...]], str] = {}
    for program in programs.values():
        nodes = program.graph.nodes
        for node in nodes:
            if node.op.startswith("ptx "):
                args = (nodes[a] for a in node.args)
                numbers = tuple(a.value if a.op == "const" else None for a in args)
                brought.setdefault((node.op, numbers), program.name)
    found = (_check(name, op, numbers) for (op, numbers), name in brought.items())
    return [finding for finding in found if finding]


def _check(program: str, name: str, numbers: tuple[float | None, ...]) -> Finding | None:
    op = operation(name)
    args = [
        x if number is None else torch.full_like(x, number)
        for x, number in zip(_arguments(len(numbers)), numbers, strict=True)
    ]
    meaning = name.removeprefix("ptx ").partition(":")[0]
    result, wide = op.torch(*args).double(), [x.double() for x in args]
    meant = op.torch(*wide)
    wrong = ~_near(result, meant) & ~_near(result, op.torch(*map(_normal, wide)))
    if meaning == "fmod":
        wrong &= (wide[0] / wide[1]).abs() < 2.0**22
    if not wrong.any():
        return None
    at = int(wrong.nonzero()[0])
    values = ", ".join(f"{float(x[at]):.9g}" for x in args)
    return Finding(
        message=f"the instructions of ptx {meaning!r} are wrong: of ({values}) they make "
        f"{float(result[at]):.9g}, torch.{meaning} {float(meant[at]):.9g}",
        where={"program": program, "operation": name},
        hint="they have to agree on all of float32 to 2^-9 of each result: small, large and "
        "negative arguments too",
    )


def _arguments(arity: int) -> list[torch.Tensor]:
    """Give `arity` float32 vectors: all pairs of edges, then drawn numbers."""
    # The same for every candidate, so that a verdict does not hang on luck.
    info, g = torch.finfo(torch.float32), torch.Generator().manual_seed(0)
    plain = [*(i / 2 for i in range(9)), 10.0, 20.0, 100.0, 1000.0, 2.0**24]
    edges = [info.max, info.tiny, info.tiny * info.eps, torch.inf]
    some = torch.tensor([*(s * x for x in [*plain, *edges] for s in (1.0, -1.0)), torch.nan])
    grid = torch.meshgrid(*[some] * arity, indexing="ij")
    columns = []
    for x in grid:
        mantissa = 1 + torch.rand(_POINTS, generator=g, dtype=torch.float64)
        exponent = torch.randint(-149, 128, (_POINTS,), generator=g)
        sign = 2.0 * torch.randint(0, 2, (_POINTS,), generator=g) - 1
        columns.append(torch.cat([x.flatten(), (sign * mantissa * 2.0**exponent).float()]))
    return columns


def _normal(x: torch.Tensor) -> torch.Tensor:
    """Replace what is subnormal in float32 by 0 of its sign."""
    return x.where(~(x.abs() < 2.0**-126), x * 0.0)


def _near(result: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
    top, size = torch.finfo(torch.float32).max, meant.abs()
    close = (result - meant).abs() <= _BOUND * size + 2.0**-126
    beyond = ~meant.isfinite() | (size > top * (1 + _BOUND))
    near_top = size > top * (1 - _BOUND)
    lost = ~result.isfinite()
    return torch.where(beyond, lost, close | (near_top & lost))
