"""Calls on DTensors: a kernel on each rank's shards, where these are all that it needs.

- A dimension of the mesh shards rows (A by rows, B whole), or columns of the product (B by its
  rows, A whole), or nothing. An operand that has the sharded dimension is sharded by it, what has
  it not is Replicate, and outputs come out likewise.
- A call communicates nothing. What would have to, such as a reduction over what is sharded, is
  refused.
- The gradient of what is whole on all ranks is a sum over them. DTensor adds it up, where it is
  told so by `grad_placements`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.operation import PLACED
from coda_agent.runtime.operators import Variant

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_COLUMNS = -1
_HINT = (
    "shard A by rows with B Replicate, or B by rows with A Replicate, and operands likewise; "
    "or call the kernel on local tensors (.to_local()) and sum what ranks share yourself"
)


def distributed(values: Iterable[Any]) -> bool:
    """Whether a DTensor is among the values."""
    import torch

    module = getattr(torch.distributed, "tensor", None)  # there is none before it is imported
    return module is not None and any(isinstance(x, module.DTensor) for x in values)


def on_shards(
    variant: Variant, names: Sequence[str], values: Sequence[Any], call: Callable[..., Any]
) -> Any:
    """What `call` gives for each rank's shards of the inputs, as DTensors.

    Args:
        variant: The kernel's.
        names: Of the inputs.
        values: The inputs, whose tensors are DTensors of one mesh.
        call: The kernel, of local inputs.

    Raises:
        LaunchError: a tensor is no DTensor of that mesh, or a placement needs communication.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    function, (a, b, *_) = variant.function, variant.places
    mesh = next(x.device_mesh for x in values if isinstance(x, DTensor))
    for name, x in zip(names, values, strict=True):
        if hasattr(x, "shape") and not (isinstance(x, DTensor) and x.device_mesh == mesh):
            kind = "of another mesh" if isinstance(x, DTensor) else "a plain tensor"
            raise LaunchError(
                f"{variant.name}: {name} is {kind} beside DTensors, expected DTensors of one mesh",
                hint="make it one by DTensor.from_local, or call the kernel on .to_local() of all",
            )
    axes = _axes(variant.name, values[a], values[b])
    for axis in {*axes} - {None}:
        _check_program(variant, axis == _COLUMNS)
    kinds = [function.operands[o].dims for o in variant.operands]
    dims = dict(zip(variant.places, [("M", "K"), ("N", "K"), *kinds], strict=True))
    local = list(values)
    for i, x in enumerate(values):
        if not isinstance(x, DTensor):
            continue
        due = [_placement(axis, dims[i], x.ndim) for axis in axes]
        if list(x.placements) != due:
            raise LaunchError(
                f"{variant.name}: {names[i]} is {_shown(x.placements)}, expected {_shown(due)} "
                f"beside A {_shown(values[a].placements)} and B {_shown(values[b].placements)}",
                hint=_HINT,
            )
        local[i] = x.to_local(
            grad_placements=[
                Partial() if axis is not None and p == Replicate() else p
                for axis, p in zip(axes, due, strict=True)
            ]
        )
    results = call(local)
    outputs = results if isinstance(results, tuple) else () if results is None else (results,)
    stored = [*function.program.outputs.values()]
    found = []
    for i, t in zip(variant.returned, outputs, strict=True):
        placements = [_placement(axis, stored[i].dims, t.ndim) for axis in axes]
        found.append(DTensor.from_local(t, mesh, placements, run_check=False))
    return tuple(found) if isinstance(results, tuple) else found[0] if found else None


def _axes(kernel: str, a: DTensor, b: DTensor) -> list[int | None]:
    """What each dimension of the mesh shards: a dimension of A's rows, `_COLUMNS` of the product,
    or None."""
    from torch.distributed.tensor import Replicate, Shard

    axes: list[int | None] = []
    parts: dict[int, int] = {}
    whole = Replicate()
    for i, (p, q) in enumerate(zip(a.placements, b.placements, strict=True)):
        if type(p) is Shard and p.dim < a.ndim - 1 and q == whole:
            axis = p.dim
        elif p == whole and type(q) is Shard and q.dim == 0:
            axis = _COLUMNS
        elif p == q == whole:
            axis = None
        else:
            raise LaunchError(
                f"{kernel}: a dimension of the mesh has A as {p} and B as {q}, of which no rank "
                "has whole sums for an epilogue",
                hint=_HINT,
            )
        axes.append(axis)
        if axis is not None:
            # torch.compile of torch 2.11 goes through no mesh's shape.
            parts[axis] = parts.get(axis, 1) * a.device_mesh.size(i)
    for axis, ranks in parts.items():
        label, extent = ("B", b.shape[0]) if axis == _COLUMNS else ("A", a.shape[axis])
        if extent % ranks:
            raise LaunchError(
                f"{kernel}: {label} has {extent} along its sharded dimension, expected a multiple "
                f"of its {ranks} ranks",
                hint="pad it, or call the kernel on local tensors (.to_local())",
            )
    return axes


def _check_program(variant: Variant, columns: bool) -> None:
    """Refuse a program that a shard of the rows, or of the columns, is too little for."""
    program = variant.function.program
    fault = ""
    if any(n.op in PLACED for n in program.graph.nodes):
        fault = "its program goes by rows and columns of the whole product"
    for o, kind in program.operands.items():
        if kind.dims and kind.dims[0] != "M" and "N" not in kind.dims[-1]:
            fault = f"its operand {o!r} is a {kind.__name__}, which is read by places in the whole"
    axis = "columns" if columns else "rows"
    for o, kind in program.outputs.items():
        if "N" not in kind.dims[-1] if columns else kind.dims[0] != "M":
            fault = f"its output {o!r} reduces over {axis}"
    if fault:
        raise LaunchError(f"{variant.name} does not run on sharded {axis}: {fault}", hint=_HINT)


def _placement(axis: int | None, dims: tuple[str, ...], ndim: int) -> Placement:
    """That of a tensor of a kind's dims on a dimension of the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    if axis == _COLUMNS and dims and "N" in dims[0]:  # of raw partials over rows, too
        return Shard(0)
    if axis == _COLUMNS and dims and "N" in dims[-1]:
        return Shard(ndim - 1)
    return Shard(axis) if axis is not None and axis >= 0 and dims[:1] == ("M",) else Replicate()


def _shown(placements: Sequence[Placement]) -> str:
    return f"({', '.join(map(str, placements))})"
