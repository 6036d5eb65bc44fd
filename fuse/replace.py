"""Calls of kernels in the place of a graph's regions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils.checkpoint import CheckpointPolicy

from coda_agent.agent.authors.composer.ports import Extent, Port
from coda_agent.fuse.kernels import called
from coda_agent.fuse.nodes import TAGS, lay_out_anew
from coda_agent.fuse.regions import Cut, Region, order
from coda_agent.primitives.resources import ColIndex

aten = torch.ops.aten


def replace_regions(known: Cut, texts: Mapping[Region, str]) -> None:
    """Let a graph call `coda_agent::kernel` for its regions.

    Args:
        known: The graph with its regions; it changes.
        texts: The kernel of each region, as the operator takes it.
    """
    graph = known.graph
    end = graph.output_node()
    taken = known.taken
    readers = [n for n in graph.nodes if n is end or (n not in taken and _reads_strides(n))]
    strides = {n: [_strides(x) for x in tree_leaves((n.args, n.kwargs))] for n in readers}
    results: dict[fx.Node, fx.Node] = {}
    symbols = _Symbols(graph)
    for step in [*order(known)]:
        if isinstance(step, Region):
            with graph.inserting_before(end):
                results |= _call(graph, step, texts[step], results, symbols)
        elif step.op not in ("placeholder", "output"):
            end.prepend(step)
    for node in reversed(graph.nodes):
        if node in taken:
            graph.erase_node(node)
    _evaluate(graph)
    for node in readers:
        _restore(graph, node, strides[node], symbols)
    _evaluate(graph)
    graph.lint()


class _Symbols:
    """Sizes of a graph as its nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self.tracer = graph, GraphAppendingTracer(graph)
        self._nodes: dict[str, fx.Node] = {}
        self._dims: dict[str, tuple[fx.Node, int]] = {}
        taken = graph.find_nodes(op="placeholder")
        self._last = taken[-1] if taken else None
        for node in taken:
            value = node.meta.get("val")
            for i, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                self._dims.setdefault(str(size), (node, i))
        for node in graph.nodes:
            if isinstance(value := node.meta.get("val"), torch.SymInt):
                if node in taken or str(value) not in self._dims:
                    self._nodes.setdefault(str(value), node)

    def __call__(self, sizes: Sequence[int]) -> list[int | fx.Proxy]:
        """Give sizes as a view's arguments; a single symbol is -1."""
        if sum(isinstance(size, Extent) for size in sizes) == 1:
            return [-1 if isinstance(size, Extent) else size for size in sizes]
        return [
            fx.Proxy(self._node(size), self.tracer) if isinstance(size, Extent) else size
            for size in sizes
        ]

    def _node(self, size: Extent) -> Any:
        nodes = [int(x) if x.isdigit() else self._symbol(x) for x in size.symbols]
        result = nodes[0]
        for factor in nodes[1:]:
            result = self._graph.call_function(operator.mul, (result, factor))
        return result

    def before(self, node: fx.Node, sizes: Iterable[object]) -> list[Any]:
        """Give sizes as arguments of calls before a node."""
        with self._graph.inserting_before(node):
            return [self._computed(n) if isinstance(n, torch.SymInt) else n for n in sizes]

    def _computed(self, size: torch.SymInt) -> fx.Node:
        expr = size.node.expr
        known = {x: fx.Proxy(self._symbol(str(x)), self.tracer) for x in expr.free_symbols}
        return sympy_interp(PythonReferenceAnalysis, known, expr).node

    def _symbol(self, name: str) -> fx.Node:
        if name not in self._nodes:
            with self._graph.inserting_after(self._last):  # before whatever may need it
                self._nodes[name] = self._graph.call_function(aten.sym_size.int, self._dims[name])
        return self._nodes[name]


def _call(
    graph: fx.Graph,
    region: Region,
    text: str,
    known: Mapping[fx.Node, fx.Node],
    sized: _Symbols,
) -> dict[fx.Node, fx.Node]:
    """Append a call of a region's kernel; results by nodes they replace."""
    composition = region.composition
    end = graph.output_node()
    last, packed, product = end.prev, set[fx.Node](), min(region.nodes)

    def entered(port: Port) -> Any:
        start = end.prev
        x = port.canonical(
            *(fx.Proxy(known.get(n, n), sized.tracer) for n in port.nodes), sized=sized
        )
        packed.update(_between(start, end) if port.packed else ())
        if composition.program.operands.get(port.name) is ColIndex:
            return _looked_up(x, composition.extents["N"], product.meta["val"].device)
        return x

    found = called(composition, text, entered, sized)
    results = {node: x.node for node, x in found.items() if node is not None}
    for node, result in results.items():
        node.replace_all_uses_with(result, delete_user_cb=lambda u: u not in region.nodes)
    for node in _between(last, end):
        node.meta |= {tag: product.meta[tag] for tag in TAGS if tag in product.meta}
        if node in packed and product.meta.get("partitioner_tag") == "is_forward":
            # Or the copy of a weight is kept until the backward pass.
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
    return results


def _looked_up(x: fx.Proxy, columns: int, device: torch.device) -> fx.Proxy:
    """Look an index up among columns: one beyond raises, where a kernel would select 0."""
    if isinstance(columns, Extent):
        return x
    options = {"start": 0, "step": 1, "dtype": torch.int64, "device": device}
    options["requires_grad"] = False
    iota = torch.ops.prims.iota.default
    every = x.tracer.create_proxy("call_function", iota, (columns,), options)
    whole = torch.ops.prims.convert_element_type.default(x, torch.int64)
    return aten.gather.default(every, 0, whole)


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Nodes after one and before another."""
    while (first := first.next) is not last:
        yield first


def _evaluate(graph: fx.Graph) -> None:
    """Give new nodes their values, and renew those that follow them."""
    changed = set[fx.Node]()
    values = (node.meta.get("val") for node in graph.nodes)
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "val" in node.meta and changed.isdisjoint(node.all_input_nodes):
            continue
        lay_out_anew(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        with mode:
            value = node.target(*args, **kwargs)
        if not _alike(value, node.meta.get("val")):
            changed.add(node)
        node.meta["val"] = value


def _alike(one: object, other: object) -> bool:
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and all(map(_alike, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return str(one.stride()) == str(other.stride())  # no guard on sizes that are symbols
    return type(one) is type(other)


def _strides(node: object) -> tuple[object, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.stride() if isinstance(value, torch.Tensor) else None


def _reads_strides(node: fx.Node) -> bool:
    """Whether a call may want strides that it does not ask for."""
    # Attention's kernels want a last one of 1, others' anything; ATen's core operators take all.
    tags = getattr(node.target, "tags", ())
    plain = torch.Tag.core in tags or torch.Tag.pointwise in tags or _is_of(node, "prims", "prims")
    return node.target is aten.as_strided.default or (node.op == "call_function" and not plain)


def _is_of(node: fx.Node, namespace: str, default: str = "") -> bool:
    return getattr(node.target, "namespace", default) == namespace


def _restore(
    graph: fx.Graph,
    node: fx.Node,
    strides: Sequence[tuple[object, ...] | None],
    symbols: _Symbols,
) -> None:
    """Give what a call reads the strides that it had."""
    # A graph's results have all of them, what ATen's kernels read the last one.
    leaves, spec = tree_flatten((node.args, node.kwargs))
    last = _is_of(node, "aten") and node.target is not aten.as_strided.default
    for i, (x, wanted) in enumerate(zip(leaves, strides, strict=True)):
        places = slice(-1 if last else None, None)
        if wanted is None or str((_strides(x) or ())[places]) == str(wanted[places]):
            continue
        shape, steps = (symbols.before(node, sizes) for sizes in (x.meta["val"].shape, wanted))
        with graph.inserting_before(node):
            empty = aten.new_empty_strided.default, (x, shape, steps)
            leaves[i] = graph.call_function(aten.copy.default, (graph.call_function(*empty), x))
        for new in (leaves[i].args[0], leaves[i]):
            new.meta = {tag: x.meta[tag] for tag in TAGS if tag in x.meta}
    node.args, node.kwargs = tree_unflatten(leaves, spec)
