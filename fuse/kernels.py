"""A region's program as a kernel: with the tiles of the accepted one that computes the same, or by
the prior.

The program was checked against its graph in float64 when it was composed. On a GPU the kernel's
results are compared with PyTorch's at the first call, before they are used.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from coda_agent.agent.authors.composer.join import Composition
from coda_agent.agent.authors.composer.ports import Port
from coda_agent.fuse.regions import Region
from coda_agent.primitives.errors import MachineError, ProgramError, WorkspaceError
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import ColIndex, RowGather
from coda_agent.runtime.function import Chooser, ProgramFunction
from coda_agent.runtime.kernel import load_kernel, prior_chooser
from coda_agent.specs import Spec, load_spec

if TYPE_CHECKING:
    from coda_agent.agent.workspace import Kernel as Entry

PACKED: dict[tuple[int, ...], tuple[list[weakref.ref[torch.Tensor]], list[int], Any]] = {}
"""What was packed, as long as all its parts live: by the port and the parts, since layers of one
code have one plan. Emptied, it is packed again."""


class RegionKernel:
    """What runs a region: a function of its inputs, in order, that gives its outputs.

    Attributes:
        region: It.
        accepted: The name of the accepted kernel that computes the same; or "".
        like: The name of the accepted kernel whose tiles it has; or "".
    """

    def __init__(self, region: Region) -> None:
        composition = region.composition
        self.region, program = region, composition.program
        self._places = {node: i for i, node in enumerate(region.inputs)}
        entry, exact = twin(composition)
        self.like = entry.name if entry else ""
        self.accepted = self.like if exact else ""
        choose, refused = prior_chooser(program), frozenset[str]()
        if entry:
            known = load_kernel(entry.folder)
            choose, refused = known.choose, known.refused
        self._function = ProgramFunction(
            program,
            stored_types(composition),
            _cached(choose),
            (_name(composition.a.dtype),),
            refused,
            tuple(x for x, kind in program.operands.items() if kind is ColIndex),
        )

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        composition = self.region.composition
        given = {x: self._entered(port, tensors) for x, port in composition.operands.items()}
        a, b = self._entered(composition.a, tensors), self._entered(composition.b, tensors)
        results = self._function(a, b, given)
        return [
            port.restored(results[port.name]).to(port.dtype)
            for port in composition.outputs.values()
        ]

    def _entered(self, port: Port, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [tensors[self._places[node]] for node in port.nodes]
        if not port.packed:
            x = port.canonical(*parts)
            return x if x.ndim else x.float()
        if any(t.is_inference() for t in parts):  # whose writes are not counted
            return port.canonical(*parts)
        key = id(port), *map(id, parts)
        versions = [x for t in parts for x in (t._version, t.data_ptr())]
        if known := PACKED.get(key):
            refs, of, packed = known
            if of == versions and all(r() is t for r, t in zip(refs, parts, strict=True)):
                return packed
        packed = port.canonical(*parts)
        gone = lambda _: PACKED.pop(key, None)
        PACKED[key] = [weakref.ref(t, gone) for t in parts], versions, packed
        return packed


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
        types[port.name] = _name(port.dtype)
        if types[port.name] not in kind.stored:
            raise ProgramError(f"stores {types[port.name]}, and a {kind.__name__} has no such")
    return types


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cached(choose: Callable[..., Any]) -> Chooser:
    return lru_cache(maxsize=256)(choose)


def twin(composition: Composition) -> tuple[Entry | None, bool]:
    """The accepted kernel that computes the same; else one that computes the same and more."""
    program, types = composition.program, _types_of(composition)
    for more in (False, True):
        for entry, programs, spec in _accepted().values():
            for left_out, other in (x for p in programs for x in (_less(p) if more else [((), p)])):
                if _types(spec, left_out) == types and _same(program, other):
                    return entry, not more
    return None, False


@lru_cache(maxsize=1)
def _accepted() -> dict[str, tuple[Entry, list[Program], Spec]]:
    """The accepted kernels of the package and of the workspace around the current folder."""
    from coda_agent.agent.workspace import find, packaged_kernels

    known = packaged_kernels()
    with contextlib.suppress(WorkspaceError, MachineError):  # there may be no workspace, nor git
        known |= {kernel.name: kernel for kernel in find().kernels()}
    return {
        name: (
            kernel,
            [*read_programs(kernel.program.read_text("utf-8")).values()],
            load_spec(kernel.spec),
        )
        for name, kernel in known.items()
        if kernel.level == "accepted"
    }


def _less(program: Program) -> Iterator[tuple[tuple[str, ...], Program]]:
    """A program without each choice of its outputs that leaves one which reads as much."""
    for count in range(1, len(program.outputs)):
        for left_out in itertools.combinations(program.outputs, count):
            with contextlib.suppress(ProgramError):
                yield left_out, program.without(left_out)


def _types(spec: Spec, left_out: Sequence[str] = ()) -> list[str]:
    outputs = [x for o, x in spec.outputs.items() if o not in left_out]
    return sorted(x.dtype for x in (*spec.inputs.values(), *outputs))


def _types_of(composition: Composition) -> list[str]:
    """The same of a composition: "T" is the type of A, where it has 16 bits."""
    program, outputs = composition.program, {p.name: p for p in composition.outputs.values()}
    ports = [composition.a, composition.b, *composition.operands.values()]
    types = [_name(port.dtype) for port in ports]
    types += [
        "float32" if issubclass(kind, Reduction | RowGather) else _name(outputs[x].dtype)
        for x, kind in program.outputs.items()
    ]
    element = _name(composition.a.dtype)
    short = composition.a.dtype.itemsize == 2
    return sorted("T" if short and x == element else x for x in types)


def _same(one: Program, other: Program) -> bool:
    """Whether two programs compute the same, in whatever order operands and outputs are named."""
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


def _orders(own: Mapping[str, type], other: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Names in all orders in which their kinds stand as the other's do."""
    by_kind = {kind: [x for x, k in own.items() if k is kind] for kind in other.values()}
    for chosen in itertools.product(*(itertools.permutations(x) for x in by_kind.values())):
        names = {kind: iter(x) for kind, x in zip(by_kind, chosen, strict=True)}
        yield {next(names[kind]): kind for kind in other.values()}
