"""A captured layer as a function: between two layers' projections, attention included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.agent.capture.config import Layer
from coda_agent.agent.capture.pieces import Piece, between, pieces, turned
from coda_agent.agent.plans.passes import by_passes
from coda_agent.agent.plans.ways import fastest

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = ("attended", "residual")
Run = Callable[[Mapping[str, "Tensor"]], "tuple[Tensor, ...]"]
Part = Callable[[Layer, Mapping[str, "Tensor"]], "Sequence[Tensor]"]


def attending(
    c: Layer, t: Mapping[str, Tensor], heads: Part = turned, rest: Part = between
) -> tuple[Tensor, ...]:
    """From queries, keys and values to the residual stream and the next layer's.

    Args:
        c: The layer.
        t: q, k, v and residual, each (batch, positions, width), and what the pieces "heads" and
            "layer" take.
        heads, rest: The two pieces, or what computes the same.
    """
    import torch.nn.functional as F

    q, k = (x.transpose(1, 2) for x in heads(c, t))
    v = t["v"].unflatten(-1, (-1, c.sizes["head"])).transpose(1, 2)
    causal = c.family.norm != "modulated"
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return tuple(rest(c, {**t, "attended": y.transpose(1, 2).flatten(2)}))


class ByPlans:
    """`attending` with each pass of each piece by its plan; attention is PyTorch's.

    On a GPU the first call that is differentiated times it, forward and backward, beside
    torch.compile of the whole, which runs from then on where plans are not faster.

    Attributes:
        way: "plans" or "torch.compile".
        us: The times of both; None before they are taken, and empty where torch.compile fails.
    """

    def __init__(self, c: Layer, batch: int, positions: int, *, judged: bool = True) -> None:
        found = {p.name: p for p in pieces(c, batch, positions) if p.name != "exit"}
        parts = {name: _planned(c, piece, judged=judged) for name, piece in found.items()}
        heads, rest = parts.get("heads", turned), parts["layer"]
        self.layer, self.way = c, "plans"
        self.us: dict[str, float] | None = None
        self._run: Run = lambda t: attending(c, t, heads, rest)

    def __call__(self, t: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        import torch

        if self.us is None and t["residual"].is_cuda and torch.is_grad_enabled():
            self._choose(t)
        return self._run(t)

    def _choose(self, t: Mapping[str, Tensor]) -> None:
        import torch

        whole = torch.compile(lambda t: attending(self.layer, t), dynamic=False)
        ways: dict[str, Run] = {"torch.compile": whole, "plans": self._run}
        self.us = {}
        try:
            step(whole, t)
        except Exception:  # of Inductor, whatever it is
            return
        self.way, self.us = fastest({name: partial(step, way, t) for name, way in ways.items()})
        self._run = ways[self.way]


def step(way: Run, t: Mapping[str, Tensor]) -> None:
    """Both passes as in training, where each gradient comes to lie as its weight does. What a plan
    has merged is copied then: without that, plans of TinyLlama at 32 tokens took 265 us of an H200,
    and with it 333. The tensors given keep their gradients."""
    import torch

    given = {name: x.detach().requires_grad_(x.requires_grad) for name, x in t.items()}
    with torch.enable_grad():
        outs = way(given)
        torch.autograd.backward(outs, [torch.ones_like(y) for y in outs])


def _planned(c: Layer, piece: Piece, *, judged: bool) -> Part:
    names = [*piece.inputs]
    # A condition belongs to a sample, so that rows of several samples are not one dim.
    flat = piece.name == "layer" and c.family.norm != "modulated"

    def function(*tensors: Tensor) -> Any:
        return piece.function(c, dict(zip(names, tensors, strict=True)))

    call = by_passes(function, judged=judged)

    def run(_: Layer, t: Mapping[str, Tensor]) -> Sequence[Tensor]:
        if not flat:
            return call(*(t[name] for name in names))
        rows = t["residual"].shape[:-1]
        results = call(*(t[n].flatten(0, -2) if n in _ROWS else t[n] for n in names))
        return [y.unflatten(0, rows) for y in results]

    return run
