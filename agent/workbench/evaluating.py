"""Programs on a few numbers, beside the reference in float64.

A program is that of the candidate, of an earlier attempt, or of an expression. Its graph is
replayed. The numbers are given ones, a draw of the spec, or those on which the check failed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from coda_agent import primitives
from coda_agent.agent.judge import Finding
from coda_agent.agent.judge.diagnosis import read_at
from coda_agent.agent.judge.meaning import meaning_fault
from coda_agent.agent.judge.oracle import make_cases
from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.runners import interpreted, replayed
from coda_agent.agent.judge.structures import base_shape
from coda_agent.agent.workbench.registry import ToolError
from coda_agent.primitives.errors import ProgramError, TextError
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.resources import OPERAND_KINDS, ColIndex
from coda_agent.specs import Spec, draw_inputs, run_reference

SHOWN = 6  # elements of an output
_SEED = 0
_OUTPUTS = ("Tile", "HalfTile", "WideTile", "RowGather")  # what an expression may be stored as


def written(spec: Spec, binding: Mapping[str, str], expression: str) -> Program:
    """Read an expression, after assignments, as a program that stores `value`.

    Raises:
        ToolError: it is empty.
        ProgramError: it is not in the language, or no output can store it.
    """
    m, n, _ = spec.gemm_dims
    if not expression.strip():
        raise ToolError("the expression is empty")
    *lines, last = (line.strip() for line in expression.strip().splitlines())
    declared, names = ["acc"], set(re.findall(r"[A-Za-z_]\w*", expression))
    for x in spec.inputs:
        shape = tuple(str(d) for d in spec.symbolic_shape(x, binding))
        kinds = [k for k in OPERAND_KINDS.values() if k.named(m, n) == shape]
        if spec.inputs[x].draw.kind == "integers":
            kinds = [ColIndex]
        # One that is not used would be refused, as in any program.
        if kinds and x not in spec.gemm and x in names:
            declared.append(f"{x}: {kinds[0].__name__}")
    body = "".join(f"    {line}\n" for line in lines)
    kinds = {line.partition(": ")[2] for line in declared[1:]}
    used = {"epilogue", *kinds, *names.intersection(primitives.__all__)}
    refused: TextError | None = None
    for kind in _OUTPUTS:
        text = (
            f"from coda_agent.primitives import {', '.join(sorted({*used, kind}))}\n\n\n"
            f"@epilogue(value={kind})\n"
            f"def expression({', '.join(declared)}):\n{body}    return {{'value': {last}}}\n"
        )
        try:
            return read_programs(text)["expression"]
        except TextError as error:
            refused = refused or error
    assert refused is not None
    # Without its line, which nobody wrote.
    raise ProgramError(refused.faults[0].message, hint=refused.hint)


def inputs_of(
    spec: Spec, binding: Mapping[str, str], values: Mapping[str, float | list[float]],
    drawn: Inputs | None = None,
) -> Inputs:  # fmt: skip
    """Take a draw, by default one of the spec's own, with given values.

    Raises:
        ToolError: a value for what is no operand.
    """
    if drawn is None:
        drawn = draw_inputs(
            spec, base_shape(spec), spec.default_types(), seed=_SEED, binding=binding
        )
    inputs: dict[str, Any] = {
        x: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for x, v in drawn.items()
    }
    a, b = spec.gemm
    known = ["acc", *(x for x in inputs if x not in (a, b))]
    if unknown := sorted(set(values) - set(known)):
        raise ToolError(f"no operand named {unknown[0]!r}", hint=f"there are {', '.join(known)}")
    if "acc" in values:  # A of the wanted product and B = 1 give it, as below
        inputs[a] = inputs[a] @ inputs[b].mT
    for x, given in values.items():
        row = torch.tensor(given if isinstance(given, list) else [given], dtype=torch.float64)
        old = inputs[a if x == "acc" else x]
        if not getattr(old, "ndim", 0):
            inputs[x] = float(row[0])
            continue
        of_columns = old.ndim == 2 or len(old) == len(inputs[b])
        place = old[0] if old.ndim == 2 else old if of_columns else old[:1]
        place.copy_(row.repeat(-(-len(place) // len(row)))[: len(place)])
    if "acc" in values:  # an infinity is B's, in every row: 0 times one in A is NaN
        row, finite = inputs[a][0], inputs[a][0].float().isfinite()
        inputs[b] = torch.diag(row.masked_fill(finite, 1.0))
        inputs[a] = inputs[a].where(finite, 1.0)
    return inputs


def failing_inputs(spec: Spec, binding: Mapping[str, str], text: str, finding: Finding) -> Inputs:
    """Draw again the inputs on which a candidate of this text failed.

    Raises:
        ToolError: it failed on none that can be shown.
    """
    where, hint = finding.where, "leave `failing` out"
    if "seed" not in where:
        raise ToolError("the check failed on no numbers", hint=hint)
    seed, label = where["seed"], where.get("case", "")
    if "dtype" in where:
        cases = make_cases(spec, binding, where["dtype"], "cpu", seed)
        return next(c for c in cases if c.label == label and dict(c.sizes) == where["sizes"]).inputs
    found = meaning_fault(spec, read_programs(text)[spec.variant(binding)], binding, seed)
    if not found or label.startswith("from row"):
        raise ToolError(f"what failed {label or 'then'} is not drawn again", hint=hint)
    return found[1]


def table(
    spec: Spec, binding: Mapping[str, str], programs: Mapping[str, Program],
    inputs: Inputs, *, given: int = 0, element: str = "",
) -> str:  # fmt: skip
    """Say what programs give at some elements, beside the truth.

    Shown are `given` columns of the first row, else the elements that differ most. What is stored
    has the spec's first element type by default.
    """
    chosen = dict.fromkeys(spec.types, element) if element else spec.default_types()
    truth = run_reference(spec, inputs, binding=binding, exact=True)
    types = {o: getattr(torch, spec.dtype_of(o, chosen)) for o in spec.outputs}
    ran = dict[str, _Ran]()
    for name, p in programs.items():
        stored = {o: types.get(o, torch.float32) for o in p.outputs}
        exact = replayed(spec, p, {**inputs})
        ran[name] = _Ran(p, exact, interpreted(spec, p, {**inputs}, dtypes=stored))
    outputs = dict.fromkeys(o for p in programs.values() for o in p.outputs)
    return "\n".join(line for o in outputs for line in _rows(spec, o, truth, ran, inputs, given))


class _Ran(NamedTuple):
    """A program, and what it gave exactly and as it is stored."""

    program: Program
    exact: Mapping[str, torch.Tensor]
    stored: Mapping[str, torch.Tensor]


def _rows(
    spec: Spec, o: str, truth: Mapping[str, torch.Tensor], ran: Mapping[str, _Ran],
    inputs: Inputs, given: int,
) -> Iterator[str]:  # fmt: skip
    having = {name: r for name, r in ran.items() if o in r.exact}
    program, first = next((r.program, r.exact[o]) for r in having.values())
    # An expression stands beside the outputs of its shape.
    beside = {x: v for x, v in truth.items() if (x == o if o in truth else v.shape == first.shape)}
    yield f"{o} {tuple(first.shape)}"
    columns = given * first.shape[-1] // len(inputs[spec.gemm[1]]) if first.ndim == 2 else given
    shown = max(1, columns) if given else 0
    for place in _places(first, next(iter(beside.values()), None), shown):
        said = [f"{x} {_number(v)}" for x, v in read_at(spec, program, inputs, first, place)]
        said += [f"reference {x} {_number(v[place])}" for x, v in beside.items()]
        for name, r in having.items():
            stored = _number(r.stored[o][place])
            said.append(f"{name} {_number(r.exact[o][place])} (stored {stored})")
        yield f"  {list(place)}: {'; '.join(said)}"


def _places(
    value: torch.Tensor, truth: torch.Tensor | None, given: int
) -> Iterable[tuple[int, ...]]:
    """Indices of the elements that are shown."""
    if given:
        columns = range(min(given, SHOWN * 2, value.shape[-1] if value.ndim == 2 else 1))
        return [(0, j) if value.ndim == 2 else (j,) for j in columns]
    off = torch.zeros_like(value)
    if truth is not None:
        off = (value - truth).abs() / truth.abs().clamp_min(1e-290)
        off[(value == truth) | (value.isnan() & truth.isnan())] = 0.0  # two infinities give NaN
    worst = off.nan_to_num(torch.inf).flatten().topk(min(SHOWN // 2, off.numel())).indices.tolist()
    places = [*worst, *range(min(SHOWN, off.numel()))]
    width = value.shape[-1]
    return itertools.islice(
        ((divmod(i, width) if value.ndim == 2 else (i,)) for i in dict.fromkeys(places)), SHOWN
    )


def _number(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_number, value))})"
    return f"{float(value):.6g}"
