"""The mutant suite: right programs with one fault each, to be refused.

- A mutated program is an edit of the graph, as a wrong candidate would be. A mutated lowering runs
  the right program as a broken kernel would.
- Sites are chosen by a seed; equal seeds give equal mutants.
- An edit may change nothing that can be seen, such as a clamp where the type saturates anyway. Such
  a mutant is equivalent to its original and does not count.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from coda_agent.agent.judge.compare import unit_of
from coda_agent.agent.judge.draws import draws
from coda_agent.agent.judge.runners import replayed
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.edits import faulty
from coda_agent.evals.judge.lowerings import LOWERINGS, Launch, sites
from coda_agent.primitives.program import Program
from coda_agent.specs import draw_inputs

if TYPE_CHECKING:
    from coda_agent.agent.judge.runners import Runner


@dataclass(frozen=True)
class Mutant:
    """One fault in one program.

    Attributes:
        right: The program without it.
        operator: Which fault was made; of the lowering where `lowered`.
        faults: What a diagnosis may call it, the best name first; empty where the gate has a check
            of its own for it.
        says: What a diagnosis has to hold beside the name, as a regular expression.
        program: The program, mutated unless `lowered`.
    """

    right: Subject
    operator: str
    site: str
    faults: tuple[str, ...]
    program: Program = field(repr=False)
    lowered: bool = False
    says: str = ""

    @property
    def name(self) -> str:
        return f"{self.right.spec.name}: {self.operator}, {self.site}"

    @property
    def wrong(self) -> Subject:
        """The program with it."""
        return self.right.with_program(self.program)

    def runner(self, run: Runner) -> Runner:
        """Give `run` the mutant's fault, with fresh state if any."""
        if not self.lowered:
            return run
        broken, kept = LOWERINGS[self.operator].broken, {}
        return lambda *call: broken(Launch(run, *call, site=self.site, kept=kept))


def mutants(right: Subject, *, seed: int) -> list[Mutant]:
    """Make a program's mutants, one site an operator, by the seed."""
    spec, program = right.spec, right.program
    rng = random.Random(f"{seed} {program.name}")
    made: dict[str, list[Mutant]] = {}
    for edit in faulty(program):
        if (edited := edit.apply(program)) is not None:
            mutant = Mutant(right, edit.operator, edit.site, edit.faults, edited)
            made.setdefault(edit.operator, []).append(mutant)
    first = rng.randrange(2)
    for operator, lowering in list(LOWERINGS.items())[first::2]:
        for site in sites(lowering, spec, program):
            mutant = Mutant(right, operator, site, lowering.faults, program, lowered=True)
            made.setdefault(operator, []).append(mutant)
    return [rng.choice(found) for found in made.values()]


def suite(found: Iterable[Subject], *, seed: int, count: int | None = None) -> list[Mutant]:
    """Make the programs' mutants; `count` of them, operators in turn."""
    every = [m for right in found for m in mutants(right, seed=seed)]
    if count is None:
        return every
    random.Random(seed).shuffle(every)
    seen: Counter[str] = Counter()
    turn = {}
    for mutant in every:
        turn[mutant.name] = seen[mutant.operator]
        seen[mutant.operator] += 1
    chosen = sorted(every, key=lambda m: turn[m.name])[:count]
    return sorted(chosen, key=lambda m: m.right.spec.name)


def equivalent(mutant: Mutant, device: str) -> bool:
    """Tell whether programs differ by less than a sixteenth of a rounding.

    The rounding is that of what is stored; float32 counts as 2⁻¹⁵, as in the judge. Both programs
    run in float64, on draws of the spec and on inputs beyond them. A fault of a lowering is never
    equivalent.
    """
    if mutant.lowered:
        return False
    spec, right = mutant.right.spec, mutant.right
    types, binding = spec.default_types(), right.binding
    usual = (
        draw_inputs(spec, sizes, types, seed=i, device=device, binding=binding)
        for i, sizes in enumerate(spec.check_shapes)
    )
    for inputs in (*usual, *(inputs for _, inputs in draws(spec, binding, seed=0))):
        one, other = (replayed(spec, p, inputs) for p in (mutant.program, right.program))
        for o in other:
            dtype = getattr(torch, spec.dtype_of(o, types))
            top = torch.finfo(dtype).max
            a, b = (x[o].clamp(-top, top) for x in (one, other))
            share = unit_of(dtype) / 16
            if not torch.allclose(a, b, rtol=share, atol=0.0, equal_nan=True):
                return False
    return True
