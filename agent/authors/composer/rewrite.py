"""From an ATen graph to canonical expressions over the accumulator.

- Floating casts vanish: a kernel computes in float32 throughout and rounds once, at each store.
- The GEMM's operands must be the spec's own, times scales that commute past it: one per row, or
  one for all.
- What a program cannot express is refused with the operation and the line of the spec it stands on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.fx
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from coda_agent.agent.authors.composer.across import Across
from coda_agent.agent.authors.composer.aten import (
    ACROSS,
    ROW_STATISTICS,
    VIEWS,
    WHOLE_ROW,
    meaning,
    truth,
)
from coda_agent.agent.authors.composer.canonical import canonical
from coda_agent.agent.authors.composer.expression import (
    AGAIN,
    NEXT,
    REDUCTIONS,
    Expr,
    apply,
    const,
    leaf,
    make,
    walk,
)
from coda_agent.agent.authors.composer.layout import Elements, Frame, Layout, Unusable
from coda_agent.agent.authors.composer.problem import STORED, Problem, View
from coda_agent.agent.authors.composer.rounding import before_store, rounding
from coda_agent.primitives import ColIndex
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.groups import WIDTHS
from coda_agent.primitives.tables import TABLES, Table
from coda_agent.specs.layout import halved, interleaved


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


def rewrite(problem: Problem) -> Rewritten:
    """Derive the canonical expressions of a graph.

    Raises:
        ProgramError: No epilogue program computes this; says which operation is the reason.
    """
    return _Rewriter(problem).run()


class Refusal(ProgramError):
    """No program computes a graph, for a reason at one of its nodes.

    Attributes:
        node: The node that is the reason, where it is one.
        output: The name of the output that is, where it is one.
    """

    def __init__(
        self, message: str, hint: str = "", node: fx.Node | None = None, output: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.node, self.output = node, output


class _Rewriter:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        m, n, k = (problem.extents[d] for d in "MNK")
        extents = {"M": m, "N": n, "N/2": n // 2, "2*N": 2 * n, "K": k}
        lead = problem.lead or [m]
        self.layout = Layout(
            extents, halves=problem.halves, lead=lead, fixed=problem.fixed, counts=problem.counts
        )
        self.across = Across(self.layout, self._apply)
        self.acc = leaf("acc", "acc", 0, frozenset({"M", "N"}))
        self.kinds: dict[str, str] = {}
        self.moved: tuple[View, View] | None = None
        self.leaves: dict[str, Expr] = {}

    def run(self) -> Rewritten:
        env: dict[fx.Node, Any] = {}
        inputs = iter(enumerate(self.problem.inputs, start=1))
        returned: Any = None
        for node in self.problem.module.graph.nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            match node.op:
                case "placeholder":
                    env[node] = self._input(*next(inputs))
                case "get_attr":
                    env[node] = getattr(self.problem.module, node.target)
                case "output":
                    returned = args[0]
                case _:
                    try:
                        env[node] = self._node(node, args, dict(kwargs))
                        if _in_place(node):
                            env[node.args[0]] = env[node]
                    except ProgramError as error:
                        raise Refusal(self._at(node) + error.message, error.hint, node) from None
                    except (TypeError, KeyError):
                        message = self._at(node) + "takes an argument that no primitive has"
                        raise Refusal(message, _SPELLED, node) from None
        values, outputs = self._outputs(returned)
        used: dict[str, set[float]] = {}
        for e in walk(list(values.values())):
            if e.op in ("operand", "index"):
                used.setdefault(e.name, set()).add(e.value)
        operands = {x: self._kind(x, used[x]) for x in self.kinds if x in used}
        if not any(e == self.acc for e in walk(list(values.values()))):
            message = f"no output needs the product of {' and '.join(self.problem.sides)}"
            hint = "return what is computed with it"
            raise ProgramError(f"{self.problem.source}{message}", hint=hint)
        return Rewritten(self.problem.name, operands, outputs, values)

    def _kind(self, name: str, read: set[float]) -> str:
        """The annotation of an operand; of a table by the ways in which it is read."""
        if self.kinds[name] != "Table":
            return self.kinds[name]
        if len(read) > 1:
            ways = " and ".join(sorted(TABLES[int(way)].__name__ for way in read))
            raise ProgramError(
                f"{self.problem.source}reads input {name!r} in two ways, as {ways}",
                hint="give it as two inputs",
            )
        return TABLES[int(read.pop())].__name__

    def _at(self, node: fx.Node) -> str:
        """Where a node stands and what it calls, as a message begins."""
        called = node.meta.get("original_aten") or node.target
        return f"{self.problem.place(node)}{_name(node, called).lstrip('_')}: "

    def _input(self, position: int, name: str) -> Elements | Unusable:
        slot = self.problem.inputs[name]
        if slot.reason:
            return Unusable(slot.reason, _REPEATED)
        if slot.kind is Table:
            self.kinds[name] = "Table"
            table = self.layout.table(name, position, slot.shape)
            return Elements(slot.restored(table.codes)) if slot.restored else table
        if name in self.problem.gemm:
            frame = Frame(("M" if name == self.problem.gemm[0] else "N", "K"))
        else:
            assert slot.kind is not None  # else it has a reason
            frame = Frame(slot.kind.dims)
            self.kinds[name] = slot.kind.__name__
        op = "index" if slot.kind is ColIndex else "operand"
        self.leaves[name] = expr = leaf(op, name, position, frozenset(frame.dims))
        if slot.restored:
            return Elements(slot.restored(self.layout.grid(expr, frame.dims)))
        return self.layout.write(expr, slot.shape, frame)

    def _node(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op, target = _name(node), cast("Callable[..., Any]", node.target)
        evaluated = op == "rrelu_with_noise" and not any(args[4:5])
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and not evaluated:
            raise ProgramError(
                "draws random numbers", hint="draw them before, and give them as an input"
            )
        flat: list[Any] = tree_leaves((args, kwargs))
        for value in flat:
            if isinstance(value, Unusable) and op != "getitem":
                raise ProgramError(value.reason, hint=value.hint)
        if op == "copy_":
            raise ProgramError("writes to an input in place", hint=_IN_PLACE)
        if op in ("tril", "triu") and (found := self._triangle(op, *args)) is not None:
            return found
        if op == "philox":
            return self._places("philox_uniform", tuple(args[3:]), *args[1:3])
        if not any(isinstance(value, Elements) for value in flat):
            if getattr(kwargs.get("dtype"), "is_floating_point", False):
                kwargs["dtype"] = torch.float64  # of 0.1 float32 keeps half of the digits
            found = target(*args, **kwargs)
            if op == "arange":
                return self._counted(found)
            if op.startswith("empty"):  # Whatever memory held must not enter.
                return Elements(self._lift(math.nan).codes.expand(found.shape))
            return found
        if op in ("_to_copy", "convert_element_type"):
            return self._cast(args[0], _dtype(node.args[0]), _dtype(node))
        if op == "_local_scalar_dense":
            return args[0]
        if op == "full":
            shape = args[0].codes.shape if isinstance(args[0], Elements) else args[0]
            return Elements(self._lift(args[1]).codes.expand(shape))
        if op in ("mm", "bmm"):
            return self._gemm(*args)
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
        if op in VIEWS:
            return self._view(op, target, args, kwargs)
        function = meaning(_LOGICAL.get(op, op) if _dtype(node) is torch.bool else op)
        if function is None:
            if op in ACROSS:
                raise ProgramError(WHOLE_ROW, hint=ROW_STATISTICS)
            raise ProgramError("has no counterpart among the primitives", hint=_SPELLED)
        with self._in_order(node):
            result = self._apply(function, args, kwargs)
        return [result, None] if op == "log_sigmoid_forward" else result

    def _cast(self, x: Any, source: torch.dtype | None, dtype: torch.dtype | None) -> Any:
        """`x` in another type: the same number, but where a condition is made of it."""
        if dtype is not None and self.problem.narrow(dtype):
            return self._apply(partial(apply, rounding(dtype)), [x], {})
        if dtype is None or dtype.is_floating_point or dtype == source or self.across.is_index(x):
            return x
        if dtype is torch.bool:
            return self._apply(truth, [x], {})
        if source is not None and not source.is_floating_point and dtype.itemsize >= 4:
            return x
        raise ProgramError(
            f"casts to {dtype}, and an epilogue computes in float32",
            hint="torch.trunc and torch.round give whole numbers",
        )

    def _counted(self, found: torch.Tensor) -> Elements | torch.Tensor:
        """The numbers of all rows, or of all columns, as what follows from an element's place."""
        for dim, name in (("M", "row"), ("N", "column")):
            count = self.layout.extents[dim]
            if torch.equal(found, torch.arange(count, dtype=found.dtype)):
                made = make(f"{name}_index", dims=frozenset({dim}))
                return self.layout.write(made, (count,), Frame((dim,)))
        return found

    def _triangle(self, op: str, x: Any, diagonal: int = 0) -> Elements | None:
        """x below a diagonal, or above it, and else 0; None of a constant that is no full tile."""
        x = self._lift(x)
        shape = tuple(x.codes.shape)
        if shape != tuple(self.layout.extents[d] for d in "MN") and {
            e.op for e in self.layout.sources(x)
        } == {"const"}:
            return None
        row, column = (self._places(f"{name}_index", shape) for name in ("row", "column"))
        if op == "triu":
            row, column, diagonal = column, row, -diagonal

        def masked(x: Expr, row: Expr, column: Expr) -> Expr:
            return apply("where", apply("greater_equal", row + float(diagonal), column), x, 0.0)

        return self._apply(masked, [x, row, column], {})

    def _places(self, op: str, shape: tuple[int, ...], *numbers: Any) -> Elements:
        """What follows from an element's place, over all (M, N)."""
        if shape != tuple(self.layout.extents[d] for d in "MN"):
            raise ProgramError(f"draws numbers for {list(shape)}; a kernel's are [M, N]")
        given = [self.layout.read(self._lift(x), (), Frame(())) for x in numbers]
        made = make(op, *given, dims=frozenset("MN"))
        return self.layout.write(made, shape, Frame(("M", "N")))

    def _lift(self, value: Any) -> Elements:
        if isinstance(value, Elements):
            return value
        return self.layout.constants(torch.as_tensor(value))

    def _view(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def codes(value: Any) -> Any:
            """Of what is moved; constants that index are not."""
            constant = isinstance(value, torch.Tensor) and op != "index"
            return self._lift(value).codes if constant or isinstance(value, Elements) else value

        if op == "copy":
            return Elements(codes(args[1]).expand(codes(args[0]).shape))
        kept = {k: v for k, v in kwargs.items() if k not in ("dtype", "layout", "pin_memory")}
        out = target(*tree_map(codes, args), **tree_map(codes, kept))
        return tree_map(lambda v: Elements(v) if isinstance(v, torch.Tensor) else v, out)

    def _apply(
        self, function: Callable[..., Expr], args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> Elements:
        """An elementwise function of tensors and numbers."""
        args = [*args]

        def bound(*exprs: Expr) -> Expr:
            rest = iter(exprs)

            def given(value: Any) -> Any:
                if _tensor(value):
                    return next(rest)
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                return const(value) if number else value

            values = [given(v) for v in args]  # before those by name
            return function(*values, **{k: given(v) for k, v in kwargs.items()})

        return self._applied(
            bound, [self._lift(v) for v in (*args, *kwargs.values()) if _tensor(v)]
        )

    @contextmanager
    def _in_order(self, node: fx.Node) -> Iterator[None]:
        """Computes with the dims of a node in the order of rows and columns meanwhile."""
        self.moved = self.problem.moved.get(node)
        try:
            yield
        finally:
            self.moved = None

    def _applied(self, function: Callable[..., Expr], tensors: list[Elements]) -> Elements:
        shape = torch.broadcast_shapes(*(t.codes.shape for t in tensors))
        if self.moved is None:
            return self._straight(function, tensors)
        straight, restored = self.moved
        codes = (straight(t.codes.broadcast_to(shape)) for t in tensors)
        return Elements(restored(self._straight(function, [*map(Elements, codes)]).codes))

    def _straight(self, function: Callable[..., Expr], tensors: list[Elements]) -> Elements:
        shape = tuple(torch.broadcast_shapes(*(t.codes.shape for t in tensors)))
        if (found := self.layout.whole(tensors, shape)) is not None:
            # One weight's columns of several: computed as if of all.
            return Elements(self._straight(function, found[0]).codes[..., found[1]].reshape(shape))
        frame = self.layout.frame(shape)
        parts = any(e.op == "table" for t in tensors for e in self.layout.sources(t))
        if frame is None and parts and (found := self._table_wise(function, tensors, shape)):
            return found
        if frame is None and (part := self._part_wise(function, tensors)):
            return part
        if frame is None and (width := self.layout.group(shape)):
            # What is one for each group is computed as if for each column.
            over = (self.layout.over_group(t.codes.broadcast_to(shape), width) for t in tensors)
            whole = self._straight(function, [*map(Elements, over)])
            return Elements(whole.codes[..., ::width].reshape(shape))
        if frame is None:
            words = self.problem.shape_words(shape)
            raise ProgramError(
                f"works on a shape {words} that is neither (M, N) nor part of it",
                hint="return the tensor itself, and do this in the next kernel or with torch",
            )
        if self.layout.in_halves(shape):
            paired = [self._ordered(t, interleaved) for t in tensors]
            return self._ordered(self._elementwise(function, paired, shape, frame), halved)
        try:
            return self._elementwise(function, tensors, shape, frame)
        except ProgramError:
            if (found := self._half_wise(function, tensors, shape)) is None:
                raise
            return found

    def _half_wise(
        self, function: Callable[..., Expr], tensors: Iterable[Elements], shape: tuple[int, ...]
    ) -> Elements | None:
        """A function of halves of groups of columns, computed as if of the whole tile."""
        m, n, width = self.layout.extents["M"], self.layout.extents["N"], 2 * shape[-1]
        if width not in WIDTHS or math.prod(shape) != m * n // 2:
            return None
        codes = (t.codes.broadcast_to(shape).reshape(m, n // 2) for t in tensors)
        given = [self.layout.half(half, width) for half in codes]
        if any(expr is None for expr in given):
            return None
        whole = self.layout.write(function(*given), (m, n), Frame(("M", "N")))
        return Elements(self.layout.apart(whole.codes, width)[0].reshape(shape))

    def _part_wise(self, function: Callable[..., Expr], tensors: list[Elements]) -> Elements | None:
        """A function of part of an operand and of numbers, computed as if of all of it."""
        if len(tensors) != 1 or len(sources := self.layout.sources(tensors[0])) != 1:
            return None
        codes, (expr,) = tensors[0].codes, sources
        dims = ("M" if "M" in expr.dims else "N", "K")
        if {*dims} != expr.dims or codes.ndim != 2:
            return None
        for matrix, turned in ((codes, False), (codes.mT, True)):
            if (at := self.layout.taken(matrix, expr, dims)) is not None:
                found = self.layout.grid(function(expr), dims)[at[0]][:, at[1]]
                return Elements(found.mT if turned else found)
        return None

    def _table_wise(
        self, function: Callable[..., Expr], tensors: list[Elements], shape: tuple[int, ...]
    ) -> Elements | None:
        """A function of what is part of the rows or columns, computed as if of the whole tile."""
        tile = Frame(("M", "N"))
        found: list[tuple[Expr, torch.Tensor]] = []
        for at in self.layout.readings(shape):
            full = tuple(at.shape)
            over = [Elements(t.codes.broadcast_to(shape).flatten()[at]) for t in tensors]
            with suppress(ProgramError):
                whole = self._elementwise(function, over, full, tile)
                found.append((self.layout.read(whole, full, tile), at))
        return self.layout.partly(found, shape) if found else None

    def _ordered(self, value: Elements, order: Callable[..., torch.Tensor]) -> Elements:
        """A value whose columns are all the product's in another order; any other as it is."""
        halves = self.layout.in_halves(tuple(value.codes.shape))
        return Elements(order(value.codes, -1)) if halves else value

    def _elementwise(
        self,
        function: Callable[..., Expr],
        tensors: list[Elements],
        shape: tuple[int, ...],
        frame: Frame,
    ) -> Elements:
        seen, wide = shape, frame.dims == ("M", "2*N")
        if wide:
            seen, frame = tuple(self.layout.extents[d] for d in "MN"), Frame(("M", "N"))

        def computed(side: int) -> torch.Tensor:
            """The result; of a wide value one of its sides, which programs compute with apart."""

            def expr(tensor: Elements) -> Expr:
                codes = tensor.codes.broadcast_to(shape)
                codes = codes.reshape(*seen, 2)[..., side] if wide else codes
                return self.layout.read(Elements(codes), seen, frame)

            return self.layout.write(function(*map(expr, tensors)), seen, frame).codes

        codes = torch.stack([computed(0), computed(1)], -1) if wide else computed(0)
        return Elements(codes.reshape(shape))

    def _gemm(self, x: Any, y: Any) -> Elements:
        """A product of A with some of B's rows, over K or over a part of it that is packed. One
        over a part is a value of its own, and with the others it is the whole."""
        if not (isinstance(x, Elements) and isinstance(y, Elements)):
            raise self._other_product()
        if any(e == self.acc for v in (x, y) for e in walk(self.layout.sources(v))):
            raise ProgramError(
                "is a second GEMM; a kernel has one",
                hint="make a kernel of each: the first's output is an input of the second",
            )
        if x.codes.shape[:-2].numel() != 1 or y.codes.shape[:-2].numel() != 1:
            raise self._other_product()
        one, other = (codes.reshape(codes.shape[-2:]) for codes in (x.codes, y.codes.mT))
        for first, second, turned in ((one, other, False), (other, one, True)):
            left, right = self._side(first, "M"), self._side(second, "N")
            if left is None or right is None or not torch.equal(left[1], right[1]):
                continue
            start, stop = int(left[1][0]), int(left[1][-1]) + 1
            every = torch.arange(self.layout.extents["M"])
            if torch.equal(left[0], every) and torch.equal(left[1], torch.arange(start, stop)):
                scale = self._scale(left[2], "M") * self._scale(right[2], "N")
                value = self._summed(start, stop) * scale
                codes = self.layout.grid(value, ("M", "N"))[:, right[0]]
                codes = codes.mT if turned else codes
                return Elements(codes.reshape(*x.codes.shape[:-1], y.codes.shape[-1]))
        raise self._other_product()

    def _side(
        self, codes: torch.Tensor, rows: str
    ) -> tuple[torch.Tensor, torch.Tensor, Expr] | None:
        """Which rows and columns of A (rows M) or of B (N) a matrix is, and what it makes of it."""
        found = self.layout.sources(Elements(codes))
        if len(found) != 1 or found[0].dims != {rows, "K"}:
            return None
        at = self.layout.taken(codes, found[0], (rows, "K"))
        return (*at, found[0]) if at else None

    def _summed(self, start: int, stop: int) -> Expr:
        """The product over a range of K; over the last one the whole without the others."""
        if (start, stop) == (0, self.layout.extents["K"]):
            return self.acc
        ends = [0, *itertools.accumulate(self.problem.inner)]
        if (start, stop) not in itertools.pairwise(ends):
            raise self._other_product()
        parts = [leaf("part", f"part {i}", 0, self.acc.dims) for i in range(len(ends) - 2)]
        rest = self.acc
        for part in parts:
            rest = rest - part
        return [*parts, rest][ends.index(start)]

    def _other_product(self) -> ProgramError:
        a, b = self.problem.sides
        message = f"is not the product of {a} with {b} that `gemm` declares; a kernel has one"
        return ProgramError(message, hint="declare what is multiplied, or make a kernel of each")

    def _scale(self, expr: Expr, rows: str) -> Expr:
        """The scale of an operand, which commutes past the product."""
        name = self.problem.gemm[rows == "N"]
        if expr.op == "operand" and expr.name == name:
            return const(1.0)
        if expr.op in ("mul", "div", "neg"):
            inside = [a for a in expr.args if "K" in a.dims]
            if len(inside) == 1 and (expr.op != "div" or inside[0] == expr.args[0]):
                scale = self._scale(inside[0], rows)
                if expr.op == "neg":
                    return -scale
                other = expr.args[1] if inside[0] == expr.args[0] else expr.args[0]
                return scale * other if expr.op == "mul" else scale / other
        if expr.op == "operand":
            raise self._other_product()
        raise ProgramError(
            f"{name} enters the GEMM through {expr.op!r}; only a scale per row of it, or a scalar,"
            " commutes past the product",
            hint=f"compute it where {name} is written, and give the result as the input",
        )

    def _outputs(self, returned: Any) -> tuple[dict[str, Expr], dict[str, str]]:
        updated, source = self.problem.updated, self.problem.source
        values: dict[str, Expr] = {}
        outputs: dict[str, str] = {}
        for name in self.problem.outputs:
            value = returned.get(name) if isinstance(returned, dict) else None
            try:
                values[name], outputs[name] = self._output(name, value)
            except ProgramError as error:
                message = f"{source}output {name!r}{error.message}"
                raise Refusal(message, error.hint, output=name) from None
            if name in updated:
                if outputs[name] != "Tile":
                    m, n, _ = self.problem.dims
                    message = f"{source}output {name!r}: a kernel updates only [{m}, {n}] in place"
                    raise ProgramError(message, hint="leave `in_place` out")
                # Stored as what is added to the old value, which cancels.
                outputs[name] = "AddTile"
                values[name] -= self.leaves[updated[name]]
        values = dict(zip(values, canonical(list(values.values())), strict=True))
        for name, old in updated.items():
            for output, value in values.items():
                if self.leaves[old] in walk([value]):
                    raise ProgramError(
                        f"{source}output {output!r} needs {old!r}, which {name!r}"
                        f" overwrites; a kernel only adds to it, {name} = {old} + ...",
                        hint="leave `in_place` out",
                    )
        return values, outputs

    def _output(self, name: str, value: Any) -> tuple[Expr, str]:
        """What an output holds, and its kind.

        Raises:
            ProgramError: A kernel cannot write it; the message continues the output's name.
        """
        if not isinstance(value, Elements):
            if isinstance(value, Unusable):
                raise ProgramError(f": {value.reason}", hint=value.hint)
            raise ProgramError(": depends on no input", hint="leave the output out")
        m, n, _ = self.problem.dims
        slot = self.problem.outputs[name]
        if slot.kind is None or tuple(value.codes.shape) != slot.shape:
            words = self.problem.shape_words(value.codes.shape) if slot.kind else slot.words
            raise ProgramError(
                f" is {words}; a kernel writes [{m}, {n}], [{m}, {n}/2], [{m}, 2*{n}] and"
                " reductions",
                hint="return what it is made of, and put it together with torch",
            )
        shape = slot.shape
        if slot.straight:
            value = Elements(slot.straight(value.codes))
            shape = tuple(value.codes.shape)
        kind, stored = slot.kind, STORED
        try:
            expr = self.layout.stored(value, shape, kind)
        except ProgramError as error:
            if slot.joined:
                raise ProgramError(": its parts are not computed alike", hint=_ALIKE) from None
            raise ProgramError(f" {error.message}", hint=error.hint) from None
        if any(e.op == "part" for e in walk(list(canonical([expr])))):
            raise ProgramError(
                f" does not add the products of {self.problem.sides[0]} alike; a kernel sums them"
                " in one",
                hint="fold the factor into the weight once, before it is packed, and leave it out",
            )
        if any(e.op == "centred" for e in walk([expr])):
            raise ProgramError(f" {AGAIN}", hint=NEXT)
        alone = {op: r.kind for op, r in REDUCTIONS.items()} | {"gather": "RowGather"}
        if (kind in stored) == (expr.op in alone):
            raise ProgramError(
                f" is computed by {expr.op!r}; a kernel writes full or half tiles, and [{m}] or"
                f" [{n}] only as a reduction itself, [{m}] also as a gather",
                hint="return the reduction itself, and compute with it in the next kernel",
            )
        if kind in stored and len(expr.dims) < 2:
            raise ProgramError(
                " is the same in every row or column", hint="return it without the other dim"
            )
        return before_store(expr, slot.dtype), alone.get(expr.op, kind.__name__)


_REPEATED = "repeat or expand it to one of these in the call, or use it in the next kernel"
_SPELLED = "write it with elementary operations; `level: extend` asks an author for one of its own"
_ALIKE = (
    "compute all parts of the product's columns alike: what differs, such as a scale of one, is"
    " part of its weight, or of a vector over all columns; or split by numbers, .split([384, 512],"
    " -1), which fix the size"
)
_IN_PLACE = "return a new tensor; `in_place` in the front matter lets a kernel overwrite an input"
# What arithmetic on conditions is.
_LOGICAL = {"add": "logical_or", "mul": "logical_and"} | {
    f"bitwise_{name}": f"logical_{name}" for name in ("and", "or", "xor", "not")
}


def _dtype(node: Any) -> torch.dtype | None:
    """The element type of a node's tensor."""
    return getattr(node.meta.get("val"), "dtype", None)


def _tensor(value: Any) -> bool:
    return isinstance(value, (Elements, torch.Tensor))


def _name(node: fx.Node, target: Any = None) -> str:
    target = target or node.target
    schema = getattr(target, "_schema", None)
    name = schema.name.split("::")[1] if schema else target.__name__
    return name.removesuffix("_") if _in_place(node) else name


def _in_place(node: fx.Node) -> bool:
    """Whether a node writes to its first argument; torch's own functions do, to what they made."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and not schema.name.endswith("::copy_")
