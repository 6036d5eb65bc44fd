"""What is wrong with a spec, as its text alone tells."""

from __future__ import annotations

import ast
import itertools
import keyword
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from coda_agent import primitives
from coda_agent.primitives.kinds import GEMM_DTYPES
from coda_agent.specs.format import DTYPES, Header, Output, Spec, evaluate
from coda_agent.specs.layout import factors, parts, shown

_RESERVED = {"acc", "block_size", "self"}


def declared_faults(spec: Header) -> Iterator[str]:
    """Yield what is wrong with declarations alone; later ones trust earlier ones."""
    names = [*spec.inputs, *spec.outputs, *spec.parameters]
    values = itertools.chain(*spec.parameters.values())
    for name in [spec.name, *names, *spec.dims, *spec.types, *values]:
        plain = name.isidentifier() and name.isascii()
        if not plain or keyword.iskeyword(name) or "__" in name:
            yield (
                f"name {name!r} must be a Python identifier of ASCII letters without a double "
                "underscore"
            )
    for name in sorted(_RESERVED.intersection(names)):
        yield f"name {name!r} is one that a kernel's own call has, use another"
    if spec.name in primitives.__all__:  # its program could not import that
        yield f"name {spec.name!r} is a primitive's, use another, such as gemm_{spec.name}"
    for name, count in Counter(names).items():
        if count > 1:
            listed = "inputs, outputs and parameters"
            yield f"name {name!r} is declared twice among {listed}; rename one"
    for name, choices in {**spec.types, **spec.parameters}.items():
        if not choices or len(set(choices)) != len(choices):
            yield f"{name!r} lists {shown(choices)}; expected one or more distinct choices"
    for name, choices in spec.types.items():
        for dtype in sorted(set(choices) - set(DTYPES)):
            yield f"type {name}: unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}"
    for name, tensor in [*spec.inputs.items(), *spec.outputs.items()]:
        yield from _tensor_faults(spec, name, tensor)
    for name in sorted({x for side in spec.gemm for x in side.split()} - set(spec.inputs)):
        yield f"gemm: {name!r} is not an input; expected two of {', '.join(spec.inputs)}"
    for name in sorted(set(spec.split) - set(spec.outputs)):
        yield f"split: {name!r} is not an output; expected some of {', '.join(spec.outputs)}"


def faults(spec: Spec) -> Iterator[str]:
    """Yield contradictions of a canonical spec; lazily likewise."""
    a, b = (spec.inputs[name].shape.cases.get("", ()) for name in spec.gemm)
    if len(a) != 2 or len(b) != 2 or a[1] != b[1] or len({*a, *b} & set(spec.dims)) != 3:
        got = f"{spec.gemm[0]} {shown(a)} and {spec.gemm[1]} {shown(b)}"
        yield f"gemm: shapes {got}; expected [M, K] and [N, K] over three dims"
    if (place := spec.in_place) is not None:
        pair = spec.outputs.get(place.output), spec.inputs.get(place.input)
        faces = [(t.shape, t.dtype) for t in pair if t is not None]
        if len(faces) < 2 or faces[0] != faces[1]:
            yield (
                f"in_place: {place.output} and {place.input} are not an output and an input of one "
                "shape and dtype; expected such a pair"
            )
        for name, value in place.when.items():
            if value not in spec.parameters.get(name, ()):
                yield f"in_place: no {name}={value}; expected a parameter and one of its values"
    yield from _kernel_faults(spec)
    for sizes in (*spec.check_shapes, *spec.bench_shapes):
        spec.check_sizes(sizes)
        known = spec.layout.sizes(sizes) | sizes if spec.layout else sizes
        for fault, declaration in size_faults(spec, sizes):
            yield f"{fault}; declare {declaration}"
        for name, tensor in spec.inputs.items():
            try:
                kind, args = tensor.draw.kind, [evaluate(arg, known) for arg in tensor.draw.args]
            except ValueError as error:
                yield f"inputs.{name}.draw: {error}"
                continue
            if kind == "normal" and args[0] <= 0:
                yield f"inputs.{name}.draw: expected a positive std, got {args[0]}"
            bounds = [math.floor(arg) for arg in args] if kind == "integers" else args
            if kind in ("uniform", "integers") and bounds[0] >= bounds[1]:
                yield f"inputs.{name}.draw: expected LO < HI, got {bounds}"
            if (domain := tensor.domain) is not None:
                if kind in ("normal", "integers") or min(args) < domain[0] or max(args) > domain[1]:
                    yield (
                        f"inputs.{name}: its draw leaves its domain; expected `uniform` or "
                        f"`constant` within {list(domain)}"
                    )
    yield from _reference_faults(spec)


def _tensor_faults(spec: Header, name: str, tensor: Output) -> Iterator[str]:
    if tensor.dtype not in (*DTYPES, *spec.types):
        known = ", ".join([*spec.types, *DTYPES])
        step = {
            "int8": "; multiply in float8_e4m3fn, or bring it to the type of A before",
            "uint8": "; multiply in float8_e4m3fn, or bring it to the type of A before",
            "bool": "; give or return numbers, and compare them in the call",
        }.get(tensor.dtype, "")
        if name in spec.outputs and re.fullmatch(r"(u?int|float)\d+", tensor.dtype):
            step = "; return it as float32, and cast it with torch"
        yield f"{name}: unknown dtype {tensor.dtype!r}; expected one of {known}{step}"
    parameter, cases = tensor.shape
    if parameter and set(cases) != set(spec.parameters.get(parameter, ())):
        yield f"{name}: shape cases {', '.join(cases)} are not the values of {parameter!r}"
    for entry in itertools.chain(*cases.values()):
        if isinstance(entry, int):
            continue
        for _, dim, divisor in map(parts, factors(entry)):
            if dim not in spec.dims:
                yield f"{name}: dim {dim!r} is not declared; expected one of {', '.join(spec.dims)}"
            elif spec.dims[dim].multiple_of % divisor:
                yield f"{name}: {entry} needs dim {dim} to be declared multiple_of: {divisor}"


def _kernel_faults(spec: Spec) -> Iterator[str]:
    first, _ = spec.gemm
    for symbol, choices in spec.types.items():
        if symbol != spec.inputs[first].dtype and (len(choices) > 1 or len(spec.types) > 1):
            yield (
                f"types: {symbol} is not the type of {first}, by which a kernel chooses all "
                f"others; expected a concrete type, of {', '.join(choices)}, in its place"
            )
    for types in spec.type_choices():
        a, b = (spec.dtype_of(name, types) for name in spec.gemm)
        if a != b or a not in GEMM_DTYPES:
            why = "a tensor core multiplies no two types" if a != b else "kernels are of these"
            yield (
                f"gemm: {spec.gemm[0]} is {a} and {spec.gemm[1]} {b}; expected one type for both, "
                f"of {', '.join(GEMM_DTYPES)}, since {why}: cast what is given in the call"
            )
        for o, binding in itertools.product(spec.outputs, spec.bindings()):
            yield from _output_faults(spec, o, spec.dtype_of(o, types), binding)


def _output_faults(spec: Spec, o: str, dtype: str, binding: dict[str, str]) -> Iterator[str]:
    floats = [known for known in DTYPES if "float" in known]
    if dtype not in floats:
        known = ", ".join(floats)
        yield (
            f"{o}: outputs are floating-point, not {dtype}; expected one of {known}; return what"
            f" {o} is made of, and make it with torch"
        )
    m, n, _ = spec.gemm_dims
    shape = spec.symbolic_shape(o, binding)
    # What is gathered by an index a row may have 16 bits; any other vector is a reduction.
    gathers = any(
        spec.symbolic_shape(x, binding) == (m,) and tensor.dtype in ("int32", "int64")
        for x, tensor in spec.inputs.items()
    )
    narrow = dtype != "float32" and not (gathers and DTYPES[dtype] == 2)
    if (shape == (n,) and dtype != "float32") or (shape == (m,) and narrow):
        yield f"{o}: reductions are stored in float32, not {dtype}; declare and return float32"


def size_faults(spec: Spec, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """List sizes that a kernel refuses, and what disallows them."""
    for dim, step in zip(spec.gemm_dims[1:], spec.steps(), strict=True):
        if sizes[dim] % step:
            yield (
                f"{dim}={sizes[dim]}: a kernel of these types takes multiples of {step}, since TMA "
                "moves rows in units of 16 bytes",
                f"{dim}: {{multiple_of: {step}}}",
            )


def _reference_faults(spec: Spec) -> Iterator[str]:
    try:
        tree = ast.parse(spec.reference_source)
    except SyntaxError as error:
        line = spec.reference_line + (error.lineno or 1) - 1
        yield f"line {line}: reference has a syntax error: {error.msg}"
        return
    expected = [*spec.declared.inputs, *spec.parameters]
    listed = ", ".join(expected)
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "reference"]
    if len(found) != 1:
        yield f"block defines reference {len(found)} times; expected `def reference({listed})`"
    given = found[0].args
    for argument in ast.walk(given):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    plain, named = given.args, given.kwonlyargs
    constants = {a.arg for a in plain[len(plain) - len(given.defaults) :]}
    constants |= {a.arg for a, default in zip(named, given.kw_defaults, strict=True) if default}
    # What has a default may be left undeclared: it is a constant then.
    taken = [a.arg for a in (*plain, *named) if a.arg in expected or a.arg not in constants]
    if taken != expected or given.vararg or given.kwarg or given.posonlyargs:
        yield f"reference takes ({ast.unparse(given)}); expected ({listed})"
