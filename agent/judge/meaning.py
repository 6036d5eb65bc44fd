"""What a program means: its graph against the reference, both in float64.

- The outputs have to agree element by element to 1e-9. Three differences are allowed beyond that:
  what disturbances of float64's own size do to the reference there, constants that float32 rounds
  to the same number, and what the program's own operations round away, up to half of the digits.
- A difference that is below what the output's type shows, or what errors of inputs come to there,
  is an approximation, unless a single edit of the program mends it: then it is a small mistake.
- Inputs leave the spec's draw (`draws.py`): what a program does beyond the usual values is part of
  what it means.
- In float32, nothing leaves the range where the reference does not (`ranges.py`), loses digits that
  it keeps (`single.py`), or takes another side of its jumps (`ties.py`, `jumps.py`). What asks for
  its place is evaluated far out (`places.py`).
- Nothing is compiled and no element type enters. Rounding, places in memory and what a kernel does
  with them are judged by the cases of `oracle.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from coda_agent.agent.judge.compare import SAFETY, largest_change, least_of
from coda_agent.agent.judge.diagnosis import Diagnosis, diagnose_meaning
from coda_agent.agent.judge.digits import LEAST, Roundings, differs, known, tops
from coda_agent.agent.judge.disturbance import Way, disturbed
from coda_agent.agent.judge.draws import around, draw_doubles, draws, planted
from coda_agent.agent.judge.jumps import jump_fault
from coda_agent.agent.judge.places import Case, needless_draw, place_cases
from coda_agent.agent.judge.ranges import range_fault
from coda_agent.agent.judge.records import Finding
from coda_agent.agent.judge.repairs import mistake
from coda_agent.agent.judge.runners import one_thread, replayed
from coda_agent.agent.judge.single import cancelling_draws, digits_fault
from coda_agent.agent.judge.structures import base_shape
from coda_agent.agent.judge.ties import compared_draws, differing, tie_draws
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Graph
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import ColMax
from coda_agent.primitives.rounding import ROUNDINGS
from coda_agent.specs import Spec

if TYPE_CHECKING:
    Inputs = dict[str, Any]
    Outputs = dict[str, torch.Tensor]

# `disturbed` moves results by errors of float32. Those of float64 are smaller by this factor, which
# leaves 3 bits to spare for sums in another order.
_FINER = 2.0**-26
_INPUT = 2.0**-50
# An angle of 10^25 radians has few neighbours among doubles: four disturbed ones were all the same
# double again at 1 in 60,000 elements, which then seemed to stand still.
_PROBES = 8
# Before an element is called wrong. A sign that is chosen by the sine of a large angle is the same
# in 8 runs at 1 in 256 elements. Inputs as near as `_INPUT` came to some 20 different angles only,
# and all had one sign at 2 of some 10^6 elements; so these runs draw them from further around.
_CERTAIN = 64
_AROUND = 2.0**-46
# Where disturbances move an element by a larger share, there is no value left to compare. A sine of
# 10^15 radians is such.
_CHAOTIC = 1e-3
# What an approximation may be off by, by the bytes of an output's type. Half of a last digit is
# 2^-24 of a float32 number at most, 2^-11 of a float16's and 2^-8 of a bfloat16's.
_APPROXIMATE = {4: 2.0**-22, 2: 2.0**-12, 1: 2.0**-12}
# What is off by a smaller share of a value is on no other side of a jump.
_JUMP = 2.0**-10
_JUMPED = "a half is rounded, a threshold met, or one of equal values taken, otherwise"
# Replays at moved places, of all draws.
_RUNS = 300
# Edits that may mend an approximation: the function itself in its place, or a limit taken away.
_NO_MISTAKES = ("extra_term", "wrong_operation")


def check_meaning(
    spec: Spec, programs: Mapping[str, Program], *, seed: int,
    approximated: dict[str, float] | None = None,
) -> list[Finding]:  # fmt: skip
    """Find each program that means something else than the reference.

    Args:
        programs: By variant name.
        seed: What all draws follow from.
        approximated: Gets the most that approximations are off by, by "program output".
    """
    with one_thread():
        found = [
            meaning_fault(spec, programs[spec.variant(binding)], binding, seed, approximated)
            for binding in spec.bindings()
        ]
    return [fault[0] for fault in found if fault is not None]


def meaning_fault(
    spec: Spec, program: Program, binding: Mapping[str, str], seed: int,
    approximated: dict[str, float] | None = None,
) -> tuple[Finding, Inputs] | None:  # fmt: skip
    """Find the first input set on which a program's outputs are wrong.

    Returns:
        A finding that names the set, and the set; None where there is none.
    """
    meant = dataclasses.replace(program, graph=_unrounded(spec, program))
    near = {} if approximated is None else approximated
    for fault, inputs in _faults(Variant(spec, meant, binding), seed, near):
        (rows, inner), columns = (inputs[name].shape for name in spec.gemm)
        sizes = dict(zip(spec.gemm_dims, (rows, columns[0], inner), strict=True))
        return fault.model_copy(update={"where": {"sizes": sizes, **fault.where}}), inputs
    return None


def _unrounded(spec: Spec, program: Program) -> Graph:
    """Leave to the store what a program rounds to the type of an output itself."""
    graph, types = program.graph, spec.default_types()
    rounded = {o: ROUNDINGS.get(spec.dtype_of(o, types)) for o in graph.outputs}
    several = {t for t, choices in spec.types.items() if len(choices) > 1}
    fixed = {o for o in rounded if spec.outputs[o].dtype not in several}
    fixed -= {program.accumulated}  # what is added is not what is stored
    outputs = {
        o: graph.nodes[i].args[0] if o in fixed and graph.nodes[i].op == rounded[o] else i
        for o, i in graph.outputs.items()
    }
    return Graph(graph.nodes, outputs)


def _faults(
    variant: Variant, seed: int, near: dict[str, float]
) -> Iterator[tuple[Finding, Inputs]]:
    """Find what differs, one input set after another, with the set."""
    spec, program, binding = variant.spec, variant.program, variant.binding
    compared = [*compared_draws(variant, seed)]
    samples = list[_Sample]()
    drawn = draws(spec, binding, seed), compared, cancelling_draws(variant, seed)
    for label, inputs in itertools.chain(*drawn):
        samples.append(sample := _Sample.of(variant, seed, label, inputs, near))
        if fault := sample.fault():
            yield fault, inputs
        if fault := range_fault(variant, inputs, sample.truth, sample.results):
            yield _labelled(fault, label, seed), inputs
    for draw in tie_draws(variant, seed):
        if not draw.alone:
            if fault := _Sample.of(variant, seed, draw.label, draw.inputs, near).tie_fault():
                yield fault, draw.inputs
        if fault := jump_fault(variant, draw.inputs, draw.alone):
            yield _labelled(fault, draw.label, seed), draw.inputs
    for x in samples:  # after the jumps: in rounding, too, a program may take the other side of one
        if fault := digits_fault(variant, x.inputs, x.truth, x.results, seed):
            yield _labelled(fault, x.label, seed), x.inputs
    if needless_draw(spec, program, binding):
        message = (
            "it draws random numbers, and the reference is the same function in every place: leave "
            "`philox_uniform` or `dropout` out"
        )
        where = {"program": program.name, "fault": "extra_term", "seed": seed}
        yield (
            Finding(message=message, where=where),
            draw_doubles(spec, binding, base_shape(spec), seed),
        )
    for what, inputs in planted(spec, samples[0].inputs, seed):  # the spec's own draw
        # Where a number is due, of NaN as well, either side of a comparison is right.
        if fault := _Sample.of(variant, seed, what, inputs, near).gap_fault():
            yield fault, inputs
    for label, inputs in compared:
        yield from _gaps(variant, label, inputs, seed, near)
    corners = list[Case]()
    cases = place_cases(spec, program, binding)
    for sizes, moved in itertools.groupby(cases, key=lambda case: case.sizes):
        inputs = draw_doubles(spec, binding, sizes, seed)
        truth = variant.reference(inputs)
        for case in moved:
            there = dataclasses.replace(variant, program=case.program)
            results = replayed(spec, case.program, inputs)
            if fault := _Sample(there, seed, case.label, inputs, truth, results, near).fault():
                yield fault, inputs
            corners += [case] if case.program is not program else []
    yield from _faults_there(variant, corners, seed, near)


def _faults_there(
    variant: Variant, corners: Sequence[Case], seed: int, near: dict[str, float]
) -> Iterator[tuple[Finding, Inputs]]:
    """Find what differs at moved places beyond the usual values: of few all, of many a share."""
    if not corners:
        return
    spec, binding, sizes = variant.spec, variant.binding, corners[0].sizes
    drawn = [*draws(spec, binding, seed, sizes), *compared_draws(variant, seed, sizes)]
    ties = [draw for draw in tie_draws(variant, seed, sizes) if not draw.alone]
    step = -(-len(corners) * (len(drawn) + len(ties)) // _RUNS)
    for i, case in enumerate(corners):
        there = dataclasses.replace(variant, program=case.program)
        yield from _gaps(there, case.label, drawn[0][1], seed, near)
        for label, inputs in drawn[i % step :: step]:
            label = f"{label or 'as drawn'}, {case.label}"
            if fault := _Sample.of(there, seed, label, inputs, near).fault():
                yield fault, inputs
        for draw in ties[i % step :: step]:
            label = f"{draw.label}, {case.label}"
            if fault := _Sample.of(there, seed, label, draw.inputs, near).tie_fault():
                yield fault, draw.inputs


def _gaps(
    variant: Variant, label: str, inputs: Inputs, seed: int, near: dict[str, float]
) -> Iterator[tuple[Finding, Inputs]]:
    """Find where NaN of inputs does not reach an output, or reaches too much."""
    for what, changed in planted(variant.spec, inputs, seed):
        sample = _Sample.of(variant, seed, f"{what}, {label}", changed, near)
        if fault := sample.gap_fault() or sample.fault():
            yield fault, changed


@dataclasses.dataclass(frozen=True)
class _Sample:
    """A program's outputs on one input set, and the due ones."""

    variant: Variant
    seed: int
    label: str
    inputs: Inputs
    truth: Outputs
    results: Outputs
    near: dict[str, float]

    @classmethod
    def of(
        cls, variant: Variant, seed: int, label: str, inputs: Inputs, near: dict[str, float]
    ) -> Self:
        """Run the reference and the program."""
        truth = variant.reference(inputs)
        results = replayed(variant.spec, variant.program, inputs)
        return cls(variant, seed, label, inputs, truth, results, near)

    def apart(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """List the outputs that differ, with their values and the exact ones."""
        for o, expected in self.truth.items():
            top, most = tops(self.variant.spec, o)
            out, expected = (x.clamp(-top, top) for x in (self.results[o], expected))
            # What is beyond an output's type, the reference cannot hold either.
            expected = expected.where(~(expected.abs() > most), math.inf)
            if differs(out, expected).any():
                yield o, out, expected

    def tie_fault(self) -> Finding | None:
        """Find the first output on the other side of a jump."""
        for o, out, expected in self.apart():
            wrong = differing(self.variant, self.inputs, o, out, expected)
            if bool(wrong.any()):
                at = self.variant.first_wrong(o, wrong, out, expected)
                message = (
                    f"{o} is another function where inputs are {self.label}: it is "
                    f"{at['got']:.9g} where {at['expected']:.9g} is due; "
                )
                # A small share is no jump: something small is lost beside something large.
                share = abs(at["got"] - at["expected"]) / max(abs(at["expected"]), LEAST)
                message += f"off by {share:.2g} of it" if share < _JUMP else _JUMPED
                return Finding(message=message, where={**at, "seed": self.seed})
        return None

    def gap_fault(self) -> Finding | None:
        """Find the first output with a number where NaN is due."""
        for o, due in self.truth.items():
            # A maximum over rows passes NaN over.
            passes = issubclass(self.variant.program.outputs[o], ColMax)
            wrong = due.isnan() & self.results[o].isfinite() & (not passes)
            if bool(wrong.any()):
                at = self.variant.first_wrong(o, wrong, self.results[o], due)
                message = (
                    f"{o} is {at['got']:g} where NaN is due ({self.label}): it does not reach it"
                )
                return Finding(message=message, where={**at, "seed": self.seed, "case": self.label})
        return None

    def fault(self) -> Finding | None:
        """Find the first output that is not the reference's."""
        for o, out, expected in self.apart():
            # Of what is an approximation in an earlier draw no excuse is looked for: they are slow.
            if self._place(o) in self.near and self._within(o, out, expected):
                self._keep(o, out, expected)
                continue
            excuses = Roundings(self.variant, self.inputs, o, out)
            for probes, share in ((_PROBES, _INPUT), (_CERTAIN, _AROUND)):
                noise = self._noise(o, expected, probes, share)
                chaotic = noise > _CHAOTIC * expected.abs().maximum(out.abs())
                allowed = (known(expected) + SAFETY * noise).where(~chaotic, math.inf)
                wrong = excuses.wrong(expected, allowed)
                if not wrong.any():
                    break
            if wrong.any():
                # What is allowed, or has no number in the reference itself, is no fault.
                out = out.where(wrong, expected)
                if not self._approximates(o, out, expected):
                    return self._finding(o, out, expected)
        return None

    def _approximates(self, o: str, out: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether an output is an approximation that its type does not show; keep what it is off.

        One draw is asked for the mistake; what is as near in the others is the same.
        """
        if not self._within(o, out, expected):  # beside a sum that cancels, no share is small
            generator = torch.Generator().manual_seed(self.seed)
            near = (around(self.inputs, generator, _APPROXIMATE[4]) for _ in range(_PROBES))
            moved = largest_change(expected, [self.variant.reference(x)[o] for x in near])
            if not self._within(o, out, expected, moved):
                return False
        if self._place(o) not in self.near:
            others = [(x, self.variant.reference(x)[o]) for x in self._others()]
            found = mistake(self.variant, o, [(self.inputs, expected), *others])
            if found and found.fault not in _NO_MISTAKES:
                return False
        self._keep(o, out, expected)
        return True

    def _within(
        self, o: str, out: torch.Tensor, expected: torch.Tensor, moved: torch.Tensor | float = 0.0
    ) -> bool:
        """Whether an output is as near as an approximation may be, beside what has `moved` it."""
        share, least = _tolerance(self.variant.spec, o)
        return not differs(out, expected, share * expected.abs() + least + moved).any()

    def _keep(self, o: str, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Keep the most that an approximation is off, as a share."""
        off = ((out - expected) / expected).abs()
        # Beside 0, and beyond infinity, it is no share.
        off = off.where(off <= _tolerance(self.variant.spec, o)[0], 0.0)
        self.near[self._place(o)] = max(self.near.get(self._place(o), 0.0), float(off.max()))

    def _others(self) -> list[Inputs]:
        """Draw inputs on which a mistake that is found has to be one, too."""
        spec = self.variant.spec
        again = draws(spec, self.variant.binding, self.seed + 1)
        return [x for name, x in again if name in ("", f"{spec.gemm[0]} times 64")]

    def _place(self, o: str) -> str:
        return f"{self.variant.program.name} {o}"

    def _finding(self, o: str, out: torch.Tensor, expected: torch.Tensor) -> Finding:
        """Say what is wrong with an output."""
        spec, label = self.variant.spec, self.label
        seen = diagnose_meaning(self.variant, o, self.inputs, out, expected, self._others())
        where = {**seen.where, "program": self.variant.program.name, "output": o, "seed": self.seed}
        where |= {"case": label} if label else {}
        same = {
            x: ("passed", "wrong")[bool(differs(self.results[x], v).any())]
            for x, v in self.truth.items()
        }
        where |= {"outputs": same | {o: "wrong"}} if len(same) > 1 else {}
        message = _said(o, label, seen)
        if label == f"{spec.gemm[0]} times 0" and seen.fault == "wrong_function":
            message += ". All products are equal there: ties may be taken otherwise"
        if seen.fault == "approximated" or self._place(o) in self.near:
            message += (
                f". To {_tolerance(spec, o)[0]:.2g} of each element it has to be the function"
            )
        return Finding(message=message, where=where)

    def _noise(self, o: str, truth: torch.Tensor, probes: int, share: float) -> torch.Tensor:
        """Find how far errors of float64's size, of inputs too, move elements."""
        generator = torch.Generator().manual_seed(self.seed)
        runs = []
        for i in range(probes):
            near = around(self.inputs, generator, share)
            # With opposite signs: where an output saturates, one alone may move nothing. And with
            # none: sinc(x) of a huge x is 10^-38 of either sign, which an error of its range always
            # exceeds.
            way = Way(_FINER, (-1.0, 1.0, 0.0)[i % 3])
            spec, binding = self.variant.spec, self.variant.binding
            runs.append(disturbed(spec, near, binding, self.seed + i // 3, way)[o])
        return largest_change(truth, runs)


def _labelled(finding: Finding, label: str, seed: int) -> Finding:
    """Add the case to a finding."""
    where = {**finding.where, "seed": seed} | ({"case": label} if label else {})
    message = finding.message.replace(":", f" ({label}):", 1) if label else finding.message
    return Finding(message=message, where=where)


def _said(o: str, label: str, seen: Diagnosis) -> str:
    got, expected = seen.where["got"], seen.where["expected"]
    off = abs(got - expected) / max(abs(expected), LEAST)
    much = f", off by {off:.2g} of it" if expected and math.isfinite(off) else ""
    case = f" ({label})" if label else ""
    what, how = "is another function of the inputs", "before any rounding"
    if seen.fault == "cancellation":
        what, how = "loses its digits", "in float64"
    end = f"it is {got:.9g} where {expected:.9g} is due{much}; {seen.text}"
    return f"{o} {what}{case}: {how} {end}"


def _tolerance(spec: Spec, o: str) -> tuple[float, float]:
    """Give what an approximation may be off by: a share of an element, and what is stored as 0."""
    kinds = [getattr(torch, spec.dtype_of(o, types)) for types in spec.type_choices()]
    if not all(kind.is_floating_point for kind in kinds):
        return 0.0, 0.0
    share = min(_APPROXIMATE.get(kind.itemsize, 0.0) for kind in kinds)
    return share, min(map(least_of, kinds))
