"""The draft of a refused reference: a program with holes.

A node that has no rewriting is a hole, and so is whatever needs it. A hole stands in the draft over
the values that the composer had in front of it. Outputs without a hole are checked as usual.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils._pytree import tree_leaves

from coda_agent.agent.authors.composer.canonical import canonical
from coda_agent.agent.authors.composer.capture import capture
from coda_agent.agent.authors.composer.check import TOLERANCE, differences
from coda_agent.agent.authors.composer.codes import Elements, Unusable
from coda_agent.agent.authors.composer.emit import module_text
from coda_agent.agent.authors.composer.expression import Expr
from coda_agent.agent.authors.composer.outputs import Outputs
from coda_agent.agent.authors.composer.problem import STORED, Problem, Refusal
from coda_agent.agent.authors.composer.rewrite import Rewriter
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec

HOLE = "HOLE"


def draft(spec: Spec, why: str) -> str:
    """Say where the composer stopped, or `why`, and what it has."""
    drafts = list[_Draft]()
    try:
        for binding in spec.bindings():
            drafts.append(_Draft(capture(spec, binding)))
        text = module_text(spec.name, spec.gemm, [d.program for d in drafts])
    except ProgramError:
        return _short(spec, why)
    reasons = dict.fromkeys(_short(spec, reason) for d in drafts for reason in d.reasons)
    text = text.partition("\n\n")[2].strip()  # without a docstring
    lines = [*(reasons or [_short(spec, why)]), f"\n```python\n{text}\n```"]
    for binding, part in zip(spec.bindings(), drafts, strict=True):
        if proved := part.proved(spec, binding):
            agree = "agrees" if len(proved) == 1 else "agree"
            said = f"{part.program.name}: {', '.join(proved)} {agree} with the reference."
            lines.append(said)
    return "\n".join(lines)


def _short(spec: Spec, reason: str) -> str:
    return reason.replace(f"{spec.path}:", "line ").removeprefix("line  ").split("\n")[0]


class _Hole(Unusable):
    """A value that could not be rewritten."""

    def __init__(self, number: int, inputs: list[Expr]) -> None:
        super().__init__("", "")
        self.name = f"{HOLE}_{number}"
        self.inputs = [e.args[0] if e.reduced else e for e in inputs if e.op != "const"]


class _Draft(Rewriter):
    """The draft of one program, with holes and their reasons."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.reasons: list[str] = []
        outputs = Outputs(self.layout, self.inputs.leaves)
        returned = self.trace()
        values, holes, kinds = dict[str, Expr](), dict[str, _Hole](), dict[str, str]()
        for name, slot in problem.outputs.items():
            value = returned.get(name)
            kinds[name] = slot.kind.__name__ if slot.kind in STORED and slot.kind else HOLE
            if isinstance(value, _Hole):
                holes[name] = value
                continue
            try:
                values[name], kinds[name] = outputs.one(name, value)
            except ProgramError as error:
                holes[name] = self._hole(f"output {name!r}{error.message}", [value])
        order = [*values, *(f"{x} {i}" for x, h in holes.items() for i in range(len(h.inputs)))]
        roots = [*values.values(), *(e for hole in holes.values() for e in hole.inputs)]
        found = dict(zip(order, canonical(roots), strict=True))
        self.whole = {x: found[x] for x in values}
        for x, hole in holes.items():
            args = tuple(found[f"{x} {i}"] for i in range(len(hole.inputs)))
            found[x] = Expr("hole", args, frozenset("MN"), hole.name)
        stored = {x: found[x] for x in problem.outputs}
        self.program = self.rewritten(stored, kinds)
        self._kinds_of = kinds

    def refused(self, error: Refusal, args: object) -> _Hole:
        before = [x for x in tree_leaves(args) if isinstance(x, _Hole)]
        return before[0] if before else self._hole(error.message, tree_leaves(args))

    def _hole(self, reason: str, values: list[object]) -> _Hole:
        sources = (self.layout.codes.sources(x) for x in values if isinstance(x, Elements))
        self.reasons.append(f"{HOLE}_{len(self.reasons) + 1}: {reason}")
        return _Hole(len(self.reasons), list(dict.fromkeys(e for s in sources for e in s)))

    def proved(self, spec: Spec, binding: Mapping[str, str]) -> list[str]:
        """The outputs without a hole that are the reference's."""
        if not self.whole or self.problem.updated:
            return []
        rest = self.rewritten(self.whole, {x: self._kinds_of[x] for x in self.whole})
        try:
            program = read_programs(module_text(spec.name, spec.gemm, [rest]))[rest.name]
            off = differences(spec, program, binding)
        except ProgramError:
            return []
        return [x for x in self.whole if off[x] <= TOLERANCE]
