"""Nodes of ATen graphs: what they call, and what their values take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import argument, is_elementwise
from coda_agent.agent.authors.composer.retrace import SYMBOLIC

aten = torch.ops.aten
PLAIN = (aten.mm.default, aten.addmm.default)
PRODUCTS = (*PLAIN, aten._scaled_mm.default)
SHORT = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Element types that kernels multiply."""
TAGS = ("partitioner_tag", "recompute", "ac_graph_id", "stack_trace", "nn_module_stack")
"""What passes after this one read of a node; new nodes have it of those that they stand for."""
SUM = "adds"
"""Where the sum of a product's and others' is noted, of which it is the last: its kernel adds."""
VIEWS = (
    aten.t.default, aten.permute.default, aten.transpose.int, aten.view.default,
    aten._unsafe_view.default, aten.unsqueeze.default, aten.detach.default,
)  # fmt: skip
TURNS = (aten.permute.default, aten.t.default, aten.transpose.int)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
SCATTERED = (aten.scatter_add.default, aten.scatter.src)
_SIZED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
_BY_COUNT = (aten.mean.dim, aten.mean.default, aten.var.correction, aten.var_mean.correction)
_SUMS = (aten.sum.dim_IntList, aten.sum.default)
SHAPES = (aten.slice.Tensor, aten.expand.default, aten.squeeze.dim, aten.cat.default)


def is_backward(node: fx.Node) -> bool:
    """Whether a node belongs to a graph's backward pass."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is the gradient of one of a graph's results."""
    return node.op == "placeholder" and "tangents" in node.name


def made_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Collect nodes, and all that is made of them."""
    made = set(nodes)
    for node in graph.nodes:
        if not made.isdisjoint(node.all_input_nodes):
            made.add(node)
    return made


def mark_backward(graph: fx.Graph) -> None:
    """Mark as the backward pass's what is made of gradients.

    AOTAutograd leaves out what the `backward` of a user's autograd.Function calls.
    """
    for node in made_of(graph, filter(is_tangent, graph.nodes)):
        if node.op == "call_function" and not is_backward(node):
            node.meta["partitioner_tag"] = "is_backward"


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes belong to the same pass."""
    return is_backward(one) == is_backward(other)


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node makes each element of one of its inputs'."""
    return is_elementwise(node) or node.target in (*CASTS, *VIEWS)


def is_cheap(node: fx.Node) -> bool:
    """Whether a node's value is as soon computed again as loaded."""
    return is_pointwise(node) or node.target in SHAPES


def is_turn(node: fx.Node) -> bool:
    """Whether a node is a matrix transposed."""
    if node.target not in TURNS or node.meta["val"].ndim != 2:
        return False
    order: Any = node.args[1] if node.target is aten.permute.default else (1, 0)
    return [d % 2 for d in order] == [1, 0]


def is_repeated(node: fx.Node) -> bool:
    """Whether a node's value is fewer numbers, each at several places."""
    return node.target is aten.expand.default and numel(node) > numel(node.all_input_nodes[0])


def numel(node: fx.Node) -> int:
    """The elements of a node's value; 0 where it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def shape_of(node: fx.Node) -> torch.Size:
    """The shape of a node's value, in which symbols stand as such."""
    return node.meta.get(SYMBOLIC, node.meta["val"]).shape


def device_of(node: fx.Node) -> torch.device:
    """Get a value's device, or its input's where sizes are hints."""
    device = node.meta.get(SYMBOLIC, node.meta["val"]).device
    inputs = node.all_input_nodes
    return device_of(inputs[0]) if device.type == "meta" and inputs else device


def is_fixed(node: fx.Node, dim: int) -> bool:
    """Whether an extent of a node's value is no symbol."""
    return isinstance(shape_of(node)[dim], int)


def is_one(node: fx.Node, dim: int) -> bool:
    """Whether an extent of a node's value is 1, whatever symbols are."""
    return is_fixed(node, dim) and shape_of(node)[dim] == 1


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    """Bytes of nodes that are tensors, together."""
    values = [node.meta.get("val") for node in nodes]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def make(
    graph: fx.Graph, target: Callable[..., object], *args: Any, like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Append a call with its value, in the pass of another node."""
    node = graph.call_function(target, args, kwargs)
    values = fx.map_arg(args, lambda x: x.meta["val"])
    node.meta = {tag: like.meta[tag] for tag in TAGS if tag in like.meta}
    value: Any = target(*values, **kwargs)
    node.meta["val"] = value
    known = like.meta.get(SYMBOLIC)
    if isinstance(known, torch.Tensor) and like.meta["val"].shape == value.shape:
        node.meta[SYMBOLIC] = known.new_empty(known.shape, dtype=value.dtype)
    return node


def constant(graph: fx.Graph, value: float, *, like: fx.Node, shape: Sequence[int] = ()) -> fx.Node:
    """Append a number, or several, of a node's type and device."""
    x = like.meta["val"]
    node = graph.call_function(
        aten.full.default, ([*shape], value), {"dtype": x.dtype, "device": device_of(like)}
    )
    node.meta["val"] = x.new_empty(shape)
    return node


def cast_to(node: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
    """Append a cast, where there is something to cast."""
    same = node.meta["val"].dtype == dtype
    return node if same else make(node.graph, CASTS[-1], node, dtype, like=like)


def call_of(node: object, target: object) -> fx.Node | None:
    """A node, if it calls `target`."""
    return node if isinstance(node, fx.Node) and node.target is target else None


def number(node: object) -> float | None:
    """The value of a constant of no dims."""
    if isinstance(node, fx.Node) and node.meta["val"].ndim == 0:
        if node.target is aten.scalar_tensor.default:
            return node.args[0]  # pyright: ignore[reportReturnType]
        if node.target is aten.full.default:
            return node.args[1]  # pyright: ignore[reportReturnType]
    return None


def copied(
    graph: fx.Graph, node: fx.Node, inputs: Mapping[fx.Node, fx.Node], *, like: fx.Node
) -> fx.Node:
    """Append a node's copy, on copied inputs, in the pass of another."""
    copy = graph.node_copy(node, lambda x: inputs.get(x, x))
    copy.meta = dict(node.meta)
    if (tag := like.meta.get("partitioner_tag")) is not None:
        copy.meta["partitioner_tag"] = tag
    return copy


def padded(node: fx.Node, shape: Sequence[object]) -> tuple[int, ...]:
    """A value's shape with as many dims as another's."""
    own = node.meta["val"].shape
    return (*[1] * (len(shape) - len(own)), *own)


def is_zeros(node: fx.Node) -> bool:
    """Whether a node's value is made of zeros."""
    return node.target is aten.full.default and bool(node.args[1] == 0)


def root(node: fx.Node, *others: object) -> fx.Node:
    """Find what a node is a view of, through `others` too."""
    while node.target in (*VIEWS, *others):
        node = node.all_input_nodes[0]
    return node


def operands(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """A and B of a product."""
    first = 1 if product.target is aten.addmm.default else 0
    a, b = product.args[first : first + 2]
    return a, b  # pyright: ignore[reportReturnType]


def are_products(users: Iterable[fx.Node]) -> bool:
    """Whether users are products, or views that products alone read."""
    return all(u.target in PRODUCTS or (u.target in VIEWS and are_products(u.users)) for u in users)


def entered(graph: fx.Graph, inputs: Sequence[object]) -> dict[fx.Node, Any]:
    """What a graph takes, by its nodes."""
    return dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))


def evaluate(nodes: Iterable[fx.Node], values: dict[fx.Node, Any]) -> None:
    """Call what nodes call, in order, and add their values to others'."""
    for node in nodes:
        if node.op in ("call_function", "call_method"):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            if node.op == "call_method":
                target, args = getattr(args[0], target), args[1:]
            values[node] = target(*args, **kwargs)


def lay_out_anew(node: fx.Node) -> None:
    """Let a view copy where its input's strides are no view's."""
    if node.target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default


def described(graph: fx.Graph) -> str:
    """Write down a graph by what its calls are, whatever their names."""
    places: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        places[node] = f"%{len(places)}"
        args = torch.fx.map_arg((node.args, node.kwargs), lambda x: _Place(places[x]))
        value = node.meta.get(SYMBOLIC, node.meta.get("val"))
        if isinstance(value, torch.Tensor):
            shape = f"{[*value.shape]} {[*value.stride()]} {value.dtype} {value.device.type}"
        else:
            shape = str(value)
        target = "" if node.op == "placeholder" else node.target
        lines.append(f"{node.op} {target} {args} {shape}")
    return "\n".join(lines)


class _Place(str):
    def __repr__(self) -> str:
        return str(self)


def counts(node: fx.Node) -> bool:
    """Whether a node's values, not only its shape, depend on symbols."""
    if node.target in _BY_COUNT:
        rows = shape_of(node.all_input_nodes[0])[:-1]
        return any(not isinstance(x, int) for x in rows)
    sizes = [x for x in node.all_input_nodes if not isinstance(x.meta.get("val"), torch.Tensor)]
    return bool(sizes) and node.target not in _SIZED


def is_held(node: fx.Node) -> bool:
    """Whether a kernel, which computes in float32, has a value as it is.

    It has no float64 and no large whole numbers, and its largest over rows passes NaN over.
    """
    dtype = node.meta["val"].dtype
    if node.target in (aten.amax.default, aten.amin.default):
        (source,), dims = node.all_input_nodes, argument(node, 1, "dim", [])
        ndim = source.meta["val"].ndim
        return [d % ndim for d in dims] == [ndim - 1]
    if node.target in _SUMS and not dtype.is_floating_point:
        return root(node.all_input_nodes[0], *CASTS).meta["val"].dtype is torch.bool
    return dtype is not torch.float64
