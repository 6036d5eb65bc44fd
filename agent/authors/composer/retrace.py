"""An ATen graph in the composer's operations, with its original nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.fx.traceback as notes
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from coda_agent.agent.authors.composer.axes import PRODUCTS
from coda_agent.agent.authors.composer.calls import ancestors, name_of
from coda_agent.agent.authors.composer.capture import decompositions
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.specs.recording import alone

aten = torch.ops.aten
Step = tuple[Any, tuple[Any, ...]]
"""An operation of ATen that views a tensor, and its further arguments."""
SLICE = aten.slice.Tensor
TURN: tuple[Step, ...] = ((aten.permute.default, ([1, 0],)),)
ORIGIN = "origin"
SYMBOLIC = "symbolic"
"""Where nodes of a graph some of whose sizes are symbols have their values; `val` has numbers."""


class Retraced:
    """A traced graph, with what its nodes are in the original.

    Its `results` are the nodes of the graph's `outputs`, by name.
    """

    def __init__(self, module: fx.GraphModule, nodes: dict[fx.Node, fx.Node]) -> None:
        self.module, self.graph, self._nodes = module, module.graph, nodes
        self._users: dict[fx.Node, fx.Node] = {}
        self._ranges: dict[fx.Node, Step] = {}
        for user, node in nodes.items():
            self._users.setdefault(node, user)
        (self._output,) = (n for n in self.graph.nodes if n.op == "output")
        self._trim([])

    @property
    def results(self) -> dict[str, fx.Node]:
        return dict(self._output.args[0])  # pyright: ignore[reportArgumentType, reportCallIssue]

    def returning(self, outputs: Sequence[fx.Node]) -> None:
        """Let these nodes of the original graph be what is computed."""
        self.outputs = {node.name: node for node in outputs}
        self._trim([(node.name, self._nodes[node]) for node in outputs])

    def _trim(self, results: list[tuple[str, fx.Node]]) -> None:
        self._output.args = (dict(results),)
        if results:
            places = [n for n in self.graph.nodes if n.op == "placeholder"]
            self.graph.eliminate_dead_code()
            for node in places:
                if not node.users:
                    self.graph.erase_node(node)

    def origin(self, node: fx.Node) -> fx.Node | None:
        """The original node that a traced one is recorded for."""
        return self._users.get(node) or node.meta.get("custom", {}).get(ORIGIN)

    def user(self, node: fx.Node) -> fx.Node | None:
        """The original node that has the value of a traced one."""
        return self._users.get(node)

    def enter(self, node: fx.Node) -> fx.Node:
        """Let an original value enter the graph, not be computed in it."""
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            place = self.graph.placeholder(node.name)
        place.meta = {"val": node.meta["val"]}
        self.replace({node: place})
        return place

    def enter_range(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        """Let part of an original value enter the graph.

        Raises:
            Refusal: it is no original value.
        """
        if (user := self._users.get(node)) is None:
            raise Refusal("takes part of what is no value of the graph", "", self.origin(node))
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            place = self.graph.placeholder(user.name)
        place.target = place.name  # another than that of another part
        shape = [*node.meta["val"].shape]
        shape[dim] = stop - start
        place.meta = {"val": torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")}
        self._users[place] = user
        self._ranges[place] = SLICE, (dim, start, stop)
        return place

    def part(self, node: fx.Node) -> tuple[Step, ...]:
        """The view that takes a placeholder's part of its original value."""
        return (self._ranges[node],) if node in self._ranges else ()

    def replace(self, values: Mapping[fx.Node, fx.Node]) -> None:
        """Let other nodes have the values of some."""
        for node, other in values.items():
            if node in self._users:
                self._users[other] = self._users[node]
            node.replace_all_uses_with(other)
        self._nodes = {user: values.get(node, node) for user, node in self._nodes.items()}
        self.clean()

    def clean(self) -> None:
        """Leave out what no result needs."""
        self._trim([*self.results.items()])

    def put_outside(self, user: fx.Node) -> bool:
        """Let an original value enter, where it needs no product."""
        node = self._nodes.get(user)
        if node is None or node.op == "placeholder" or not node.users or needs_product(node):
            return False
        self.enter(node)
        return True


def needs_product(node: fx.Node) -> bool:
    """Whether a node is a product, or is computed with one."""
    return any(n.op == "call_function" and name_of(n) in PRODUCTS for n in ancestors([node]))


def retraced(graph: fx.Graph) -> Retraced:
    """Trace a graph again, with static shapes and without a device.

    Sizes that are symbols are taken by their hints.

    Raises:
        Refusal: one of its calls cannot be traced.
    """
    traced, values = _Copies(), dict[fx.Node, Any]()
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.get)
        val = node.meta.get("val")
        match node.op:
            case "placeholder" if isinstance(val, torch.Tensor):
                values[node] = traced.graph.placeholder(node.name)
                shape, stride = (tuple(map(plain, x)) for x in (val.shape, val.stride()))
                values[node].meta = {"val": _fake(shape, stride, val.dtype)}
            case "placeholder":
                values[node] = plain(val)
            case "get_attr":
                values[node] = traced.attribute(
                    operator.attrgetter(str(node.target))(graph.owning_module)
                )
            case "output":
                pass
            case _:
                try:
                    values[node] = traced.call(node, args, tree_map(_on_cpu, kwargs))
                except Exception as error:  # any operator of any library may be in a graph
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    raise Refusal(f"cannot be traced again: {reason}") from None
    nodes = {
        user: node
        for user, node in values.items()
        if isinstance(node, fx.Node) and isinstance(user.meta.get("val"), torch.Tensor)
    }
    (output,) = (n for n in graph.nodes if n.op == "output")
    traced.graph.output({user.name: node for user, node in nodes.items()})
    share(traced.graph)
    (end,) = (n for n in traced.graph.nodes if n.op == "output")
    result = Retraced(
        fx.GraphModule(traced.attributes, traced.graph),
        {user: end.args[0][user.name] for user in nodes},
    )
    result.returning([n for n in tree_leaves(output.args[0]) if isinstance(n, fx.Node)])
    return result


class _Copies:
    """A graph that is made of each call's own trace.

    A call is traced once: regions that grow, and layers that repeat, have the same ones. Tracing
    each subgraph anew took 43 of the composer's 61 s in tests/fuse/test_losses.py, profiled.
    """

    def __init__(self) -> None:
        self.graph, self.attributes = fx.Graph(), dict[str, Any]()

    def attribute(self, value: object) -> object:
        """Let a tensor be one of the graph's own."""
        if not isinstance(value, torch.Tensor):
            return value
        name = f"constant_{len(self.attributes)}"
        self.attributes[name] = value
        node = self.graph.create_node("get_attr", name)
        node.meta = {"val": value}
        return node

    def call(self, origin: fx.Node, args: Any, kwargs: Any) -> Any:
        """Copy the trace of a call; what it gives."""
        target: Any = origin.target
        every = tree_leaves((args, kwargs))
        inputs = [*dict.fromkeys(x for x in every if isinstance(x, fx.Node))]
        if target is operator.getitem or not (inputs or isinstance(target, torch._ops.OpOverload)):
            return target(*args, **kwargs)
        template = _template(target, args, kwargs, inputs)
        places = [n for n in template.graph.nodes if n.op == "placeholder"]
        copies: dict[fx.Node, Any] = dict(zip(places, inputs, strict=True))
        for node in template.graph.nodes:
            match node.op:
                case "placeholder":
                    pass
                case "get_attr":
                    copies[node] = self.attribute(getattr(template, str(node.target)))
                case "output":
                    return fx.map_arg(node.args[0], copies.__getitem__)
                case _:
                    copy = copies[node] = self.graph.node_copy(node, copies.__getitem__)
                    copy.meta = {**node.meta, "custom": {ORIGIN: origin}}
        raise AssertionError("a graph has an output")


_TEMPLATES: dict[object, fx.GraphModule] = {}
_SIMPLE = (
    *(fx.Node, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _template(
    target: Callable[..., object], args: Any, kwargs: Any, inputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """Trace a call, or take the trace of one alike."""
    places = {node: place for place, node in enumerate(inputs)}

    def described(x: object) -> object:
        if not isinstance(x, fx.Node):
            return x
        value = x.meta["val"]
        return places[x], tuple(value.shape), value.stride(), value.dtype

    simple = all(isinstance(x, _SIMPLE) for x in tree_leaves((args, kwargs)))
    key = (target, repr(tree_map(described, (args, kwargs)))) if simple else None
    if key in _TEMPLATES:
        return _TEMPLATES[key]

    def run(*tensors: torch.Tensor) -> object:
        known = dict(zip(inputs, tensors, strict=True))
        given, named = fx.map_arg((args, kwargs), known.__getitem__)
        return target(*given, **named)

    table = {**decompositions(), **APART, **MEANINGS}
    with alone(), _fakes(), notes.preserve_node_meta():
        values = [node.meta["val"] for node in inputs]
        # One each: two inputs with the same value would be the same.
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in values]
        module = make_fx(run, table, _allow_non_fake_inputs=True)(*fakes)
    if key is not None:
        _TEMPLATES[key] = module
    return module


@lru_cache(maxsize=1)
def _fakes() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@lru_cache(maxsize=4096)
def _fake(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with alone(), _fakes():
        return torch.empty_strided(shape, stride, dtype=dtype)


def share(graph: fx.Graph) -> None:
    """Compute once what is called twice without random numbers."""
    known: dict[object, fx.Node] = {}
    for node in [*graph.nodes]:
        target = node.target
        if target is not operator.getitem:
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
                continue
        kept = [node.meta.get(x) for x in ("recompute", "ac_graph_id")]
        first = known.setdefault((target, repr([node.args, node.kwargs, kept])), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def plain(size: Any) -> Any:
    """A size as a number; of a symbol its hint."""
    node = getattr(size, "node", None)
    return size if node is None else node.hint


def _on_cpu(value: object) -> object:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _split_with_sizes(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        aten.slice.Tensor(x, dim, start, start + size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _split(x: torch.Tensor, size: int, dim: int = 0) -> list[torch.Tensor]:
    extent = x.shape[dim]
    return _split_with_sizes(x, [min(size, extent - i) for i in range(0, extent, size)], dim)


def _unbind(x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    return [aten.select.int(x, dim, i) for i in range(x.shape[dim])]


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, **over: object
) -> tuple[torch.Tensor, torch.Tensor]:
    mean = aten.mean.dim(x, dim, over.get("keepdim", False))
    return aten.var.correction(x, dim, **over), mean


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return -aten.softplus(-x), x.new_zeros(0)


def _extreme(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    def call(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, ...]:
        value, place = (getattr(aten, f"{kind}{name}").default for kind in ("a", "arg"))
        return value(x, [dim], keepdim), place(x, dim, keepdim)

    return call


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None = None, scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    y = torch.mm(a.to(scale_a.dtype), b.to(scale_a.dtype)) * scale_a * scale_b
    y = y if bias is None else y + bias
    return y if out_dtype is None else y.to(out_dtype)


# Calls of several results, in terms of such as have one.
APART: dict[torch._ops.OpOverload, Callable[..., object]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.var_mean.correction: _var_mean,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.max.dim: _extreme("max"),
    aten.min.dim: _extreme("min"),
}
# Calls that multiply other than their operands, by what they mean in any type.
MEANINGS: dict[object, Callable[..., torch.Tensor]] = {aten._scaled_mm.default: _scaled_mm}
