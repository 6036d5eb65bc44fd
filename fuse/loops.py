"""Losses that go through sequences one by one: their calls become one.

TRL's log-probabilities and entropies are made of `logits[0]`, `logits[1]`, ..., or of what `split`
gives, and joined. As calls of all rows they are made some rows at a time, with the product itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_POINTWISE = {"exp", "log", "neg", "mul", "sub", "add", "truediv", "div", "float", "to"}
_ALONG_ROWS = {"logsumexp", "log_softmax", "softmax", "sum", "gather"}
_SPLITS = ("split", "chunk", "unbind")
_WRITES = {"setitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul",
           "ior", "ipow", "irshift", "isub", "itruediv", "ixor"}  # fmt: skip
_MODES = {"_enter_autocast", "_exit_autocast", "_set_grad_enabled"}
_Parts = tuple[fx.Node, ...]


def join_loops(graph: fx.Graph) -> list[str]:
    """Compute at once what is computed of a tensor's parts and joined.

    Args:
        graph: As Dynamo records it, with `meta["example_value"]`; it changes.

    Returns:
        Names of the calls that joined the parts.
    """
    nodes = [n for n in graph.nodes if n.target in (torch.stack, torch.cat)]
    return [node.name for node in nodes if _Loop(node).join()]


class _Loop:
    """Calls of each part of a tensor, which another one joins.

    Attributes:
        wholes: What is computed of all parts, by what is computed of each.
        calls: Those to be made of all, in order.
    """

    def __init__(self, node: fx.Node) -> None:
        self._node, self._is_stack = node, node.target is torch.stack
        self.wholes: dict[_Parts, fx.Node] = {}
        self.calls: list[_Parts] = []

    def join(self) -> bool:
        """Replace the call by one of all parts, where these are alike."""
        node, graph = self._node, self._node.graph
        parts: Any = node.args[0] if node.args else None
        if (
            _dim(node, 0) != 0
            or "out" in node.kwargs
            or not isinstance(parts, list | tuple)
            or len(parts) < 2
        ):
            return False
        parts = tuple(parts)
        if not all(isinstance(x, fx.Node) for x in parts) or not self._match(parts):
            return False
        if _name(parts[0]) in ("float", "to"):  # it may be what it is called of
            return False
        inside = {x for group in (*self.wholes, *self.calls) for x in group}
        users = {user for x in inside for user in x.users}
        between = [n for n in graph.nodes if min(inside) < n < node and n not in inside]
        if not self.calls or users - inside != {node} or any(map(writes, between)):
            return False
        with graph.inserting_before(node), torch.no_grad():
            for group in self.calls:
                self._call(group)
        node.replace_all_uses_with(self.wholes[parts])
        split = {x for n in inside for x in n.all_input_nodes if _name(x) in _SPLITS}
        for x in (node, *sorted(inside, reverse=True), *split):
            if not x.users:
                graph.erase_node(x)
        return True

    def _match(self, parts: _Parts) -> bool:
        """Whether nodes are a tensor's parts in order, or alike calls thereof."""
        if parts in self.wholes or parts in self.calls:
            return True
        if (source := self._source(parts)) is not None:
            self.wholes[parts] = source
            return True
        groups = [*zip(*(x.all_input_nodes for x in parts), strict=False)]
        if len({*map(_form, parts)}) > 1 or not groups or not all(map(self._keeps_rows, parts)):
            return False
        if not all(map(self._match, groups)):
            return False
        self.calls.append(parts)
        return True

    def _source(self, parts: _Parts) -> fx.Node | None:
        """The tensor that these are the parts of."""
        x = parts[0].args[0] if parts[0].target is operator.getitem else None
        if not isinstance(x, fx.Node):
            return None
        alike = all(n.target is operator.getitem for n in parts)
        if not alike or [n.args for n in parts] != [(x, i) for i in range(len(parts))]:
            return None
        value = _value(x)
        if _name(x) in _SPLITS:
            stacked = _name(x) == "unbind"
            whole = _dim(x, 0, place=2 - stacked) == 0 and len(value) == len(parts)
            return x.all_input_nodes[0] if whole and stacked == self._is_stack else None
        whole = isinstance(value, torch.Tensor) and value.shape[0] == len(parts)
        return x if whole and self._is_stack else None

    def _keeps_rows(self, node: fx.Node) -> bool:
        """Whether a call makes each row of the same row of inputs."""
        values = [_value(x) for x in node.all_input_nodes]
        if not all(isinstance(x, torch.Tensor) for x in values) or "out" in node.kwargs:
            return False
        ndim = values[0].ndim
        if any(x.ndim != ndim for x in values):
            return False
        firsts = [x.shape[0] for x in values if not self._is_stack]
        alike = all(isinstance(x, int) and x == firsts[0] for x in firsts)  # a symbol may differ
        if not alike and len(firsts) != 1:
            return False
        if _name(node) in _ALONG_ROWS:
            dim = _dim(node, None)
            return isinstance(dim, int) and ndim > 1 - self._is_stack and dim % ndim == ndim - 1
        return _name(node) in _POINTWISE

    def _call(self, parts: _Parts) -> None:
        """Make the call of all parts that these are of each."""
        first = parts[0]
        groups = zip(*(x.all_input_nodes for x in parts), strict=True)
        wholes = {group[0]: self.wholes[group] for group in groups}
        args, kwargs = fx.map_arg((first.args, first.kwargs), wholes.__getitem__)
        if _name(first) in _ALONG_ROWS:
            if "dim" in kwargs:
                kwargs = {**kwargs, "dim": -1}
            else:
                args = (args[0], -1, *args[2:])
        new = first.graph.create_node(first.op, first.target, args, kwargs)
        values, options = fx.map_arg((args, kwargs), _value)
        target: Any = first.target
        called = getattr(torch.Tensor, target) if isinstance(target, str) else target
        new.meta["example_value"] = called(*values, **options)
        self.wholes[parts] = new


def _form(node: fx.Node) -> str:
    """What a node calls, whatever it reads."""
    places = {x: f"%{i}" for i, x in enumerate(node.all_input_nodes)}
    return str((node.op, node.target, fx.map_arg((node.args, node.kwargs), places.__getitem__)))


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _dim(node: fx.Node, default: int | None, place: int = 1) -> Any:
    return node.kwargs.get("dim", (*node.args, *[default] * 3)[place])


def _value(node: fx.Node) -> Any:
    return node.meta["example_value"]


def writes(node: fx.Node) -> bool:
    """Whether a call may write into what it is given, or changes what others do."""
    name, told = _name(node), {"out", "inplace"} & node.kwargs.keys()
    if isinstance(node.target, torch._ops.OperatorBase):
        schema = getattr(node.target, "_schema", None)  # a packet, or of higher order, has none
        return schema is None or schema.is_mutable
    in_place = (
        name.strip("_") in _WRITES
        or name in _MODES
        or (name.endswith("_") and not name.endswith("__"))
    )
    return in_place or bool(told) or any(x is True for x in node.args)  # `inplace`?
