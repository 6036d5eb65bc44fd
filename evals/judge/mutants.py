"""The mutant suite: accepted kernels with one fault each, which a judge must refuse.

- A mutated program is an edit of the graph, what a wrong candidate would be; a mutated lowering
  runs the right program as a broken kernel would.
- Sites are chosen by a seed; equal seeds give equal mutants.
- A mutant whose outputs never differ from the original's is equivalent and does not count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coda_agent.evals.judge.edits import faulty
from coda_agent.evals.judge.lowerings import LOWERINGS, Launch, sites
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    from coda_agent.evals.judge.lowerings import Runner
    from coda_agent.specs import Spec


EXPLAINED = {
    "memo by corners": "it keeps results by the shapes and the first and last element of each "
    "input, and no two cases differ in between only. A compiled program keeps no results.",
}
"""Operator to the reason why a judge may let its mutants live."""


@dataclass(frozen=True)
class Mutant:
    """One fault in one kernel.

    Attributes:
        kernel: The kernel's name.
        operator: Which fault was made; of the lowering where `lowered`.
        site: Where.
        faults: What a diagnosis may call it, the best name first; empty where the gate has a check
            of its own for it.
        program: The program, mutated unless `lowered`.
        lowered: Whether the lowering is at fault.
    """

    kernel: str
    operator: str
    site: str
    faults: tuple[str, ...]
    program: Program = field(repr=False)
    lowered: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.operator}, {self.site}"

    def runner(self, run: Runner) -> Runner:
        """`run` with the mutant's fault, and fresh state where the fault has any."""
        if not self.lowered:
            return run
        broken = LOWERINGS[self.operator].make()
        return lambda *call: broken(Launch(run, *call), self.site)


def mutants(spec: Spec, program: Program, *, seed: int = 0) -> list[Mutant]:
    """Mutants of one kernel: one site an operator, chosen by the seed. Every operator on programs
    that applies, and every second one on lowerings."""
    rng = random.Random(f"{seed} {program.name}")
    made: dict[str, list[Mutant]] = {}
    for edit in faulty(program):
        if (edited := edit.apply(program)) is not None:
            mutant = Mutant(spec.name, edit.operator, edit.site, edit.faults, edited)
            made.setdefault(edit.operator, []).append(mutant)
    first = rng.randrange(2)
    for operator, lowering in list(LOWERINGS.items())[first::2]:
        for site in sites(lowering, spec, program):
            mutant = Mutant(spec.name, operator, site, lowering.faults, program, lowered=True)
            made.setdefault(operator, []).append(mutant)
    return [rng.choice(found) for found in made.values()]


def differs(mutant: Mutant, original: Program, spec: Spec, run: Runner, device: str) -> bool:
    """Whether the mutant ever stores another bit than the original, or changes an input.

    Found out on draws of the spec, on new contents of the same memory, on a padded and offset A and
    on a NaN, without any part of the judge. An edited program must also differ in float64, by more
    than 1e-9 of the largest value: another order of the same operations is no fault.
    """
    import torch

    if mutant.program.operands != original.operands:
        return True
    types = spec.default_types()
    binding = next(b for b in spec.bindings() if spec.variant(b) == original.name)
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    broken = mutant.runner(run)
    config = TileConfig(128, 128, 2, 1, True)
    stored = exact = False
    for inputs in _probes(spec, binding, device):
        before = {x: v.clone() for x, v in inputs.items() if hasattr(v, "clone")}
        right = run(spec, original, inputs, config, dtypes)
        stored |= any(_bits(inputs[x]) != _bits(v) for x, v in before.items())
        wrong = broken(spec, mutant.program, inputs, config, dtypes)
        stored |= any(_bits(right[o]) != _bits(wrong[o]) for o in right)
        stored |= any(_bits(inputs[x]) != _bits(v) for x, v in before.items())
        exact |= mutant.lowered or _apart(spec, mutant.program, original, inputs, dtypes)
        if stored and exact:
            return True
    return False


def _probes(spec: Spec, binding: Mapping[str, str], device: str) -> Iterator[dict[str, Any]]:
    from coda_agent.specs import draw_inputs

    name = spec.gemm[0]
    for i, sizes in enumerate(reversed(spec.check_shapes[1:])):
        types = spec.default_types()
        inputs = draw_inputs(spec, sizes, types, seed=i, device=device, binding=binding)
        yield inputs
        a: Any = inputs[name]
        a[:, 1:-1] = (
            a.flip(0)[:, 1:-1] if a.element_size() > 1 else (-a.float()).to(a.dtype)[:, 1:-1]
        )
        yield inputs
        room = a.new_zeros(a.shape[0] + 1, a.shape[1] + 16)
        room[1:, 16:] = a
        yield {**inputs, name: room[1:, 16:]}
        a[-1, 0] = float("nan")
        yield inputs


def _bits(x: Any) -> bytes:
    import torch

    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _apart(
    spec: Spec, program: Program, original: Program, inputs: Mapping[str, Any], dtypes: Any
) -> bool:
    import torch

    from coda_agent.primitives.interpret import interpret

    a, b = (inputs[name] for name in spec.gemm)
    place = spec.in_place
    held = {place.output: inputs[place.input]} if place else {}
    one, other = (
        interpret(p, a, b, {**inputs, **held}, dtypes=dtypes, compute=torch.float64)
        for p in (program, original)
    )
    return any(
        float((one[o] - x).abs().nan_to_num().max()) > 1e-9 * float(x.abs().nan_to_num().max())
        for o, x in other.items()
    )
