"""A program of a spec at one choice of static parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from coda_agent.agent.judge.records import Inputs, JsonObject
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.program import Program
from coda_agent.specs import Spec, run_reference

if TYPE_CHECKING:
    from coda_agent.specs.reference import Touch


@dataclass(frozen=True)
class Variant:
    """What is judged: a program of a spec, and static parameters."""

    spec: Spec
    program: Program
    binding: Mapping[str, str]

    @classmethod
    def of_all(cls, spec: Spec, programs: Mapping[str, Program]) -> list[Self]:
        """List those of a spec's programs by name, the default one first."""
        return [cls(spec, programs[spec.variant(b)], b) for b in spec.bindings()]

    def reference(
        self, inputs: Inputs, *, wide: torch.dtype | None = None, touch: Touch | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the exact reference, as `run_reference` does."""
        return run_reference(
            self.spec, inputs, binding=self.binding, exact=True, wide=wide, touch=touch
        )

    def first_wrong(
        self, o: str, wrong: torch.Tensor, out: torch.Tensor, due: torch.Tensor
    ) -> JsonObject:
        """Describe an output's first wrong element, for a finding."""
        index = [int(i) for i in wrong.nonzero()[0]]
        got, expected = (float(x[tuple(index)]) for x in (out, due))
        about = {"got": got, "expected": expected, "index": index}
        return about | {"output": o, "program": self.program.name}
