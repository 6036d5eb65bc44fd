"""A function's torch calls as a functional ATen graph of fixed sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from coda_agent.agent.authors.composer.capture import decompositions
from coda_agent.agent.authors.composer.retrace import APART, share
from coda_agent.primitives.errors import ProgramError
from coda_agent.specs.recording import alone

aten = torch.ops.aten


def recorded(function: Callable[..., object], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Record what a function calls; the graph gives a list of tensors.

    Raises:
        ProgramError: it draws random numbers, or writes to an argument.
        Exception: whatever the function raises.
    """
    with alone(), torch.no_grad():
        pure = torch.func.functionalize(lambda *x: tree_leaves(function(*x)), remove="mutations")
        module = make_fx(pure, _table(), tracing_mode="fake", _allow_non_fake_inputs=True)(
            *[t.detach() for t in tensors]
        )
    for node in [*module.graph.nodes]:
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            raise ProgramError("it writes to an argument")
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ProgramError(f"it draws random numbers ({node.name})")
        _write_nothing(node)
    share(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _write_nothing(node: fx.Node) -> None:
    """Let a call that writes to a value give a new one."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or not schema.name.endswith("_"):
        return
    written = node.args[0]
    packet = getattr(aten, schema.name.split("::")[1][:-1], None)
    overload = getattr(packet, schema.overload_name or "default", None)
    if overload is None or not isinstance(written, fx.Node) or written.op != "call_function":
        return
    node.target = overload
    written.replace_all_uses_with(node, delete_user_cb=lambda user: user > node)


def _table() -> dict[Any, Callable[..., object]]:
    """List the composer's decompositions, and those of losses by rows."""
    simpler = get_decompositions([aten.nll_loss_forward, aten.nll_loss2d_forward])
    own = {aten._log_softmax.default: _log_softmax, aten.addmm.default: _addmm}
    return {**decompositions(), **APART, **simpler, **own}


def _addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = torch.mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (c if beta == 1 else c * beta)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    x = x.float() if half_to_float else x
    return x - torch.logsumexp(x, dim, keepdim=True)
