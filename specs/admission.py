"""Admission: a spec whose reference proves nothing is refused at once."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.rounding import rounded as rounding
from coda_agent.specs.format import Spec
from coda_agent.specs.layout import shown
from coda_agent.specs.names import reached
from coda_agent.specs.reference import (
    as_declared,
    cast_to,
    draw_inputs,
    kept,
    narrow,
    reference_callable,
    run_reference,
    storage,
)
from coda_agent.specs.tracing import tensors

if TYPE_CHECKING:
    Values = Mapping[str, torch.Tensor | float]
    _Outputs = Mapping[str, torch.Tensor]

# A row-wise output of a one-row check shape is a single element, which is always "constant"; and of
# few rows chance may make an operand matter little.
_ADMISSION_ELEMENTS = 64
_REDRAWS = 3
# By this share of its exact value is an element far off. Where rounding decides a remainder, or
# which value is the largest, few are; of a reference that computes something else, most.
_FAR = 0.25
# Values are drawn such that outputs are near 1: one so large is a mask, or a draw amiss.
_LARGE = 1000
_FILLED = (
    "leave such a mask to what reads the output, as a softmax does, or fill with a number of the"
    " others' size"
)
# How far a row is moved, and the least number of elements of which chance makes no two moves alike.
_STEP, _ALIKE = 1e-6, 8
# Functions of torch that move values and compute nothing.
_MOVES = frozenset(
    """
    cat chunk clone concat contiguous detach expand flatten flip movedim permute repeat reshape roll
    split squeeze stack t transpose unbind unflatten unsqueeze view __getitem__ __get__
    """.split()  # noqa: SIM905
)


def admit(spec: Spec) -> None:
    """Run a spec's reference on CPU, and refuse one that proves nothing.

    It runs for every binding and element type, at the smallest check shape of several rows whose
    outputs are not tiny, and in this process: one that is not ours belongs into a child.

    Raises:
        SpecError: The reference raises; an output of another shape or dtype than declared,
            non-finite, zero or constant; an input changed in place; no output that needs both GEMM
            operands and their product; something that could be left out, or guessed, within the
            tolerance; or a value that is rounded and computed on.
    """
    shapes = sorted(spec.check_shapes, key=lambda sizes: math.prod(sizes.values()))
    for binding in spec.bindings():
        for sizes in shapes:
            elements = min(math.prod(spec.shape_of(name, sizes, binding)) for name in spec.outputs)
            if elements >= _ADMISSION_ELEMENTS and sizes[spec.gemm_dims[0]] > 1:
                break
        else:
            sizes = shapes[-1]
        checks = [partial(_misdeclared, spec, sizes, x, binding) for x in spec.type_choices()]
        checks.append(partial(_degeneracy, spec, sizes, spec.default_types(), binding))
        for check in checks:
            if fault := check():
                raise SpecError(f"{spec.path}: {spec.variant(binding)}: {fault}")


def answers(spec: Spec, *, backwards: bool = False) -> dict[str, str]:
    """Run the reference at its smallest check shape, maybe in reverse order.

    Returns:
        A digest of each output, by what was run. A function gives the same in any order, and in any
        process.

    Raises:
        SpecError: it goes beyond what a reference may import, or keeps something between calls.
    """
    if found := reached(spec.reference_source):
        line, does = found
        where = f"{spec.path}:{spec.reference_line + line - 1}"
        hint = "a reference computes with its arguments and torch, and with nothing else"
        raise SpecError(f"{where}: the reference {does}", hint=hint)
    sizes = min(spec.check_shapes, key=lambda sizes: math.prod(sizes.values()))
    runs = [*itertools.product(spec.bindings(), spec.type_choices(), (False, True), (0, 1))]
    before, found = kept(spec), dict[str, str]()
    for binding, types, exact, seed in reversed(runs) if backwards else runs:
        inputs = draw_inputs(spec, sizes, types, seed=seed, binding=binding)
        about = (
            f"{spec.variant(binding)} {' '.join(types.values())}{' exactly' * exact}, draw {seed}"
        )
        for o, value in run_reference(spec, inputs, binding=binding, exact=exact).items():
            data = value.contiguous().view(torch.uint8).numpy().tobytes()
            found[f"{o} of {about}"] = hashlib.sha256(data).hexdigest()
    after = kept(spec)
    if changed := [name for name in after if after[name] != before.get(name)]:
        message = f"{spec.path}: the reference changes {changed[0]}, which the next call would see"
        raise SpecError(message, hint="a reference computes with its arguments alone")
    return found


def _misdeclared(
    spec: Spec, sizes: Mapping[str, int], types: Mapping[str, str], binding: Mapping[str, str]
) -> str:
    """Say what the reference does beside what is declared."""
    inputs = draw_inputs(spec, sizes, types, seed=0, binding=binding)
    versions = {k: v._version for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    declared = {spec.dtype_of(name, types) for name in (*spec.inputs, *spec.outputs)}
    with _rounding_is_meant(spec, {getattr(torch, name) for name in declared}):
        outputs = run_reference(spec, inputs, binding=binding)
    for name, version in versions.items():
        if getattr(inputs[name], "_version", version) != version:
            return f"the reference changes its input {name!r} in place; expected a new tensor"
    for name, value in outputs.items():
        shape, dtype = spec.shape_of(name, sizes, binding), spec.dtype_of(name, types)
        got = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if got != (shape, dtype):
            faces = f"{got[1]} {shown(got[0])}; expected {dtype} {shown(shape)}"
            return f"output {name!r} is {faces}, as it is declared: change one of the two"
    if spec.layout:  # the canonical ones of a row's numbers are float32, whatever is declared
        call = reference_callable(spec, binding)
        for name, value in call(**as_declared(spec, inputs, binding)).items():
            due = spec.declared.outputs[name].dtype
            due, kind = types.get(due, due), str(value.dtype).removeprefix("torch.")
            if kind != due:
                said = f"output {name!r} is {kind}; expected {due}"
                return f"{said}, as it is declared: change one of the two"
    for name, exact in run_reference(spec, inputs, binding=binding, exact=True).items():
        left = outputs[name].double().isinf() & exact.isfinite()
        if left.any():
            dtype, reach = spec.dtype_of(name, types), float(exact.double().abs()[left].max())
            return (
                f"output {name!r} reaches {reach:.1e} on the spec's draws, and {dtype} ends at"
                f" {torch.finfo(outputs[name].dtype).max:.3g}; draw smaller values, declare another"
                " type, or scale the output"
            )
        off = (outputs[name].double() - exact.double()).abs() > _FAR * exact.double().abs()
        if (share := float(off.double().mean())) > 0.5:
            dtype, far = spec.dtype_of(name, types), f"{_FAR:.0%} away from itself in float64"
            said = f"output {name!r} in {dtype} is over {far}, in {share:.0%} of its elements"
            return f"{said}; compute it in float32, or draw smaller values"
    return ""


def _rounding_is_meant(
    spec: Spec, declared: Collection[torch.dtype]
) -> AbstractContextManager[object]:
    """Refuse, within, to compute on what only this run rounds.

    Rounded is what is cast to 8 bits, or to 16 in a type that this run does not declare. The exact
    run rounds as well at a cast to a `narrow` type, moves, and a cast on; anything else that rounds
    is lost on it.
    """
    from torch.overrides import TorchFunctionMode

    # By address, with whether the exact run follows; the tensors are kept, so that none is used
    # again.
    rounded: dict[int, tuple[torch.Tensor, bool]] = {}

    def rounds(source: torch.dtype, target: torch.dtype) -> bool:
        if not (source.is_floating_point and target.is_floating_point):
            return False
        if target.itemsize > 2 or (target.itemsize == 2 and target in declared):
            return False
        one, other = torch.finfo(source), torch.finfo(target)
        return other.eps > one.eps or other.max < one.max

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
        ) -> object:
            result = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            if name.endswith("_like") or name.startswith("new_"):
                return result  # it reads no values
            written = tensors(args[:1] if name == "__setitem__" else result)
            cast = cast_to(func, args, kwargs or {})
            for source, target in itertools.product(tensors((args, kwargs)), written):
                known, followed = rounded.get(storage(source), (None, False))
                fresh = known is not None and storage(target) != storage(source)
                on = cast if followed and cast else source.dtype
                if fresh and (target.dtype != on or (not cast and name not in _MOVES)):
                    short = str(source.dtype).removeprefix("torch.")
                    raise SpecError(
                        f"the reference rounds to {short} and computes on with {name}; a program "
                        "computes in float32: cast a rounded value on by .to() before anything "
                        "else, return it as an output of that type, or leave the cast out"
                    )
                if rounds(source.dtype, target.dtype):
                    rounded[storage(target)] = target, cast is not None and narrow(spec, cast)
                elif known is not None and target.dtype == source.dtype:
                    rounded[storage(target)] = target, followed
            return result

    return Watch()


def _degeneracy(
    spec: Spec, sizes: Mapping[str, int], types: Mapping[str, str], binding: Mapping[str, str]
) -> str:
    """Say what a verdict on the spec would not show, if anything."""
    inputs = draw_inputs(spec, sizes, types, seed=0, binding=binding)
    other = draw_inputs(spec, sizes, types, seed=1, binding=binding)
    rounded = run_reference(spec, inputs, binding=binding)

    def exact(values: Values) -> dict[str, torch.Tensor]:
        return run_reference(spec, values, binding=binding, exact=True)

    truth, redrawn = exact(inputs), exact(other)
    for name in spec.outputs:
        for value in (rounded[name].double(), truth[name].double()):
            if value.isinf().any() and not value.isnan().any():
                return f"output {name!r} has infinite values, which nothing compares; {_FILLED}"
            if not value.isfinite().all():
                return f"output {name!r} has non-finite values; expected a `draw` without"
            if not value.any():
                return f"output {name!r} is all zero; draw what moves it, or leave it out"
            if value.numel() > 1 and (value == value.flatten()[0]).all():
                return f"output {name!r} is constant; draw what moves it, or leave it out"
        if torch.equal(truth[name], redrawn[name]):
            return f"output {name!r} is constant: it depends on no input; leave it out"
    moved = [exact({**inputs, operand: other[operand]}) for operand in spec.gemm]
    if not any(all(not torch.equal(truth[n], run[n]) for run in moved) for n in spec.outputs):
        operands = " and ".join(spec.gemm)
        return f"no output depends on both GEMM operands, {operands}; return what they give"

    def smooth(values: Values) -> dict[str, torch.Tensor]:
        """Run the exact reference without roundings, which hide small moves."""
        return run_reference(
            spec, values, binding=binding, exact=True,
            touch=lambda function, args, result: args[0] if function is rounding else result,
        )  # fmt: skip

    if fault := _needless(spec, inputs, smooth(inputs), smooth):
        return fault
    drawn = [draw_inputs(spec, sizes, types, seed=1 + i, binding=binding) for i in range(_REDRAWS)]
    left_out = {
        x: [exact({**inputs, x: values[x]}) for values in drawn]
        for x, tensor in spec.inputs.items()
        if tensor.draw.kind != "constant"
    }
    # Of a sum of what A gives and what B gives, this is 0: what is left needs their product.
    a, b = spec.gemm
    both = exact({**inputs, a: drawn[0][a], b: drawn[0][b]})
    one, two = left_out[a][0], left_out[b][0]
    left_out[f"{a} {b}ᵀ"] = [{o: one[o] + two[o] - both[o] for o in truth}]
    return _swallowed(spec.tolerance.multiple, rounded, truth, left_out)


def _needless(
    spec: Spec, inputs: Values, truth: _Outputs, exact: Callable[[Values], _Outputs]
) -> str:
    """Say whether a product with one vector would give all outputs.

    Then they follow from sums of B's rows, or of A's, with weights that are the same for every row
    of the product, or every column.

    Such an output moves alike, but for a factor, whichever rows of the operand are moved, as long
    as all move in one direction of K. One that needs the product does not.
    """
    draws, needless = torch.Generator().manual_seed(0), dict[str, str]()
    for operand, other in (spec.gemm[::-1], spec.gemm):
        held = torch.as_tensor(inputs[operand]).double()
        towards = torch.randn(held.shape[1], generator=draws, dtype=torch.float64)
        towards *= _STEP * held.abs().mean()
        rows = torch.randn(2, held.shape[0], 1, generator=draws, dtype=torch.float64)
        moved = [exact({**inputs, operand: held + row * towards}) for row in rows]
        for o, value in truth.items():
            one, two = ((run[o] - value).flatten() for run in moved)
            alike = (one @ two).square() >= (1 - 1e-9) * one.square().sum() * two.square().sum()
            # What is rounded to integers does not move at all, and so tells nothing.
            if alike and one.any() and two.any() and value.numel() >= _ALIKE:
                needless[o] = f"{other} @ {operand}.sum(0)"
    if needless.keys() != truth.keys():
        return ""
    instead = next(iter(needless.values()))
    return f"no output needs a GEMM: a product with a vector, like {instead}, gives each"


def _swallowed(
    multiple: float, rounded: _Outputs, truth: _Outputs, left_out: Mapping[str, Sequence[_Outputs]]
) -> str:
    """Say what would pass without being computed, if anything.

    Args:
        multiple: The spec's tolerance.
        rounded: The reference's outputs in the spec's own types.
        truth: The same, exact.
        left_out: By input, or product, exact outputs with other values of it, or without it.
    """
    everything = [run for runs in left_out.values() for run in runs]
    # What a mask fills says nothing of the rest, of which the judge bounds each element.
    moved = {o: torch.stack([run[o] != truth[o] for run in everything]).any(0) for o in truth}

    held = dict[str, tuple[torch.Tensor, torch.Tensor, float]]()
    for o in truth:
        exact, own = (x[moved[o]] for x in (truth[o], rounded[o].double()))
        norm, least = exact.norm(), max(torch.finfo(rounded[o].dtype).eps, 2.0**-12)
        held[o] = exact, norm, max(least, float(multiple * (own - exact).norm() / norm))

    def near(o: str, guess: torch.Tensor) -> bool:
        """Tell whether the judge allows a guess at an output."""
        exact, norm, allowed = held[o]
        return float((guess[moved[o]] - exact).norm() / norm / allowed) <= 1

    for o, exact in truth.items():
        guesses = {"a constant": exact.mean().expand_as(exact)}
        for axis, name in enumerate(("row", "column")[: exact.ndim]):
            if exact.shape[axis] > 1:
                guesses[f"another {name}'s values"] = exact.roll(1, axis)
        for what, guess in guesses.items():
            if exact.numel() > 1 and near(o, guess):
                said = f"output {o!r} is within its tolerance of {what}; draw what moves it more"
                return _hidden({o: exact}) or said
        if exact.ndim == 2 and min(exact.shape) > 2:
            first, second = torch.linalg.svdvals(exact)[:2]
            if second < 1e-3 * first:
                said = f"output {o!r} is within 0.1 % of a column times a row"
                return f"{said}; return the factors, or fill what is masked with a smaller number"
    for x, runs in left_out.items():
        if all(near(o, run[o]) for run in runs for o in truth):
            said = f"no output depends on {x!r} by more than its tolerance"
            return _hidden(truth) or f"{said}; draw larger ones, or leave it out"
    return ""


def _hidden(truth: _Outputs) -> str:
    """Say which output has values beside which no tolerance shows others."""
    for o, exact in truth.items():
        if (largest := exact.abs().max()) >= _LARGE:
            return f"output {o!r} holds {largest:.1e}, which hides all else; {_FILLED}"
    return ""
