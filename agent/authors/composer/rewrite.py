"""From an ATen graph to canonical expressions over the accumulator.

- Floating casts vanish: a kernel computes in float32 throughout and rounds once, at each store.
- The GEMM's operands must be the spec's own, times scales that commute past it: one per row, or
  one for all.
- What a program cannot express is refused with the operation and the line of the spec it stands on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coda_agent.agent.authors.composer.across import Across
from coda_agent.agent.authors.composer.aten import (
    ACROSS,
    FACTORIES,
    GEMMS,
    SCATTERS,
    VIEWS,
    WHOLE_ROW,
    elementwise,
)
from coda_agent.agent.authors.composer.builder import AGAIN, Builder
from coda_agent.agent.authors.composer.capture import Captured
from coda_agent.agent.authors.composer.expression import REDUCTIONS, Expr, walk
from coda_agent.agent.authors.composer.layout import Elements, Frame, Layout, Unusable
from coda_agent.primitives.errors import ProgramError

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True)
class Rewritten:
    """What one binding computes.

    Attributes:
        name: Of the program.
        operands: Name to annotation, of the inputs used, in the spec's order.
        outputs: Name to kind, in the spec's order.
        values: The outputs' expressions.
    """

    name: str
    operands: Mapping[str, str]
    outputs: Mapping[str, str]
    values: Mapping[str, Expr]


def rewrite(captured: Captured) -> Rewritten:
    """The canonical expressions of a captured reference.

    Raises:
        ProgramError: No epilogue program computes this; says which operation is the reason.
    """
    return _Rewriter(captured).run()


class _Rewriter:
    def __init__(self, captured: Captured) -> None:
        self.captured, self.spec = captured, captured.spec
        m, n, k = (captured.sizes[d] for d in self.spec.gemm_dims)
        self.builder = Builder(n)
        self.layout = Layout(self.builder, {"M": m, "N": n, "H": n // 2, "W": 2 * n, "K": k})
        self.meaning = elementwise(self.builder)
        self.across = Across(self.layout, self._apply)
        self.acc = self.builder.leaf("acc", "acc", 0, frozenset({"M", "N"}))
        self.kinds: dict[str, str] = {}
        self.leaves: dict[str, Expr] = {}

    def run(self) -> Rewritten:
        import torch.fx

        env: dict[fx.Node, Any] = {}
        inputs = iter(enumerate(self.spec.inputs, start=1))
        returned: Any = None
        for node in self.captured.module.graph.nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            match node.op:
                case "placeholder":
                    env[node] = self._input(*next(inputs))
                case "get_attr":
                    env[node] = getattr(self.captured.module, node.target)
                case "output":
                    returned = args[0]
                case _:
                    try:
                        env[node] = self._node(_name(node), node.target, args, dict(kwargs))
                    except ProgramError as error:
                        raise ProgramError(f"{self._where(node)}: {error.message}") from None
                    except (TypeError, KeyError) as error:
                        # An argument that the vocabulary has no name for, such as softplus's beta.
                        reason = f"is called in a way that is not understood: {error}"
                        raise ProgramError(f"{self._where(node)}: {reason}") from None
        values, outputs = self._outputs(returned)
        used = {e.name for e in walk(list(values.values())) if e.op in ("operand", "index")}
        operands = {name: kind for name, kind in self.kinds.items() if name in used}
        if not any(e is self.acc for e in walk(list(values.values()))):
            raise ProgramError(
                f"{self.spec.path}: no output needs a GEMM, expected {' @ '.join(self.spec.gemm)}.T"
            )
        return Rewritten(self.spec.variant(self.captured.binding), operands, outputs, values)

    def _where(self, node: fx.Node) -> str:
        line = node.meta.get("custom", {}).get("line", self.spec.reference_line)
        return f"{self.spec.path}:{line}: {_name(node)}"

    def _input(self, position: int, name: str) -> Elements | Unusable:
        symbolic = self.spec.symbolic_shape(name, self.captured.binding)
        shape = self.spec.shape_of(name, self.captured.sizes, self.captured.binding)
        m, n, _ = self.spec.gemm_dims
        known = {
            (): ((), "Scalar"),
            (m,): (("M",), "ColVector"),
            (n,): (("N",), "RowVector"),
            (m, n): (("M", "N"), "Tile"),
            (m, f"2*{n}"): (("M", "W"), "WideTile"),
        }
        a, b = self.spec.gemm
        integer = self.spec.inputs[name].dtype.startswith("int")
        if name in (a, b):
            dims, kind = ("M" if name == a else "N", "K"), ""
        elif symbolic == (m,) and integer:
            dims, kind = ("M",), "ColIndex"
        elif symbolic in known and not integer:
            dims, kind = known[symbolic]
        else:
            got = f"{self.spec.inputs[name].dtype} [{', '.join(map(str, symbolic))}]"
            return Unusable(
                f"input {name!r} is {got}; an epilogue takes floating [], [{m}], [{n}], [{m}, {n}],"
                f" [{m}, 2*{n}] and integer [{m}]"
            )
        if kind:
            self.kinds[name] = kind
        leaf = "index" if kind == "ColIndex" else "operand"
        self.leaves[name] = expr = self.builder.leaf(leaf, name, position, frozenset(dims))
        return self.layout.write(expr, shape, Frame(dims))

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch
        from torch.utils._pytree import tree_leaves

        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            raise ProgramError("draws random numbers")
        flat: list[Any] = tree_leaves((args, kwargs))
        for value in flat:
            if isinstance(value, Unusable) and op != "getitem":
                raise ProgramError(value.reason)
        if op == "copy_":
            raise ProgramError("writes to an input in place")
        if not any(isinstance(value, Elements) for value in flat):
            return target(*args, **kwargs)
        if op in ("_to_copy", "to", "convert_element_type"):
            dtype = kwargs.get("dtype") or (args[1:] or (torch.float32,))[0]
            whole = isinstance(dtype, torch.dtype) and not dtype.is_floating_point
            if whole and not self.across.is_index(args[0]):
                raise ProgramError(f"casts to {dtype}; an epilogue computes in float32")
            return args[0]
        if op in ("_local_scalar_dense", "contiguous"):
            return args[0]
        if op in FACTORIES:
            like = args[op.startswith("new_")]
            shape = like.codes.shape if isinstance(like, Elements) else like
            fill = args[-1] if FACTORIES[op] is None else FACTORIES[op]
            fill = fill if isinstance(fill, Elements) else self.layout.constants(torch.tensor(fill))
            return Elements(fill.codes.expand(shape))
        if op in GEMMS:
            return self._gemm(op, args, kwargs)
        if op in self.across.meaning:
            return self.across.meaning[op](*args, **kwargs)
        if op == "remainder" and self.across.is_index(args[0]):
            if args[1] == self.layout.extents["N"]:
                return args[0]
        if op == "index" and any(isinstance(i, Elements) for i in args[1]):
            return self.across.select(*args)
        if op == "where" and isinstance(args[0], torch.Tensor):
            x, y = (self._lift(a).codes for a in args[1:])
            return Elements(torch.where(args[0], x, y))
        if op in SCATTERS:
            zeros = self.layout.constants(torch.zeros(args[1]))
            return self._view(getattr(torch, SCATTERS[op]), (zeros, args[0], *args[2:]), kwargs)
        if op in VIEWS:
            return self._view(target, args, kwargs)
        if op not in self.meaning:
            missing = "has no counterpart among the primitives"
            raise ProgramError(WHOLE_ROW if op in ACROSS else missing)
        if kwargs.pop("rounding_mode", None):
            raise ProgramError("rounds its quotient; an epilogue cannot")
        return self._apply(op, args, kwargs)

    def _lift(self, value: Any) -> Elements:
        import torch

        if isinstance(value, Elements):
            return value
        return self.layout.constants(torch.as_tensor(value))

    def _view(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        if _name_of(target) in ("copy", "slice_scatter", "select_scatter", "cat", "stack"):
            lift = lambda v: self._lift(v).codes if _tensor(v) else v
        else:
            lift = lambda v: v.codes if isinstance(v, Elements) else v
        kept = {k: v for k, v in kwargs.items() if k not in ("dtype", "layout", "pin_memory")}
        if _name_of(target) == "copy":
            return Elements(lift(args[1]).expand(lift(args[0]).shape))
        out = target(*tree_map(lift, args), **tree_map(lift, kept))
        wrap = lambda v: Elements(v) if isinstance(v, torch.Tensor) else v
        return tree_map(wrap, out) if not isinstance(out, torch.Tensor) else Elements(out)

    def _apply(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        tensors = [self._lift(v) for v in (*args, *kwargs.values()) if _tensor(v)]
        shape = tuple(torch.broadcast_shapes(*(t.codes.shape for t in tensors)))
        frame = self.layout.frame(shape)
        if frame is None:
            raise ProgramError(f"works on a shape {shape} that is neither (M, N) nor part of it")
        seen, wide = shape, frame.dims == ("M", "W")
        if wide:
            seen, frame = tuple(self.layout.extents[d] for d in "MN"), Frame(("M", "N"))

        def computed(side: int) -> torch.Tensor:
            """The result; of a wide value one of its sides, which programs compute with apart."""

            def expr(value: Any) -> Any:
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    return self.builder.const(value)
                if not _tensor(value):
                    return value
                codes = self._lift(value).codes.broadcast_to(shape)
                codes = codes.reshape(*seen, 2)[..., side] if wide else codes
                return self.layout.read(Elements(codes), seen, frame)

            result = self.meaning[op](*map(expr, args), **{k: expr(v) for k, v in kwargs.items()})
            return self.layout.write(result, seen, frame).codes

        codes = torch.stack([computed(0), computed(1)], -1) if wide else computed(0)
        written = Elements(codes.reshape(shape))
        return [written, None] if op == "log_sigmoid_forward" else written

    def _gemm(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Elements:
        x, y = args[-2:]
        if not (isinstance(x, Elements) and isinstance(y, Elements)):
            raise ProgramError(self._layout_of_gemm())
        left, right = (
            self._side(x, (x.codes.shape[-2], x.codes.shape[-1])),
            self._side(Elements(y.codes.mT), (y.codes.shape[-1], y.codes.shape[-2])),
        )
        if {left[0], right[0]} != {"M", "N"} or x.codes.numel() != math.prod(x.codes.shape[-2:]):
            raise ProgramError(self._layout_of_gemm())
        flipped = left[0] == "N"
        value = self.builder.mul(self.builder.mul(self.acc, left[1]), right[1])
        shape = (*x.codes.shape[:-1], y.codes.shape[-1])
        product = self.layout.write(value, shape, Frame(("M", "N"), flipped))
        if op == "addmm":
            beta, alpha = kwargs.get("beta", 1.0), kwargs.get("alpha", 1.0)
            addend = self._apply("mul", (args[0], beta), {})
            return self._apply("add", (addend, self._apply("mul", (product, alpha), {})), {})
        return product

    def _layout_of_gemm(self) -> str:
        a, b = self.spec.gemm
        return f"is not the spec's GEMM, {a} {b}ᵀ with {a} (M, K) and {b} (N, K); a kernel has one"

    def _side(self, elements: Any, shape: tuple[int, int]) -> tuple[str, Expr]:
        """Which rows an operand of the GEMM has, and the scale that commutes past it."""
        frame = self.layout.frame(shape)
        if any(e is self.acc for e in walk(self.layout.sources(elements))):
            raise ProgramError("is a second GEMM; a kernel has one")
        if frame is None or frame.flipped or frame.dims not in (("M", "K"), ("N", "K")):
            raise ProgramError(self._layout_of_gemm())
        rows = frame.dims[0]
        name = self.spec.gemm[rows == "N"]
        value = self.layout.read(Elements(elements.codes.reshape(shape)), shape, frame)
        return rows, self._scale(value, name, rows)

    def _scale(self, expr: Expr, name: str, rows: str) -> Expr:
        b = self.builder
        if expr.op == "operand" and expr.name == name:
            return b.const(1.0)
        if expr.op in ("mul", "div", "neg"):
            inside = [a for a in expr.args if "K" in a.dims]
            if len(inside) == 1 and (expr.op != "div" or inside[0] is expr.args[0]):
                scale = self._scale(inside[0], name, rows)
                if expr.op == "neg":
                    return b.neg(scale)
                other = expr.args[1] if inside[0] is expr.args[0] else expr.args[0]
                return b.mul(scale, other) if expr.op == "mul" else b.div(scale, other)
        if expr.op == "operand":
            raise ProgramError(self._layout_of_gemm())
        raise ProgramError(
            f"{name} enters the GEMM through {expr.op!r}; only a scale per row of it, or a scalar,"
            " commutes past the product"
        )

    def _outputs(self, returned: Any) -> tuple[dict[str, Expr], dict[str, str]]:
        m, n, _ = self.spec.gemm_dims
        kinds = {
            (m, n): ("Tile", ("M", "N")),
            (m, f"{n}/2"): ("HalfTile", ("M", "H")),
            (m, f"2*{n}"): ("WideTile", ("M", "W")),
            (m,): ("", ("M",)),
            (n,): ("", ("N",)),
        }
        alone = {**REDUCTIONS, "gather": "RowGather"}
        updated = self.spec.updated(self.captured.binding)
        values: dict[str, Expr] = {}
        outputs: dict[str, str] = {}
        for name in self.spec.outputs:
            where = f"{self.spec.path}: output {name!r}"
            symbolic = self.spec.symbolic_shape(name, self.captured.binding)
            shape = self.spec.shape_of(name, self.captured.sizes, self.captured.binding)
            value = returned.get(name) if isinstance(returned, dict) else None
            if not isinstance(value, Elements):
                reason = value.reason if isinstance(value, Unusable) else "depends on no input"
                raise ProgramError(f"{where}: {reason}")
            if symbolic not in kinds or value.codes.shape != shape:
                extents = value.codes.shape if symbolic in kinds else symbolic
                got = f"[{', '.join(map(str, extents))}]"
                raise ProgramError(
                    f"{where} is {got}; a kernel writes [{m}, {n}], [{m}, {n}/2], [{m}, 2*{n}] and"
                    " reductions"
                )
            kind, dims = kinds[symbolic]
            try:
                expr = self.layout.read(value, shape, Frame(dims))
            except ProgramError as error:
                raise ProgramError(f"{where} {error.message}") from None
            if any(e.op == "centred" for e in walk([expr])):
                raise ProgramError(f"{where} {AGAIN}")
            if bool(kind) == (expr.op in alone):
                raise ProgramError(
                    f"{where} is computed by {expr.op!r}; a kernel writes full or half tiles, and"
                    f" [{m}] or [{n}] only as a reduction itself, [{m}] also as a gather"
                )
            if name in updated:
                if kind != "Tile":
                    raise ProgramError(f"{where}: a kernel updates only [{m}, {n}] in place")
                # Stored as what is added to the old value, which cancels.
                kind, old = "AddTile", self.leaves[updated[name]]
                expr = self.builder.sub(expr, old)
            values[name] = expr
            outputs[name] = kind or alone[expr.op]
        canonical = self.builder.canonical(list(values.values()))
        values = dict(zip(values, canonical, strict=True))
        for name, old in updated.items():
            for output, value in values.items():
                if self.leaves[old] in walk([value]):
                    raise ProgramError(
                        f"{self.spec.path}: output {output!r} needs {old!r}, which {name!r}"
                        f" overwrites; a kernel only adds to it, {name} = {old} + ..."
                    )
        return values, outputs


def _tensor(value: Any) -> bool:
    import torch

    return isinstance(value, (Elements, torch.Tensor))


def _name_of(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.split("::")[1] if schema else target.__name__


def _name(node: fx.Node) -> str:
    return _name_of(node.target)
