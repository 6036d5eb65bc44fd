"""A plan as an operator of torch, with gradients, so that torch.compile takes it whole."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from coda_agent.agent.plans.cut import Plan
from coda_agent.agent.plans.run import Runner
from coda_agent.agent.plans.trace import plain

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Planned:
    """What calls with tensors of some shapes run.

    Attributes:
        plan: The plan.
        torch: The function's own calls.
        run: What runs: the plan, or the function's own calls where these are faster, as they are or
            by torch.compile.
        structure: Of what the function returns.
        held: Where the tensors are that it takes beside its arguments.
        number: What its operator is told.
    """

    plan: Plan
    torch: Runner
    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    structure: Any
    held: tuple[str, ...]
    number: int

    @functools.cached_property
    def why(self) -> str:
        """What of the plan PyTorch runs, in one line."""
        said = dict.fromkeys(f"{v.called}: {why}" for v, why in self.plan.why.items())
        return "; ".join(said) or "no product of 16-bit matrices" * (not self.plan.kernels)

    @functools.cached_property
    def returned(self) -> Callable[[list[torch.Tensor]], Any]:
        """What makes of the results what the function returns."""
        from torch.utils._pytree import tree_unflatten

        if self.structure.is_leaf():
            return itemgetter(0)
        flat = self.structure.num_children == self.structure.num_leaves
        if self.structure.type in (tuple, list) and flat:
            return self.structure.type
        return functools.partial(tree_unflatten, treespec=self.structure)

    def suits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it was planned for tensors like these."""
        known = [x.meta for x in self.plan.graph.inputs]
        return len(known) == len(tensors) and all(
            [
                tuple(map(plain, x.shape)) == tuple(t.shape) and x.dtype == t.dtype
                for x, t in zip(known, tensors, strict=True)
            ]
        )


PLANNED: weakref.WeakValueDictionary[int, Planned] = weakref.WeakValueDictionary()
"""What was planned, by number, as long as its `Fused` lives or its gradients are awaited."""
NUMBERS = itertools.count()


@functools.lru_cache(maxsize=1)
def register() -> Any:
    """Registers the operators `coda_agent::planned` and `coda_agent::planned_backward`."""
    import torch

    library = torch.library.Library("coda_agent", "FRAGMENT")
    tag = (torch.Tag.pt2_compliant_tag,)
    library.define("planned(Tensor[] tensors, int which) -> Tensor[]", tags=tag)
    library.define(
        "planned_backward(Tensor?[] grads, Tensor[] tensors, bool[] wanted, int which) -> Tensor[]",
        tags=tag,
    )

    def run(tensors: list[torch.Tensor], which: int) -> list[torch.Tensor]:
        taken = {t.untyped_storage().data_ptr() for t in tensors}
        with torch.no_grad():
            results = PLANNED[which].run(tensors)
        # An operator's results share no memory with its inputs, nor with each other.
        for i, t in enumerate(results):
            if t.untyped_storage().data_ptr() in taken:
                results[i] = t.clone()
            taken.add(t.untyped_storage().data_ptr())
        return results

    def fake(tensors: list[torch.Tensor], which: int) -> list[torch.Tensor]:
        results = PLANNED[which].plan.graph.results
        return [tensors[0].new_empty(v.shape, dtype=v.meta.dtype) for v in results]

    def back(
        grads: list[torch.Tensor | None],
        tensors: list[torch.Tensor],
        wanted: list[bool],
        which: int,
    ) -> list[torch.Tensor]:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
            return _gradients(PLANNED[which].torch, inputs, grads)

    def fake_back(
        grads: Any, tensors: list[torch.Tensor], wanted: list[bool], which: int
    ) -> list[torch.Tensor]:
        return [torch.empty_like(t) for t, w in zip(tensors, wanted, strict=True) if w]

    for name, body, shapes in (("planned", run, fake), ("planned_backward", back, fake_back)):
        for key in ("CPU", "CUDA"):
            library.impl(name, body, key)
        torch.library.register_fake(f"coda_agent::{name}", shapes, lib=library)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, which = inputs
        ctx.planned = PLANNED[which]
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, grads: list[torch.Tensor | None]) -> Any:
        tensors = list(ctx.saved_tensors)
        wanted = [t.requires_grad for t in tensors]
        if torch.is_grad_enabled():  # with create_graph: these gradients have some themselves
            inputs = [t.view_as(t) for t in tensors]  # one may be made of another
            found = iter(_gradients(ctx.planned.torch, inputs, grads, create_graph=True))
        else:
            found = iter(
                torch.ops.coda_agent.planned_backward(grads, tensors, wanted, ctx.planned.number)
            )
        return [next(found) if w else None for w in wanted], None

    torch.library.register_autograd(
        "coda_agent::planned", backward, setup_context=setup, lib=library
    )
    return library


def _gradients(
    run: Runner,
    inputs: list[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    *,
    create_graph: bool = False,
) -> list[torch.Tensor]:
    """PyTorch's gradients of what a runner computes, of those inputs that require some."""
    import torch

    pairs = [
        (r, g) for r, g in zip(run(inputs), grads, strict=True) if g is not None and r.requires_grad
    ]
    found = torch.autograd.grad(
        [r for r, _ in pairs], [t for t in inputs if t.requires_grad], [g for _, g in pairs],
        allow_unused=True, materialize_grads=True, create_graph=create_graph,
    )  # fmt: skip
    return [*found]
