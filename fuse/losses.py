"""Losses of the rows that they need, and logits of no more.

- A script that shifts logits, and not labels, takes rows away behind the product. They are taken
  away before it: the product's rows are those of the loss then.
- A loss that has classes as its second dim, as in images, is given rows: logits are not turned.
- A mixture of two, the logarithm of the sum of the exponentials of a stack, stacks nothing.
- A vocabulary that is no multiple of 16 words gets some more, which are never said: neither kernels
  nor cuBLAS write such rows fast. Inductor pads each product alone, and copies gradients for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coda_agent.fuse.loops import writes
from coda_agent.fuse.nodes import SHORT
from coda_agent.fuse.tables import WIDE

_LINEAR = (F.linear, torch.matmul, torch.mm, operator.matmul, "matmul", "mm")
_CASTS = ("float", "to", "type", "bfloat16", "contiguous")
_SCALES = (operator.mul, operator.truediv, torch.mul, torch.div, "mul", "div")
_POINTWISE = (*_SCALES, operator.imul, operator.itruediv, torch.tanh, "tanh", *_CASTS)
_SIZED, _FLAT = ("view", "reshape", torch.reshape), ("flatten", torch.flatten)
_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
              "label_smoothing")  # fmt: skip
_NEUTRAL = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
"""Those to which words that are never said must be nothing."""
_NEVER, _NEVER_IN_16 = -1e30, -6e4
"""Logits of words that are never said. Their exponentials are 0, and no two infinities meet."""


def spell_by_rows(graph: fx.Graph) -> list[str]:
    """Give losses in a graph of torch calls the rows they need.

    Args:
        graph: As Dynamo records it, with `meta["example_value"]`; it changes.

    Returns:
        Names of the calls that rows were taken by, and of the losses that have rows now.
    """
    losses = graph.find_nodes(op="call_function", target=F.cross_entropy)
    for loss in losses:
        _name_arguments(loss)
    found = [n.name for n in [*graph.nodes] if _take_before(n) or _flatten(n) or _mix(n)]
    return found + [loss.name for loss in losses if _pad(loss)]


def _take_before(node: fx.Node) -> bool:
    """Take rows of what a product multiplies, instead of those it gives."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    chain = [node.args[0]]
    while chain[-1].target in _POINTWISE and len(chain[-1].all_input_nodes) == 1:
        chain += chain[-1].all_input_nodes
    product = chain[-1]
    if product.target not in _LINEAR or any(len(x.users) > 1 for x in chain):
        return False
    if product.kwargs or len(product.args) < 2:
        return False
    if any(_value(x).ndim > 1 for x in product.all_input_nodes[2:]):
        return False
    a, b = map(_value, product.args[:2])
    index = _of_rows(node.args[1], a.ndim)
    if index is None or b.ndim != 2 or _value(node).ndim < 2:
        return False
    if not all(isinstance(x, int) for x in b.shape) or b.numel() <= a.shape[-1] ** 2:
        return False  # rows of the result are no wider than those that are copied
    if any(x > product or _value(x).shape[0] > a.shape[0] for x in node.all_input_nodes[1:]):
        return False
    if any(writes(x) for x in node.graph.nodes if product < x < node and x not in chain):
        return False
    taken: Any = fx.map_arg(index, _value)
    with torch.no_grad():
        rows = a[taken]
        some = _inserted(product, operator.getitem, (product.args[0], index), rows)
        # Of a weight without gradients PyTorch makes a batch of products where rows lie apart.
        some = _inserted(product, "contiguous", (some,), rows.contiguous())
        for x in chain:
            x.meta["example_value"] = _value(x)[taken]
    product.args = (some, *product.args[1:])
    node.replace_all_uses_with(chain[0])
    node.graph.erase_node(node)
    return True


def _of_rows(index: object, ndim: int) -> tuple[Any, ...] | None:
    """Give an index of whole rows without its last dim, or None."""
    if isinstance(index, fx.Node):
        value = _value(index)
        row = isinstance(value, torch.Tensor) and (value.ndim, value.dtype) == (1, torch.int64)
        return (index,) if row and isinstance(value.shape[0], int) and ndim > 1 else None
    items = [*index] if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (ndim - len(items) + 1)
    plain = all(isinstance(x, int | slice) and not isinstance(x, bool) for x in items)
    ends = [y for x in items if isinstance(x, slice) for y in (x.start, x.stop, x.step)]
    if not plain or any(isinstance(x, fx.Node) for x in ends):
        return None
    if len(items) == ndim and items.pop() != slice(None):
        return None
    return tuple(items)


def _flatten(node: fx.Node) -> bool:
    """Give a loss of classes in a middle dim its rows."""
    if node.target is not F.cross_entropy or not _is_turned(node.args[0]):
        return False
    turned, labels = node.args
    if any(node.kwargs.get(name) is not None for name in ("size_average", "reduce")):
        return False
    x: Any = turned.args[0]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    value, places, columns = _value(x), _value(labels), _value(x).shape[-1]
    if value.ndim != 3 or places.ndim != 2 or not isinstance(columns, int):
        return False
    with torch.no_grad():
        rows = _inserted(node, "reshape", (x, -1, columns), value.reshape(-1, columns))
        flat = _inserted(node, "reshape", (labels, -1), places.reshape(-1))
    node.args = (rows, flat)
    if node.kwargs.get("reduction") == "none":
        with node.graph.inserting_after(node):
            whole = node.graph.call_method("view_as", (node, labels))
        whole.meta = dict(node.meta)
        node.meta["example_value"] = _value(node).flatten()
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    return True


def _mix(node: fx.Node) -> bool:
    """Spell the logarithm of two stacked exponentials' sum without a stack."""
    stack = node.args[0] if node.target in (torch.logsumexp, "logsumexp") and node.args else None
    if not isinstance(stack, fx.Node) or stack.target is not torch.stack or not stack.args:
        return False
    if len(node.args) + len(node.kwargs) != 2:
        return False
    pair, at = (*stack.args, stack.kwargs.get("dim", 0))[:2]
    _, dim = (*node.args, node.kwargs.get("dim"))[:2]
    if not isinstance(pair, list | tuple) or len(pair) != 2 or (dim, at) != (0, 0):
        return False
    if [*stack.users] != [node] or {"out"} & (stack.kwargs.keys() | node.kwargs.keys()):
        return False
    if not _value(stack).is_floating_point():
        return False
    first: Any = pair[0]
    if any(map(writes, (x for x in node.graph.nodes if first < x < node))):
        return False
    node.op, node.target = "call_function", torch.logaddexp
    node.args, node.kwargs = tuple(pair), {}
    node.graph.erase_node(stack)
    return True


def _name_arguments(loss: fx.Node) -> None:
    """Give a loss's logits and labels by position, the rest by name."""
    named = {**dict(zip(_ARGUMENTS, loss.args, strict=False)), **loss.kwargs}
    loss.args, loss.kwargs = (named.pop("input"), named.pop("target")), named


def _pad(loss: fx.Node) -> bool:
    """Pad a loss's product with columns never said, cut ones among them."""
    if not (chain := _chain(loss)):
        return False
    product, seen = chain[-1], _value(chain[0]).shape[-1]
    x, weight, bias = (*product.args, None)[:3]
    old: Any = _value(weight)
    words, dim = old.shape
    width = words if words % 16 == 0 else -(-words // 64) * 64
    short = any(_value(n).dtype is torch.float16 for n in chain)
    if width == seen or (short and any(n.target in _SCALES for n in chain)):
        return False
    with torch.no_grad():
        if width > words:
            more = (weight, (0, 0, 0, width - words))
            weight = _inserted(product, F.pad, more, old.new_empty(width, dim))
        own = old.new_empty(seen)
        if bias is None:
            bias = _inserted(product, "new_zeros", (weight, (seen,)), own)
        elif seen < words:
            bias = _inserted(product, operator.getitem, (bias, slice(seen)), own)
        more = (bias, (0, width - seen), "constant", _NEVER_IN_16 if short else _NEVER)
        product.args = (x, weight, _inserted(product, F.pad, more, old.new_empty(width)))
        loss.args = loss.args[0], _checked(loss, seen)
        for n in chain[::-1]:
            if _cuts(n):
                n.replace_all_uses_with(n.args[0])
                n.graph.erase_node(n)
            else:
                _widen(n, width)
    return True


def _checked(loss: fx.Node, words: int) -> fx.Node:
    """Look labels up among the words, so that one beyond them raises as it did."""
    labels: Any = loss.args[1]
    value = _value(labels)
    ignored = _inserted(loss, "eq", (labels, loss.kwargs.get("ignore_index", -100)), value == 0)
    said = _inserted(loss, "masked_fill", (labels, ignored, 0), value)
    with loss.graph.inserting_before(loss):
        every = loss.graph.call_function(torch.arange, (words,), {"device": value.device})
    every.meta["example_value"] = value.new_empty(words, dtype=torch.int64)
    found = _inserted(loss, torch.gather, (every, 0, said), value)
    return _inserted(loss, torch.where, (ignored, labels, found), value)


def _widen(node: fx.Node, width: int) -> None:
    """Let a call's value have other columns."""
    value = _value(node)
    if node.target in _SIZED:
        args: Any = node.args
        listed = isinstance(args[1], tuple | list)
        sizes = [*(args[1] if listed else args[1:])[:-1], width]
        node.args = (args[0], sizes) if listed else (args[0], *sizes)
    node.meta["example_value"] = value.new_empty(*value.shape[:-1], width)


def _chain(loss: fx.Node) -> list[Any]:
    """List the calls from a loss's logits back to a paddable product."""
    has_rows = _value(loss.args[0]).ndim == 2  # else classes are not the last dim
    if not has_rows or any(_NEUTRAL.get(name, x) != x for name, x in loss.kwargs.items()):
        return []
    chain: list[Any] = [loss.args[0]]
    while chain[-1].target is not F.linear:
        if not (_keeps_columns(chain[-1]) or _cuts(chain[-1])):
            return []
        chain.append(chain[-1].args[0])
    product, classes = chain[-1], _value(loss.args[1])
    if product.kwargs or len(product.args) < 2 or _value(product.args[1]).ndim != 2:
        return []
    value, weight = _value(product), _value(product.args[1])
    large = not isinstance(value.numel(), int) or value.numel() >= WIDE
    plain = not is_traceable_wrapper_subclass(weight)
    read = all(len(x.users) == 1 for x in chain) and not classes.is_floating_point()
    return chain if large and plain and read and value.dtype in SHORT else []


def _keeps_columns(node: fx.Node) -> bool:
    """Whether a call keeps its columns, and the least of them least."""
    values = [_value(x) for x in (node, *node.args[:1]) if isinstance(x, fx.Node)]
    if len(values) < 2 or not all(isinstance(x, torch.Tensor) for x in values):
        return False
    after, before = (x.shape for x in values)
    if node.target is operator.getitem:
        return _of_rows(node.args[1], len(before)) is not None
    if node.target in _SCALES:
        return isinstance(node.args[1], int | float) and 0.1 <= node.args[1] <= 10
    views = node.target in _FLAT or (node.target in _SIZED and len(node.args) > 1)
    return (node.target in _CASTS or views) and before[-1:] == after[-1:]


def _cuts(node: fx.Node) -> bool:
    """Whether a call takes the first columns of all rows."""
    index = node.args[1] if node.target is operator.getitem else None
    if not isinstance(index, tuple) or not isinstance(index[-1], slice):
        return False
    first, last, step = index[-1].start, index[-1].stop, index[-1].step
    whole = all(x is Ellipsis or x == slice(None) for x in index[:-1])
    reaches = Ellipsis in index or len(index) == _value(node.args[0]).ndim
    return whole and reaches and first in (None, 0) and step in (None, 1) and isinstance(last, int)


def _is_turned(node: object) -> bool:
    """Whether a node exchanges the last two of three dims."""
    if not isinstance(node, fx.Node) or not all(isinstance(x, int) for x in node.args[1:]):
        return False
    dims = [x % 3 for x in node.args[1:]]  # pyright: ignore[reportOperatorIssue]
    exchanged = node.target in ("transpose", "swapaxes") and {*dims} == {1, 2}
    return exchanged or (node.target == "permute" and dims == [0, 2, 1])


def _inserted(
    node: fx.Node, target: str | Callable[..., object], args: Any, value: object
) -> fx.Node:
    graph = node.graph
    with graph.inserting_before(node):
        kind = graph.call_method if isinstance(target, str) else graph.call_function
        new = kind(target, args)  # pyright: ignore[reportArgumentType]
    new.meta["example_value"] = value
    return new


def _value(node: Any) -> torch.Tensor:
    return node.meta["example_value"]
