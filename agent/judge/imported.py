"""The function that a user will import, on the spec's own inputs.

What the other gates run is a program, in tiles they choose. Here it is what `load_kernel` makes of
the accepted files: the operator with its checks, layouts, dispatch and element types.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.compare import measure, same, within
from coda_agent.agent.judge.oracle import Case, Source
from coda_agent.agent.judge.records import Finding
from coda_agent.primitives.errors import CompileError, LaunchError
from coda_agent.specs import Spec, as_declared

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program
    from coda_agent.runtime.kernel import Kernel

# torch takes the name of an operator once a process.
_MADE: dict[str, Kernel] = {}


def imported(
    spec: Spec,
    programs: Mapping[str, Program],
    tuned: Mapping[str, Any] | None = None,
    refused: Collection[str] = (),
) -> Kernel:
    """Make the function that a user would import.

    Args:
        programs: By variant name.
        tuned: What tuned.json will hold.
        refused: Labels of tiles that evidence.json will call wrong.
    """
    from coda_agent.runtime.kernel import Kernel
    from coda_agent.runtime.tile_choice import TileChoice

    tuned = tuned or {}
    data = [{v: p.to_dict() for v, p in programs.items()}, tuned, sorted(refused)]
    text = repr(spec) + json.dumps(data, sort_keys=True)
    name = f"{spec.name}_judged_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if name not in _MADE:
        first = next(iter(programs.values()))
        tiles = TileChoice(spec.name, first, tuned, frozenset(refused))
        _MADE[name] = Kernel(spec, programs, name, tiles)
    return _MADE[name]


def check_imported(
    kernel: Kernel, types: Sequence[str], *, device: str, seed: int
) -> list[Finding]:
    """Find each variant's first fault in each type, on fresh draws.

    Args:
        kernel: What `imported` makes.
        device: "cuda" runs kernels at every check shape; "cpu" the interpreter at the smallest,
            since nothing here depends on more.
        seed: What all draws follow from.
    """
    spec = kernel.spec
    shapes = sorted(spec.check_shapes, key=lambda sizes: math.prod(sizes.values()))
    findings = []
    for binding in spec.bindings():
        for element in types:
            for sizes in shapes if device == "cuda" else shapes[:1]:
                case = Source(spec, binding, sizes, element, device, seed).case()
                if said := _fault(kernel, case, binding, element):
                    where = {"program": spec.variant(binding), "dtype": element}
                    where |= {"sizes": dict(sizes), "seed": seed}
                    message = f"the function that would be imported {said}"
                    findings.append(Finding(message=message, where=where))
                    break
    return findings


def _fault(kernel: Kernel, case: Case, binding: Mapping[str, str], element: str) -> str:
    spec, layout = kernel.spec, kernel.spec.layout
    given: dict[str, Any] = as_declared(spec, case.inputs, binding)
    given = {x: v.contiguous().clone() if hasattr(v, "clone") else v for x, v in given.items()}
    types = dict.fromkeys(spec.types, element)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is interpreted, the verdict says
            outputs = kernel(**{**given, **binding})
            if fault := _packed(kernel, given, binding, outputs):
                return fault
    except (CompileError, LaunchError) as error:
        return f"refuses the spec's inputs: {error}"
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = dict(zip(spec.declared.outputs, outputs, strict=True))
    if layout is not None:
        for o, declared in spec.declared.outputs.items():
            got, wanted = str(named[o].dtype).removeprefix("torch."), declared.dtype
            if got != types.get(wanted, wanted):
                return f"gives {o} as {got}, expected {types.get(wanted, wanted)}"
        try:
            named = layout.canonical(named, case.inputs, spec.bind(binding))
        except ValueError as error:
            return f"gives another shape: {error}"
    for (o, truth), out in zip(case.truth.items(), named.values(), strict=True):
        got = str(out.dtype).removeprefix("torch."), tuple(out.shape)
        expected = spec.dtype_of(o, types), tuple(truth.shape)
        if got != expected:
            return f"gives {o} as {got[0]} {got[1]}, expected {expected[0]} {expected[1]}"
        error, limit = measure(out, truth), case.bounds[o]
        if not within(error, limit):
            return (
                f"gives a wrong {o}: error {error.norm:.2e} of its norm, {error.tile:.2e} in the "
                f"worst tile; allowed {limit.norm:.2e} and {limit.tile:.2e}"
            )
    return ""


def _packed(
    kernel: Kernel, given: Mapping[str, Any], binding: Mapping[str, str], outputs: object
) -> str:
    """Pack what the kernel takes packed; say what unpacking changes, or running it so."""
    if not kernel.packing:
        return ""
    given = dict(given)
    for name, place in kernel.packing.items():
        parts = {part.name: given.pop(part.name) for part in place.parts}
        given[name] = kernel.pack(**parts)
        extents = [p.straight(parts[p.name]).shape[-place.axis] for p in place.parts]
        for x, value in kernel.unpack(name, given[name], extents).items():
            if not same(value, parts[x]):
                return f"does not unpack {x} as it was packed"
    found = kernel.packed(**{**given, **binding})
    found, outputs = (x if isinstance(x, tuple) else (x,) for x in (found, outputs))
    alike = all(map(same, found, outputs))
    return "" if alike else "gives other values of what is packed"
