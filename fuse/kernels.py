"""Kernels of regions, with an accepted kernel's tiles or the prior's."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.join import Composition
from coda_agent.agent.authors.composer.ports import Port, Sized
from coda_agent.fuse.regions import Cut, Region, cut, ports_of
from coda_agent.primitives.errors import MachineError, ProgramError, WorkspaceError
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import RowGather, Scalar
from coda_agent.primitives.spread import packed
from coda_agent.runtime.program_operator import folds_of, program_text
from coda_agent.runtime.tensor_checks import dtype_name
from coda_agent.specs import Spec, load_spec

if TYPE_CHECKING:
    from coda_agent.agent.workspace import Kernel as Entry


_Known = tuple[bool, "Entry", list[str], Program]
"""Whether an accepted kernel computes more, it, the types of the rest, and the program of that."""


@dataclass(frozen=True)
class Kernel:
    """What runs a region.

    Attributes:
        text: It, as the operator `coda_agent::kernel` takes it.
        like: The name of the accepted kernel whose tiles it has; or "".
        accepted: Whether that computes the same.
        times: How long it takes, and Inductor's code, where they were timed.
    """

    text: str
    like: str
    accepted: bool
    times: str = ""


def chosen(graph: fx.Graph) -> tuple[Cut, dict[Region, Kernel]]:
    """Cut a graph into regions, and choose the kernel of each."""
    known, kernels = cut(graph), dict[Region, Kernel]()
    for region in [*known.regions]:
        try:
            kernels[region] = kernel_of(region.local)
        except ProgramError as error:
            known.leave(region, error.message)
    return known, kernels


def kernel_of(composition: Composition) -> Kernel:
    """Choose the kernel of a composition.

    Raises:
        ProgramError: it does not store a type that the graph has.
    """
    entry, same = twin(composition)
    stored, dtype = stored_types(composition), dtype_name(composition.a.dtype)
    like = str(entry.folder) if entry else ""
    text = program_text(composition.program, stored, dtype, like)
    return Kernel(text, entry.name if entry else "", same)


def called(
    composition: Composition, text: str, entered: Callable[[Port], Any], sized: Sized = list
) -> dict[fx.Node | None, Any]:
    """Call a composition's kernel on tensors, or on proxies of nodes.

    Args:
        composition: It.
        text: The kernel, as the operator takes it.
        entered: From a port to the kernel's tensor.
        sized: What stands for sizes.

    Returns:
        Its results, by the nodes whose values they are.
    """
    a, b, operands = arguments(composition, entered)
    stored = torch.ops.coda_agent.kernel.default(a, b, operands, program=text)
    kinds, results = composition.program.outputs, dict[fx.Node | None, Any]()
    names, folds = [*kinds], folds_of(text)
    for port in composition.outputs.values():
        x = stored[names.index(port.name)]
        x = _folded(x, *folds[port.name]) if port.name in folds else x
        x = port.restored(x, sized)
        # A cast to the type that a value has copies it under AOTAutograd, where it is a slice.
        in_float32 = issubclass(kinds[port.name], Reduction | RowGather)
        results[port.node] = _convert(x, port.dtype) if in_float32 else x
    return results


def arguments(composition: Composition, entered: Callable[[Port], Any]) -> tuple[Any, Any, list]:
    """Make A, B and the operands of what enters by the ports."""
    a, b = entered(composition.a), entered(composition.b)
    kinds = composition.program.operands
    operands = [(kinds[x], entered(port)) for x, port in composition.operands.items()]
    return a, b, [_convert(x, torch.float32) if kind is Scalar else x for kind, x in operands]


_convert = torch.ops.prims.convert_element_type.default


def _folded(x: Any, combine: str, factor: float) -> Any:
    """Fold partials by calls that Inductor computes with what reads the values.

    It lowers each of them: in a graph of its own, calls that it decomposes no longer compile.
    A launch for the fold alone takes an H200 2 us, and its host 50 in a training step by Python's
    profiler (at c66450e9).
    """
    if combine == "logsumexp":
        most = torch.finfo(torch.float32).max  # a row of infinities has no difference to them
        largest = aten.clamp_min.default(aten.amax.default(x, [-1], True), -most)
        largest = aten.clamp_max.default(largest, most)
        exp = aten.exp.default(aten.sub.Tensor(x, largest))
        log = aten.log.default(aten.sum.dim_IntList(exp, [-1]))
        return aten.add.Tensor(log, aten.squeeze.dim(largest, -1))
    x = _COMBINED[combine](x, [-1])
    return x if factor == 1 else aten.mul.Tensor(x, factor)


aten = torch.ops.aten
_COMBINED: Mapping[str, Callable[..., Any]] = {
    "add": aten.sum.dim_IntList, "max": aten.amax.default, "min": aten.amin.default,
}  # fmt: skip


def stored_types(composition: Composition) -> dict[str, str | None]:
    """The element type of each output of a program.

    Raises:
        ProgramError: the kernel does not store it.
    """
    types: dict[str, str | None] = {}
    for port in composition.outputs.values():
        kind = composition.program.outputs[port.name]
        if issubclass(kind, Reduction | RowGather):
            continue
        types[port.name] = dtype_name(port.dtype)
        if types[port.name] not in kind.stored:
            raise ProgramError(f"stores {types[port.name]}, and a {kind.__name__} has no such")
    return types


def twin(composition: Composition) -> tuple[Entry | None, bool]:
    """Find an accepted kernel that computes the same; else one computing more."""
    program, types = packed(composition.program), _types_of(composition)
    for more, entry, others, other in _accepted():
        if others == types and _same(program, other):
            return entry, not more
    return None, False


@lru_cache(maxsize=1)
def _accepted() -> list[_Known]:
    """List the accepted kernels of the package and the workspace around, whole ones first."""
    from coda_agent.agent.workspace import find, packaged_kernels

    known = packaged_kernels()
    with contextlib.suppress(WorkspaceError, MachineError):  # there may be no workspace, nor git
        known |= {kernel.name: kernel for kernel in find().kernels()}
    accepted = [(x, load_spec(x.spec)) for x in known.values() if x.level == "accepted"]
    every = [less for x, spec in accepted for less in _less(x, spec)]
    return sorted(every, key=operator.itemgetter(0))


def _less(entry: Entry, spec: Spec) -> Iterator[_Known]:
    """List a kernel's programs with all outputs, or fewer that read as much."""
    for program in read_programs(entry.text).values():
        for count in range(len(program.outputs)):
            for left_out in itertools.combinations(program.outputs, count):
                with contextlib.suppress(ProgramError):
                    fewer = program.without(left_out) if left_out else program
                    yield bool(left_out), entry, _types(spec, left_out), fewer


def _types(spec: Spec, left_out: Sequence[str]) -> list[str]:
    outputs = [x for o, x in spec.outputs.items() if o not in left_out]
    return sorted(x.dtype for x in (*spec.inputs.values(), *outputs))


def _types_of(composition: Composition) -> list[str]:
    """List a composition's types; "T" is that of A in 16 bits."""
    program, outputs = composition.program, {p.name: p for p in composition.outputs.values()}
    types = [dtype_name(p.dtype) for p in ports_of(composition) if p.name != program.spread]
    types += [
        "float32" if issubclass(kind, Reduction | RowGather) else dtype_name(outputs[x].dtype)
        for x, kind in program.outputs.items()
    ]
    element = dtype_name(composition.a.dtype)
    short = composition.a.dtype.itemsize == 2
    return sorted("T" if short and x == element else x for x in types)


def _same(one: Program, other: Program) -> bool:
    """Whether two programs compute the same, whatever their names' order."""
    kinds: Callable[[Mapping[str, type]], list[str]] = lambda x: sorted(
        k.__name__ for k in x.values()
    )
    if any(kinds(getattr(one, x)) != kinds(getattr(other, x)) for x in ("operands", "outputs")):
        return False
    return any(
        replace(one, operands=operands, outputs=outputs).digest == other.digest
        for operands in _orders(one.operands, other.operands)
        for outputs in _orders(one.outputs, other.outputs)
    )


def _orders(own: Mapping[str, type], other: Mapping[str, type]) -> Iterator[dict[str, type]]:
    """List names in all orders in which kinds stand as the other's."""
    by_kind = {kind: [x for x, k in own.items() if k is kind] for kind in other.values()}
    for chosen in itertools.product(*(itertools.permutations(x) for x in by_kind.values())):
        names = {kind: iter(x) for kind, x in zip(by_kind, chosen, strict=True)}
        yield {next(names[kind]): kind for kind in other.values()}
