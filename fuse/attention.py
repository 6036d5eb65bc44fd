"""Attention's mask by word: causal, where the tensor says no more.

transformers 5 makes a mask of (B, 1, S, S) under torch.compile (torch before 2.14) and repeats keys
and values. With a mask no flash kernel runs: a training step of Llama-3.2-1B, 4 x 4096 tokens, took
338 ms on an H100 with it and 260 ms without (torch 2.11, AdamW included).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from coda_agent.agent.authors.composer.calls import reached
from coda_agent.fuse.nodes import evaluate

_LARGEST = 1 << 28
"""Elements of a mask at most that are looked at, one after the other in Python's time."""


def fold_masks(
    graph: fx.Graph, inputs: Mapping[fx.Node, torch.Tensor] | None = None
) -> dict[str, set[fx.Node]]:
    """Give attention its mask by word in a graph of torch calls.

    Args:
        graph: As Dynamo records it, with `meta["example_value"]`; it changes.
        inputs: Those whose values a mask may be made of.

    Returns:
        Names of the calls that are causal now, or whose mask hides nothing; and of which inputs
        their masks are made.
    """
    known: dict[fx.Node, tuple[str, set[fx.Node]]] = {}
    folded: dict[str, set[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        arguments = dict(zip(("query", "key", "value", "attn_mask"), node.args, strict=False))
        arguments |= node.kwargs
        mask = arguments.get("attn_mask")
        if len(node.args) > 4 or not isinstance(mask, fx.Node) or arguments.get("is_causal"):
            continue
        if mask not in known:
            known[mask] = _meaning(mask, inputs or {})
        word, of = known[mask]
        if not word or not _fits(mask, arguments):
            continue
        arguments |= {"attn_mask": None, "is_causal": word == "causal"}
        key, value = _unrepeated(arguments["key"]), _unrepeated(arguments["value"])
        if key and value and not arguments.get("enable_gqa") and _groups(arguments, key, value):
            arguments |= {"key": key, "value": value, "enable_gqa": True}
        node.args, node.kwargs = (), arguments
        folded[node.name] = of
    return folded  # what nobody reads now is left: in these graphs it may write in place


def _groups(arguments: dict[str, Any], key: fx.Node, value: fx.Node) -> bool:
    """Whether each head of keys and values serves as many queries' as it is repeated."""
    query, few, many, values = (
        node.meta["example_value"].shape[1]
        for node in (arguments["query"], key, arguments["key"], value)
    )
    return query == many and few == values


def _fits(mask: fx.Node, arguments: dict[str, Any]) -> bool:
    """Whether a mask's sizes are the numbers of queries and keys, and it repeats no queries."""
    queries, keys = (arguments[x].meta["example_value"].shape for x in ("query", "key"))
    *lead, rows, columns = mask.meta["example_value"].shape
    pairs = zip(lead[::-1], queries[-3::-1], strict=False)
    whole = len(lead) <= len(queries) - 2 and all(n == 1 or n == of for n, of in pairs)
    return whole and [rows, columns] == [queries[-2], keys[-2]]


def _meaning(mask: fx.Node, inputs: Mapping[fx.Node, torch.Tensor]) -> tuple[str, set[fx.Node]]:
    """Read "causal" or "all" off a mask, else ""; and give the inputs that it is made of."""
    made = reached([mask], lambda n: () if n in inputs else n.all_input_nodes)
    of = made & inputs.keys()
    needed = made - of
    if any(node.op not in ("call_function", "call_method") for node in needed):
        return "", of
    shown = mask.meta.get("example_value")
    sizes = [x for n in needed for x in getattr(n.meta.get("example_value"), "shape", ())]
    if not isinstance(shown, torch.Tensor) or any(not isinstance(x, int) for x in sizes):
        return "", of
    if shown.ndim < 2 or shown.numel() > _LARGEST or any(_version(n) for n in of):
        return "", of
    users = {user for node in (*needed, *of) for user in node.users}
    if any(getattr(x.target, "__name__", "") == "_get_data_attr" for x in users):
        return "", of  # its writes are not counted
    with (
        _disable_current_modes(),
        unset_fake_temporarily(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        values: dict[fx.Node, Any] = {node: inputs[node].clone() for node in of}
        cuda = [shown.device] if shown.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            before = _random_states(cuda)
            evaluate([node for node in mask.graph.nodes if node in needed], values)
            if not all(map(torch.equal, before, _random_states(cuda))):
                return "", of
        # A write to a part of a mask is nobody's argument, but Dynamo's tensors count it.
        if any(_version(node) != getattr(values[node], "_version", 0) for node in needed):
            return "", of
        return _word(values[mask]), of


def _random_states(cuda: list[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda)]


def _version(node: fx.Node) -> int:
    """Count the writes to a node's memory, in all of a graph."""
    return getattr(node.meta.get("example_value"), "_version", 0)


def _word(mask: torch.Tensor) -> str:
    if mask.dtype is not torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not ((mask == 0) | hidden).all():
            return ""
        mask = ~hidden
    rows, columns = mask.shape[-2:]
    if mask.all():
        return "all"
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    return "causal" if rows == columns and (mask == causal).all() else ""


def _unrepeated(x: Any) -> fx.Node | None:
    """Find the keys or values whose heads these repeat, each in turn."""
    expanded = _input(x, ("reshape",))
    single = _input(expanded, ("expand",))
    if expanded is None or single is None or not _adds_a_dim(single):
        return None
    heads = single.all_input_nodes[0]
    if any(map(_version, (x, expanded, single, heads))):
        return None
    # (B, H, S, D), (B, H, 1, S, D), (B, H, G, S, D) and (B, G H, S, D)
    few, one, many, all_heads = (
        [*n.meta["example_value"].shape] for n in (heads, single, expanded, x)
    )
    if len(few) != 4 or len(many) != 5 or one != [*few[:2], 1, *few[2:]]:
        return None
    if many != [*few[:2], many[2], *few[2:]] or all_heads != [few[0], few[1] * many[2], *few[2:]]:
        return None
    return heads


def _adds_a_dim(node: fx.Node) -> bool:
    """Whether a node is another's heads in their order, with a dim more."""
    if node.target == "unsqueeze":
        return node.args[1:] == (2,)
    index = node.args[1] if node.target is operator.getitem else None
    if not isinstance(index, tuple) or len(node.all_input_nodes) != 1:
        return False
    return all(x is None or x is Ellipsis or x == slice(None) for x in index)


def _input(node: object, names: tuple[str, ...]) -> fx.Node | None:
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target not in names:
        return None
    return node.all_input_nodes[0]
