"""From an ATen graph to canonical expressions over the accumulator.

- Floating casts vanish: a kernel computes in float32 throughout and rounds once, at each store.
- The GEMM's operands must be the spec's own, times scales that commute past it: one per row, or
  one for all.
- What a program cannot express is refused with the operation and the line of the spec it stands on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.fx
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from coda_agent.agent.authors.composer.across import Across
from coda_agent.agent.authors.composer.aten import ACROSS, SPELLED, VIEWS, meaning, truth
from coda_agent.agent.authors.composer.calls import CASTS
from coda_agent.agent.authors.composer.codes import Elements, Unusable
from coda_agent.agent.authors.composer.elementwise import Elementwise
from coda_agent.agent.authors.composer.expression import Expr, apply, walk
from coda_agent.agent.authors.composer.inputs import Inputs
from coda_agent.agent.authors.composer.layout import Layout
from coda_agent.agent.authors.composer.outputs import Outputs
from coda_agent.agent.authors.composer.places import Places
from coda_agent.agent.authors.composer.problem import Problem, Refusal, Rewritten
from coda_agent.agent.authors.composer.product import Product
from coda_agent.agent.authors.composer.rounding import rounding
from coda_agent.primitives.errors import ProgramError


def rewrite(problem: Problem) -> Rewritten:
    """Derive the canonical expressions of a graph.

    Raises:
        ProgramError: No epilogue program computes this; says which operation is the reason.
    """
    return Rewriter(problem).run()


class Rewriter:
    """The rewriting of one graph."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.layout = problem, Layout(problem)
        self.elementwise = Elementwise(self.layout)
        self.across = Across(self.layout, self.elementwise.apply)
        self.places = Places(self.elementwise)
        self.product = Product(self.layout)
        self.inputs = Inputs(self.layout)

    def run(self) -> Rewritten:
        """Rewrite the graph."""
        stored = Outputs(self.layout, self.inputs.leaves)
        values, outputs = stored.of(self.trace())
        if not any(e == self.product.acc for e in walk(list(values.values()))):
            message = f"no output needs the product of {' and '.join(self.problem.sides)}"
            hint = "return what is computed with it"
            raise ProgramError(f"{self.problem.source}{message}", hint=hint)
        return replace(self.rewritten(values, outputs), parts=stored.parts)

    def trace(self) -> Any:
        """Rewrite each node; what the graph returns."""
        env: dict[fx.Node, Any] = {}
        inputs = iter(enumerate(self.problem.inputs, start=1))
        returned: Any = None
        for node in self.problem.module.graph.nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            match node.op:
                case "placeholder":
                    env[node] = self.inputs.entered(*next(inputs))
                case "get_attr":
                    env[node] = getattr(self.problem.module, node.target)
                case "output":
                    returned = args[0]
                case _:
                    try:
                        env[node] = self._node(node, args, dict(kwargs))
                    except ProgramError as error:
                        refusal = Refusal(self._at(node) + error.message, error.hint, node)
                        env[node] = self.refused(refusal, (args, kwargs))
                    except (TypeError, KeyError):
                        message = self._at(node) + "takes an argument that no primitive has"
                        refusal = Refusal(message, SPELLED, node)
                        env[node] = self.refused(refusal, (args, kwargs))
                    if _in_place(node):
                        env[node.args[0]] = env[node]
        return returned

    def refused(self, error: Refusal, args: object) -> object:
        """Answer for a node that cannot be rewritten."""
        raise error from None

    def rewritten(self, values: Mapping[str, Expr], outputs: Mapping[str, str]) -> Rewritten:
        """Make the program of these values, with the operands that they use."""
        operands = self.inputs.operands(values.values())
        return Rewritten(self.problem.name, operands, outputs, values)

    def _at(self, node: fx.Node) -> str:
        """Where a node stands and what it calls, as a message begins."""
        called = node.meta.get("original_aten") or node.target
        return f"{self.problem.place(node)}{_name(node, called).lstrip('_')}: "

    def _node(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        op, target = _name(node), cast("Callable[..., Any]", node.target)
        evaluated = op == "rrelu_with_noise" and not any(args[4:5])
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and not evaluated:
            raise ProgramError(
                "draws random numbers", hint="draw them before, and give them as an input"
            )
        flat: list[object] = tree_leaves((args, kwargs))
        for value in flat:
            if isinstance(value, Unusable) and op != "getitem":
                raise ProgramError(value.reason, hint=value.hint)
        if op == "copy_":
            raise ProgramError("writes to an input in place", hint=_IN_PLACE)
        if op in ("tril", "triu") and (found := self.places.triangle(op, *args)) is not None:
            return found
        if op == "philox":
            return self.places.of_tile("philox_uniform", tuple(args[3:]), *args[1:3])
        if not any(isinstance(value, Elements) for value in flat):
            if getattr(kwargs.get("dtype"), "is_floating_point", False):
                kwargs["dtype"] = torch.float64  # of 0.1 float32 keeps half of the digits
            found = target(*args, **kwargs)
            if op in ("arange", "iota"):
                return self.places.counted(found)
            if op.startswith("empty"):  # Whatever memory held must not enter.
                return Elements(self.elementwise.lift(math.nan).codes.expand(found.shape))
            return found
        if op in CASTS:
            return self._cast(node, args[0])
        if op == "_local_scalar_dense":
            return args[0]
        if op == "full":
            shape = args[0].codes.shape if isinstance(args[0], Elements) else args[0]
            return Elements(self.elementwise.lift(args[1]).codes.expand(shape))
        if op in ("mm", "bmm"):
            return self.product.gemm(*args)
        if op in self.across.meaning:
            return self.across.meaning[op](*args, **kwargs)
        if op == "remainder" and self.across.is_index(args[0]):
            if args[1] == self.layout.extents["N"]:
                return args[0]
        if op == "index" and any(isinstance(i, Elements) for i in args[1]):
            return self.across.select(*args)
        if op == "where" and isinstance(args[0], torch.Tensor):
            x, y = (self.elementwise.lift(a).codes for a in args[1:])
            return Elements(torch.where(args[0], x, y))
        if op in VIEWS:
            return self._view(op, target, args, kwargs)
        function = meaning(_LOGICAL.get(op, op) if _dtype(node) is torch.bool else op)
        if function is None:
            if op in ACROSS:
                raise self.across.refusal(args[0])
            raise ProgramError("has no counterpart among the primitives", hint=SPELLED)
        with self.elementwise.in_order(node):
            result = self.elementwise.apply(function, args, kwargs)
        return [result, None] if op == "log_sigmoid_forward" else result

    def _cast(self, node: fx.Node, x: Any) -> Any:
        """`x` in another type: the same number, or a condition."""
        source, dtype = _dtype(node.args[0]), _dtype(node)
        if dtype is not None and self.problem.rounds(node):
            return self.elementwise.apply(partial(apply, rounding(dtype)), [x], {})
        if dtype is None or dtype.is_floating_point or dtype == source or self.across.is_index(x):
            return x
        if dtype is torch.bool:
            return self.elementwise.apply(truth, [x], {})
        if source is not None and not source.is_floating_point and dtype.itemsize >= 4:
            return x
        raise ProgramError(
            f"casts to {dtype}, and an epilogue computes in float32",
            hint="torch.trunc and torch.round give whole numbers",
        )

    def _view(
        self, op: str, target: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        def codes(value: Any) -> Any:
            """Of what is moved; constants that index are not."""
            moved = Elements if op == "index" else (Elements, torch.Tensor)
            return self.elementwise.lift(value).codes if isinstance(value, moved) else value

        if op == "copy":
            return Elements(codes(args[1]).expand(codes(args[0]).shape))
        if op in ("view", "_unsafe_view"):  # the strides of codes are not the tensor's
            target = torch.ops.aten.reshape.default
        kept = {k: v for k, v in kwargs.items() if k not in ("dtype", "layout", "pin_memory")}
        out = target(*tree_map(codes, args), **tree_map(codes, kept))
        return tree_map(lambda v: Elements(v) if isinstance(v, torch.Tensor) else v, out)


_IN_PLACE = "return a new tensor; `in_place` in the front matter lets a kernel overwrite an input"
# What arithmetic on conditions is.
_LOGICAL = {"add": "logical_or", "mul": "logical_and"} | {
    f"bitwise_{name}": f"logical_{name}" for name in ("and", "or", "xor", "not")
}


def _dtype(node: Any) -> torch.dtype | None:
    """The element type of a node's tensor."""
    return getattr(node.meta.get("val"), "dtype", None)


def _name(node: fx.Node, target: Any = None) -> str:
    target = target or node.target
    schema = getattr(target, "_schema", None)
    name = schema.name.split("::")[1] if schema else target.__name__
    return name.removesuffix("_") if _in_place(node) else name


def _in_place(node: fx.Node) -> bool:
    """Whether a node writes to its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and not schema.name.endswith("::copy_")
