"""An ATen graph in the composer's operations, with its original nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.traceback as notes
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from coda_agent.agent.authors.composer.axes import PRODUCTS
from coda_agent.agent.authors.composer.calls import ancestors, name_of
from coda_agent.agent.authors.composer.capture import decompositions, noted
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.specs.recording import alone

aten = torch.ops.aten
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
        self.replace(node, place)
        return place

    def replace(self, node: fx.Node, other: fx.Node) -> None:
        """Let another node have the value of one."""
        if node in self._users:
            self._users[other] = self._users[node]
        self._nodes = {user: other if n is node else n for user, n in self._nodes.items()}
        node.replace_all_uses_with(other)
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
    owner = graph.owning_module
    tensors = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    (output,) = (n for n in graph.nodes if n.op == "output")

    def run(*args: torch.Tensor) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        given = iter(args)
        for node in graph.nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.get)
            match node.op:
                case "placeholder":
                    val = node.meta["val"]
                    env[node] = next(given) if isinstance(val, torch.Tensor) else plain(val)
                case "get_attr":
                    env[node] = _attribute(owner, str(node.target))
                case "output":
                    pass
                case _:
                    with noted(ORIGIN, node):
                        env[node] = node.target(*args, **tree_map(_on_cpu, kwargs))
        return [env[node] for node in tensors]

    with alone(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty_strided(
                [plain(x) for x in val.shape], [plain(x) for x in val.stride()], dtype=val.dtype
            )
            for node in tensors
            if node.op == "placeholder"
            for val in [node.meta["val"]]
        ]
        with notes.preserve_node_meta():
            table = {**decompositions(), **APART, **MEANINGS}
            try:
                module = make_fx(run, table, _allow_non_fake_inputs=True)(*fakes)
            except Exception as error:  # any operator of any library may be in a graph
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise Refusal(f"cannot be traced again: {reason}") from None
    share(module.graph)
    (end,) = (n for n in module.graph.nodes if n.op == "output")
    values = zip(tensors, tree_leaves(end.args[0]), strict=True)
    traced = Retraced(module, {user: n for user, n in values if isinstance(n, fx.Node)})
    traced.returning([n for n in tree_leaves(output.args[0]) if isinstance(n, fx.Node)])
    return traced


def share(graph: fx.Graph) -> None:
    """Compute once what is called twice without random numbers."""
    known: dict[Any, fx.Node] = {}
    for node in [*graph.nodes]:
        target: Any = node.target
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


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _attribute(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


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


def _var_mean(x: torch.Tensor, dim: Any = None, **over: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mean = aten.mean.dim(x, dim, over.get("keepdim", False))
    return aten.var.correction(x, dim, **over), mean


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return -aten.softplus(-x), x.new_zeros(0)


def _extreme(name: str) -> Callable[..., Any]:
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
APART: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.var_mean.correction: _var_mean,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.max.dim: _extreme("max"),
    aten.min.dim: _extreme("min"),
}
# Calls that multiply other than their operands, by what they mean in any type.
MEANINGS: dict[Any, Callable[..., Any]] = {aten._scaled_mm.default: _scaled_mm}
