"""A spec's traced reference, composed as any graph is: by the roles of its dims."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import (
    RESHAPES,
    behind,
    bounds,
    name_of,
    shape_of,
)
from coda_agent.agent.authors.composer.expression import Expr
from coda_agent.agent.authors.composer.join import renamed
from coda_agent.agent.authors.composer.ports import Port
from coda_agent.agent.authors.composer.problem import Problem, Refusal, Rewritten
from coda_agent.agent.authors.composer.retrace import SLICE
from coda_agent.agent.authors.composer.subgraph import compose_graph

_RESHAPE = torch.ops.aten.reshape.default


def compose_problem(problem: Problem) -> Rewritten:
    """Compose a spec's reference as a graph; it may treat ranges of columns differently.

    Raises:
        Refusal: no program computes it, or only one of other views of the spec's tensors.
    """
    graph, ends = _graph(problem)
    found = compose_graph(graph)
    names = {x: _source(port) for x, port in found.operands.items()}
    kinds = {name: found.rewritten.operands[x] for x, name in names.items()}
    sources = [_source(found.a), _source(found.b), *kinds]
    if sources[:2] != [*problem.gemm] or "" in kinds or len(kinds) < len(found.operands):
        raise Refusal("reads an input by another view")
    ports = {port.node: port for port in found.outputs.values()}
    outputs, values = dict[str, str](), dict[str, Expr]()
    for name, nodes in ends.items():
        own = _side_by_side([ports[node] for node in nodes], found.extents["N"])
        outputs[name] = found.rewritten.outputs[own]
        values[name] = renamed(found.rewritten.values[own], names)
    operands = {x: kinds[x] for x in problem.inputs if x in kinds}
    return Rewritten(problem.name, operands, outputs, values)


def _graph(problem: Problem) -> tuple[fx.Graph, dict[str, list[fx.Node]]]:
    """The reference's graph, and what each output is made of, side by side."""
    graph, copies = fx.Graph(problem.module), dict[fx.Node, fx.Node]()
    names, ends = iter(problem.inputs), dict[str, list[fx.Node]]()
    for node in problem.module.graph.nodes:
        if node.op == "output":
            for name, end in node.args[0].items():
                joined = problem.outputs[name].joined and name_of(end) == "cat"
                ends[name] = [copies[x] for x in (end.args[0] if joined else [end])]
        elif node.op == "placeholder":
            copies[node] = graph.placeholder(next(names))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([x for nodes in ends.values() for x in nodes])
    return graph, ends


def _source(port: Port) -> str:
    """Name the input whose elements, in their order, a port has; "" where there is none."""
    if any(view is not _RESHAPE for part in (port, *port.parts) for view, _ in part.steps):
        return ""
    parts = [behind(x.node, RESHAPES) for x in port.parts or [port] if x.node is not None]
    if not port.parts:
        return parts[0].name if parts[0].op == "placeholder" else ""
    if len(parts) < len(port.parts) or port.steps or port.dim:
        return ""
    if any(name_of(x) != "slice" for x in parts):
        return ""
    whole, last = parts[0].all_input_nodes[0], 0
    for part in parts:  # one after the other, all of it
        dim, start, stop, step = bounds(part)
        if part.all_input_nodes != [whole] or (dim, start, step) != (0, last, 1):
            return ""
        last = stop
    return whole.name if whole.op == "placeholder" and last == shape_of(whole)[0] else ""


def _side_by_side(ports: list[Port], columns: int) -> str:
    """Name the program's output of which these are all columns.

    Raises:
        Refusal: they are not, or are other views of it.
    """
    (name, *others) = {port.name for port in ports}
    steps = [step for port in ports for step in port.back]
    stops = [arguments[2] for view, arguments in steps if view is SLICE]
    ranges = [(SLICE, (1, *pair)) for pair in itertools.pairwise((0, *stops))]
    if others or (steps and (steps != ranges or stops[-1] != columns)):
        raise Refusal("writes an output by another view")
    return name
