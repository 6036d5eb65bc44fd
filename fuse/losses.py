"""Losses of the rows that they need: what a script does to all logits is done to fewer, or not.

- A script that shifts logits, and not labels, takes rows away behind the product. They are taken
  away before it: the product's rows are those of the loss then.
- A loss that has classes as its second dim, as in images, is given rows: logits are not turned.
- A mixture of two, the logarithm of the sum of the exponentials of a stack, stacks nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_LINEAR = (F.linear, torch.matmul, torch.mm, operator.matmul, "matmul", "mm")
_POINTWISE = (operator.mul, operator.truediv, operator.imul, operator.itruediv, torch.mul,
              torch.div, torch.tanh, "mul", "div", "tanh", "float", "to", "type", "bfloat16",
              "contiguous")  # fmt: skip


def spell_by_rows(graph: fx.Graph) -> list[str]:
    """Give losses the rows that they need in a graph of torch calls.

    Args:
        graph: As Dynamo records it, with `meta["example_value"]`; it changes.

    Returns:
        Names of the calls that rows were taken by, and of the losses that have rows now.
    """
    return [n.name for n in [*graph.nodes] if _take_before(n) or _flatten(n) or _mix(n)]


def _take_before(node: fx.Node) -> bool:
    """Take rows of what a product multiplies that were taken of what is made of it pointwise."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    chain = [node.args[0]]
    while chain[-1].target in _POINTWISE and len(chain[-1].all_input_nodes) == 1:
        chain += chain[-1].all_input_nodes
    product = chain[-1]
    if product.target not in _LINEAR or any(len(x.users) > 1 for x in chain):
        return False
    a, b = map(_value, product.args[:2])
    index = _of_rows(node.args[1], a.ndim)
    if product.kwargs or index is None or b.ndim != 2 or _value(node).ndim < 2:
        return False
    if not all(isinstance(x, int) for x in b.shape) or b.numel() <= a.shape[-1] ** 2:
        return False  # rows of the result are no wider than those that are copied
    if any(x > product or _value(x).shape[0] > a.shape[0] for x in node.all_input_nodes[1:]):
        return False
    taken: Any = fx.map_arg(index, _value)
    with torch.no_grad():
        some = _inserted(product, operator.getitem, (product.args[0], index), a[taken])
        for x in chain:
            x.meta["example_value"] = _value(x)[taken]
    product.args = (some, *product.args[1:])
    node.replace_all_uses_with(chain[0])
    node.graph.erase_node(node)
    return True


def _of_rows(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """An index by numbers, or a row of them, that takes whole rows, without its last dim; None of
    other ones."""
    if isinstance(index, fx.Node):
        value = _value(index)
        row = isinstance(value, torch.Tensor) and (value.ndim, value.dtype) == (1, torch.int64)
        return (index,) if row and isinstance(value.shape[0], int) and ndim > 1 else None
    items = [*index] if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (ndim - len(items) + 1)
    plain = all(isinstance(x, int | slice) for x in items)
    ends = [y for x in items if isinstance(x, slice) for y in (x.start, x.stop, x.step)]
    if not plain or any(isinstance(x, fx.Node) for x in ends):
        return None
    if len(items) == ndim and items.pop() != slice(None):
        return None
    return tuple(items)


def _flatten(node: fx.Node) -> bool:
    """Give a loss of classes in the second of three dims its rows."""
    if node.target is not F.cross_entropy or len(node.args) not in (2, 3):
        return False
    turned, labels, *rest = node.args
    names = {"weight", "ignore_index", "reduction", "label_smoothing"}
    if not _is_turned(turned) or not names.issuperset(node.kwargs):
        return False
    x: Any = turned.args[0]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    value, places, columns = _value(x), _value(labels), _value(x).shape[-1]
    if value.ndim != 3 or places.ndim != 2 or not isinstance(columns, int):
        return False
    with torch.no_grad():
        rows = _inserted(node, "reshape", (x, -1, columns), value.reshape(-1, columns))
        flat = _inserted(node, "reshape", (labels, -1), places.reshape(-1))
    node.args = (rows, flat, *rest)
    if node.kwargs.get("reduction") == "none":
        with node.graph.inserting_after(node):
            whole = node.graph.call_method("view_as", (node, labels))
        whole.meta = dict(node.meta)
        node.meta["example_value"] = _value(node).flatten()
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    return True


def _mix(node: fx.Node) -> bool:
    """Spell the logarithm of the sum of two exponentials, which are stacked, without a stack."""
    stack = node.args[0] if node.target in (torch.logsumexp, "logsumexp") and node.args else None
    if not isinstance(stack, fx.Node) or stack.target is not torch.stack or not stack.args:
        return False
    if len(node.args) + len(node.kwargs) != 2:
        return False
    pair, at = (*stack.args, stack.kwargs.get("dim", 0))[:2]
    _, dim = (*node.args, node.kwargs.get("dim"))[:2]
    if not isinstance(pair, list | tuple) or len(pair) != 2 or (dim, at) != (0, 0):
        return False
    with node.graph.inserting_before(node):
        mixed = node.graph.call_function(torch.logaddexp, tuple(pair))
    mixed.meta = dict(node.meta)
    node.replace_all_uses_with(mixed)
    node.graph.erase_node(node)
    if not stack.users:
        node.graph.erase_node(stack)
    return True


def _is_turned(node: Any) -> bool:
    """Whether a node exchanges the last two of three dims."""
    if not isinstance(node, fx.Node) or not all(isinstance(x, int) for x in node.args[1:]):
        return False
    dims = [x % 3 for x in node.args[1:]]  # pyright: ignore[reportOperatorIssue]
    exchanged = node.target in ("transpose", "swapaxes") and {*dims} == {1, 2}
    return exchanged or (node.target == "permute" and dims == [0, 2, 1])


def _inserted(node: fx.Node, target: str | Callable[..., Any], args: Any, value: Any) -> fx.Node:
    graph = node.graph
    with graph.inserting_before(node):
        kind = graph.call_method if isinstance(target, str) else graph.call_function
        new = kind(target, args)  # pyright: ignore[reportArgumentType]
    new.meta["example_value"] = value
    return new


def _value(node: Any) -> torch.Tensor:
    return node.meta["example_value"]
