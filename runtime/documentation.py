"""What `help` says of a kernel, out of its spec."""

import math
import re
from collections.abc import Collection, Iterator

from coda_agent.runtime.user_layout import Declared
from coda_agent.specs import Spec
from coda_agent.specs.format import Output

_GRADIENTS = "by autograd, once; none of FP8 tensors, maxima and what is overwritten"


def documentation(spec: Spec, columns: Collection[str], *, exported: bool = False) -> str:
    """Write a kernel's docstring: mathematics, inputs, outputs, sizes, a call.

    An exported one has no gradients, and nothing that is made of it.
    """
    declared = spec.declared
    given = [_tensor(spec, name, x, name in columns) for name, x in declared.inputs.items()]
    made = [_tensor(spec, name, x, False) for name, x in declared.outputs.items()]
    said = [spec.summary, *_mathematics(spec)]
    packed = Declared(spec.name, spec.layout, ()) if spec.layout else None
    parts = {
        "Args": given,
        "Parameters": [*_parameters(spec)],
        "Returns": made,
        "Packed": [*_packed(packed)] if packed else [],
        "Sizes": [*_sizes(spec)],
        "Gradients": [] if exported else [_GRADIENTS],
        "Also": [] if exported else [*_more(spec)],
        "Example": [_call(spec)],
    }
    for title, lines in parts.items():
        said += ["", f"{title}:", *(f"    {line}" for line in lines)] * bool(lines)
    return "\n".join(said)


def _packed(declared: Declared) -> Iterator[str]:
    if declared.hint:
        yield from declared.hint.split("; ")
    for name in declared.packing:
        yield f"{declared.name}.unpack({name!r}, {name}.grad): gradients by the names above"


def _more(spec: Spec) -> Iterator[str]:
    """Say what else a kernel can do."""
    outputs = spec.declared.outputs
    if len(outputs) > 1:
        first = next(iter(outputs))
        yield f"{spec.name}.without({first!r}): a kernel that neither computes nor stores it"
    if any(len(shape) == 1 for x in outputs.values() for shape in x.shape.cases.values()):
        yield "block_size=128: what is reduced comes as raw partials of tiles that wide"


def _mathematics(spec: Spec) -> Iterator[str]:
    """Give the formulas of the prose, and the paragraph behind them."""
    section = re.search(r"^## Mathematics\n(.*?)(?=^## |\Z)", spec.prose, re.S | re.M)
    for part in section[1].strip("\n").split("\n\n") if section else ():
        yield from ("", part)
        if not part.startswith("    "):
            return


def _tensor(spec: Spec, name: str, tensor: Output, column: bool) -> str:
    shapes = tensor.shape.cases.values()
    shown = " or ".join(f"({', '.join(map(str, s))}{',' * (len(s) == 1)})" for s in shapes)
    said = f"{shown} {' or '.join(spec.types.get(tensor.dtype, (tensor.dtype,)))}"
    match getattr(tensor, "domain", None):
        case (0.0, math.inf):
            said += ", positive"
        case (low, high):
            said += f", from {low:g} to {high:g}"
    if column:
        said += f", from 0 to {spec.gemm_dims[1]} - 1: a CPU refuses another, and a GPU "
        said += "takes 0 for its element"
    return f"{name}: {said}"


def _parameters(spec: Spec) -> Iterator[str]:
    for name, values in spec.parameters.items():
        yield f"{name}: {' or '.join(map(repr, values))}, by default the first"
    if place := spec.in_place:
        where = " and ".join(f"{name}={value!r}" for name, value in place.when.items())
        said = f"{place.output} overwrites {place.input}"
        yield f"{said} where {where}" if where else said


def _sizes(spec: Spec) -> Iterator[str]:
    for name, dim in spec.declared.dims.items():
        if dim.only:
            yield f"{name}: {dim.only}"
        elif dim.multiple_of > 1:
            yield f"{name}: a multiple of {dim.multiple_of}"


def _call(spec: Spec) -> str:
    return f"{', '.join(spec.declared.outputs)} = {spec.name}({', '.join(spec.declared.inputs)})"
