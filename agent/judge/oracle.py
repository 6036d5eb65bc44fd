"""Cases of a program: inputs, truth, and what outputs may err.

- The inputs are the spec's own draws at its check shapes, and what `structures.py` makes of them.
- Bounds come from the reference alone, never from the candidate: the error of PyTorch's own path,
  and what disturbing the reference's arithmetic does to each element (`disturbance.py`).
- Every draw follows from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from coda_agent.agent.judge.compare import (
    BASELINE_LIMIT,
    Errors,
    addend_rounding,
    allowance,
    bound,
    largest_change,
    measure,
    store_rounding,
    unit_of,
)
from coda_agent.agent.judge.disturbance import Way, approximations_shaken, disturbed
from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.structures import Structure, structures
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.rounding import rounded
from coda_agent.specs import Spec, draw_inputs, run_reference

# What folding partials may err, as a share of a result that has no other rounding.
_FOLD = 2.0**-20
# Disturbed runs of the reference. A single run may happen to move an element hardly at all, and
# then a right result is refused there. That befell 11 of 3000 draws of log(1 + |z|), and none with
# four runs.
_PROBES = 4
# Before an output is called wrong: few runs may all leave an element on one side of a jump, as of
# ceil. Errors of single programs are at times larger than disturbances, so some runs are disturbed
# more; of these only jumps count.
_CERTAIN, _FAR = 120, 40
_LARGER = 4.0
# Bits of float32's grid that are left out of some of those: where an error is many steps of that
# grid, runs hardly ever hit the one step at which a remainder is 0.
_COARSER = 4
# How they are disturbed, in turn: `finer`, `sign` and `single`. Of what approximations err of their
# range both directions, or hardly any, where what is nearly 0 has either sign; results on float32's
# grid; and on that grid with hardly any error, as where a sum happens to be exact.
_HARDLY = 2.0**-16
_WAYS = (
    (1.0, 1.0, False), (1.0, -1.0, False), (1.0, _HARDLY, False), (1.0, -_HARDLY, False),
    (1.0, 1.0, True), (1.0, -1.0, True), (1.0, 0.0, True),
    (_HARDLY, 1.0, True), (_HARDLY, -1.0, True), (_HARDLY, 0.0, True),
)  # fmt: skip
# Torch may round once what is several operations of a program, so its exact float32 is met so far.
_SINGLE = 2.0**-21
# A jump moves an element by more than this share of the output's root-mean-square.
_JUMP = 2.0**-8


class Certain(NamedTuple):
    """What an output may err by many runs: elements, stores, all."""

    allowed: torch.Tensor
    rounding: torch.Tensor
    bound: Errors


@dataclass(frozen=True)
class Case:
    """One set of inputs with its truth and bounds.

    Attributes:
        inputs: By name.
        truth: Each output that is checked, exact, in float64.
        bounds: The largest errors that pass, by output.
        allowed: What each element may err, by output; empty where no probes were asked for.
        rounding: What storing each element may err, by output; empty likewise.
        sizes: Dims.
        structure: None for the spec's own draws.
        exact: Outputs that must match bit for bit.
        certain: The same by many probes, of outputs whose own are by few.
    """

    inputs: Inputs
    truth: dict[str, torch.Tensor]
    bounds: dict[str, Errors]
    allowed: dict[str, torch.Tensor]
    rounding: dict[str, torch.Tensor]
    sizes: Mapping[str, int]
    structure: Structure | None = None
    exact: tuple[str, ...] = ()
    certain: Callable[[], Mapping[str, Certain]] = dict

    @property
    def label(self) -> str:
        return self.structure.label if self.structure else ""


@dataclass(frozen=True)
class Source:
    """What cases are drawn from.

    Attributes:
        spec, binding: The spec and its static parameters.
        sizes: Dims.
        element: Type of the spec's symbolic types.
        device: Where.
        seed: What the draw follows from.
    """

    spec: Spec
    binding: Mapping[str, str]
    sizes: Mapping[str, int]
    element: str
    device: str
    seed: int

    def case(
        self, probes: int = 0, structure: Structure | None = None, factor: float = 1.0
    ) -> Case:
        """Draw inputs and compute truth and bounds.

        Bounds come from what a user would run: on a GPU the spec's baseline, where it has one that
        takes the shape.

        Args:
            probes: Disturbed runs of the reference, for the bound of each element.
            structure: What to change in the inputs. Outputs that it takes out of the range of their
                type are left out.
            factor: One of the structure's factors.

        Raises:
            SpecError: the baseline computes something else.
        """
        spec, binding = self.spec, self.binding
        types, inputs = dict.fromkeys(spec.types, self.element), self._drawn(structure, factor)
        truth, plain, rounds = _ways(spec, inputs, binding, self.device)
        dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
        if structure:
            truth = {o: t for o, t in truth.items() if _in_range(t, plain[o], dtypes[o], structure)}
            plain = {o: _settled(plain[o], t) for o, t in truth.items()}
        errors = {o: measure(plain[o], t) for o, t in truth.items()}
        for o, error in errors.items():
            if structure is None and spec.has_baseline and error.norm > BASELINE_LIMIT:
                raise SpecError(
                    f"{spec.path}: the baseline's {o} is {error.norm:.2e} of its norm away from "
                    "the reference"
                )
        held: Inputs = {o: inputs[i] for o, i in spec.updated(binding).items() if o in truth}
        draw = _Draw(self, inputs, truth, dtypes, held)
        runs = [draw.disturbed(i, Way()) for i in range(probes)]
        # Where the reference rounds and computes on, a tie may fall to either side.
        jumps = {o: largest_change(truth[o], [r[o] for r in runs]) for o in truth if rounds}
        multiple = spec.tolerance.multiple
        bounds = {
            o: bound(e, spec.dtype_of(o, types), multiple, draw.addend(o, jumps.get(o)))
            for o, e in errors.items()
        }
        allowed = draw.allowed(runs) if probes else {}
        rounding = {o: store_rounding(truth[o], dtypes[o], held.get(o)) for o in allowed}
        rounding |= {o: rounding[o] + jump for o, jump in jumps.items() if o in rounding}
        settled = (
            _representable(spec, inputs, binding, truth) if structure and structure.exact else []
        )
        exact = [o for o in settled if draw.settle(o, allowed)]
        rounding |= {o: allowed[o] for o in exact}
        certain = partial(draw.certain, probes, bounds, rounding, set(settled)) if probes else dict
        return Case(
            inputs, truth, bounds, allowed, rounding, self.sizes, structure, tuple(exact), certain
        )

    def _drawn(self, structure: Structure | None, factor: float) -> Inputs:
        spec, device = self.spec, self.device
        types = dict.fromkeys(spec.types, self.element)
        inputs = draw_inputs(
            spec, self.sizes, types, seed=self.seed, device=device, binding=self.binding
        )
        if structure:
            generator = torch.Generator(device).manual_seed(self.seed + 1)
            inputs |= structure.change(inputs, spec, generator, factor)
        return inputs


def _ways(
    spec: Spec, inputs: Inputs, binding: Mapping[str, str], device: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Compute outputs exactly, as a user would, and whether the reference rounds."""
    called = set[object]()

    def noted(function: object, _: object, result: Any) -> Any:
        called.add(function)
        return result

    truth = run_reference(spec, inputs, binding=binding, exact=True, touch=noted)
    try:
        plain = run_reference(spec, inputs, binding=binding, baseline=device == "cuda")
    except SpecError:
        # A baseline may refuse a shape that is checked; the reference takes it.
        plain = run_reference(spec, inputs, binding=binding)
    return truth, plain, rounded in called


@dataclass(frozen=True)
class _Draw:
    """Inputs, what is exact of their outputs, and bounds of these.

    Attributes:
        source, inputs: What the outputs are of; noise follows from the source's seed.
        truth: Each output that is checked, exact, in float64.
        dtypes: Types of outputs.
        held: What an output is added to in place, by output.
    """

    source: Source
    inputs: Inputs
    truth: dict[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    held: Inputs

    def disturbed(self, number: int, way: Way) -> dict[str, torch.Tensor]:
        """Run the reference with the noise of a number."""
        source = self.source
        return disturbed(source.spec, self.inputs, source.binding, source.seed + number, way)

    def addend(self, o: str, jump: torch.Tensor | None) -> float:
        """Bound the share of a norm that addend and jump may move."""
        held = self.held.get(o)
        share = 0.0 if held is None else addend_rounding(self.truth[o], self.dtypes[o], held)
        if jump is None:
            return share
        size = self.truth[o].nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-300)
        return share + float(jump.norm() / size)

    def allowed(self, runs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Bound what each element may err, by disturbed runs."""
        return {
            o: allowance(t, self.dtypes[o], [r[o] for r in runs], self.held.get(o))
            for o, t in self.truth.items()
        }

    def settle(self, o: str, allowed: dict[str, torch.Tensor]) -> bool:
        """Settle what an output may err; say whether its bits are known."""
        truth, dtype = self.truth[o], self.dtypes[o]
        if truth.ndim == 1:
            # A mean's partials are divided by the block, which need not be a power of two. Those of
            # signed values may cancel, and then err as the largest do.
            half = 0.0 if dtype is torch.float32 else unit_of(dtype)
            allowed[o] = truth.abs() * half + truth.abs().max() * _FOLD
            return False
        once = twice = _stored(truth, dtype)
        if o in self.held:
            # A kernel that adds in place may round the addend before it rounds the sum, so both
            # results are right.
            held = self.held[o].double()
            twice = _stored(truth - held, dtype) + held
        self.truth[o], allowed[o] = once, (_stored(twice, dtype) - once).abs()
        if dtype is torch.float32:
            allowed[o] += once.abs() * _SINGLE
        return True

    def certain(
        self,
        first: int,
        bounds: Mapping[str, Errors],
        rounding: Mapping[str, torch.Tensor],
        settled: Set[str],
    ) -> dict[str, Certain]:
        """Bound by many runs, from `first` on, what unsettled outputs err."""
        found = dict[str, Certain]()
        if len(settled) == len(self.truth):
            return found
        runs: list[dict[str, torch.Tensor]] = []
        for n in range(_CERTAIN + _FAR):
            finer, sign, single = _WAYS[n % len(_WAYS)]
            far = n >= _CERTAIN
            grid = (_COARSER if far else 0) if single else None
            finer *= _LARGER if far and not single else 1.0
            runs.append(self.disturbed(first + n, Way(finer, sign, grid)))
        near = self.allowed(runs[:_CERTAIN])
        for o in near.keys() - settled:
            t = self.truth[o].nan_to_num(0.0, 0.0, 0.0)
            change = largest_change(self.truth[o], [run[o] for run in runs])
            jump = change.where(change > _JUMP * t.square().mean().sqrt(), 0.0)
            share = float(jump.norm() / t.norm().clamp_min(1e-300))
            bound = replace(bounds[o], norm=bounds[o].norm + share)
            jump *= 1 + 2 * unit_of(self.dtypes[o])  # what it leads to is stored, too
            found[o] = Certain(near[o] + jump, rounding[o] + jump, bound)
        return found


def make_cases(
    spec: Spec, binding: Mapping[str, str], element: str, device: str, seed: int
) -> Iterator[Case]:
    """Make the spec's own draws, then every structure that it permits."""

    def seeded(i: int) -> int:
        return random.Random(f"{seed} {spec.variant(binding)} {element} {i}").getrandbits(62)

    for i, sizes in enumerate(spec.check_shapes):
        yield Source(spec, binding, sizes, element, device, seeded(i)).case(_PROBES)
    for i, structure in enumerate(structures(spec, binding, element), len(spec.check_shapes)):
        if structure.planted:
            # The draw is the spec's own but for what is planted, so a kernel that keeps results by
            # a few elements of its inputs gives itself away.
            i = spec.check_shapes.index(structure.sizes)
        source, case = Source(spec, binding, structure.sizes, element, device, seeded(i)), None
        for factor in structure.factors:
            case = source.case(_PROBES, structure, factor)
            if len(case.truth) == len(spec.outputs):
                break
        if case and case.truth:
            yield case


def _in_range(
    truth: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype, structure: Structure
) -> bool:
    """Whether an output is finite as PyTorch's is, not near overflow."""
    finite = truth.isfinite()
    limit = torch.finfo(dtype).max * (1.0 if dtype.itemsize == 1 else 1.0 - 2.0**-6)
    if not structure.planted and not finite.all():
        return False
    return bool(
        (plain.double().isfinite() == finite).all()
        and (torch.where(finite, truth, 0.0).abs() <= limit).all()
    )


def _settled(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Put the truth where neither is finite: order decides which comes out."""
    out = out.double()
    return torch.where(out.isfinite() | truth.isfinite(), out, truth)


def _stored(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Store a float32 value as the kernel does; e4m3 saturates."""
    top = torch.finfo(dtype).max
    return (value.clamp(-top, top) if dtype.itemsize == 1 else value).float().to(dtype).double()


def _representable(
    spec: Spec,
    inputs: Inputs,
    binding: Mapping[str, str],
    truth: Mapping[str, torch.Tensor],
) -> list[str]:
    """List the outputs that fp32 arithmetic gives without rounding.

    Their truth is a float32 everywhere, PyTorch in float32 finds exactly it, and no function that a
    GPU approximates enters.
    """
    single = run_reference(spec, inputs, binding=binding, exact=True, wide=torch.float32)
    shaken = run_reference(spec, inputs, binding=binding, exact=True, touch=approximations_shaken)
    return [
        o
        for o, t in truth.items()
        if bool(((t.float() == t) & (single[o] == t) & (shaken[o] == t)).all())
    ]
