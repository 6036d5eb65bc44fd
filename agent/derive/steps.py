"""What the kernel of a backward pass computes: the cut between what is saved and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coda_agent.agent.derive.factor import factored
from coda_agent.agent.derive.kernel import FORWARD, PRODUCT, Asked, Form, Kernel, Unfused, named
from coda_agent.primitives.adjoint import adjoints, recorded
from coda_agent.primitives.derivatives import plus, times
from coda_agent.primitives.elementary import equal
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Operand, Shape, Value
from coda_agent.primitives.groups import statistics
from coda_agent.primitives.operation import PLACED
from coda_agent.primitives.ops import exp
from coda_agent.primitives.pairwise import interleave, pairs
from coda_agent.primitives.placed import column_index
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import (
    AddTile,
    ColSum,
    ColVector,
    HalfTile,
    RowGather,
    RowLogSumExp,
    RowMean,
    RowSum,
    RowVector,
    Scalar,
    Tile,
    WideTile,
)
from coda_agent.primitives.tables import Table
from coda_agent.specs import Spec


def kernel(program: Program, spec: Spec, asked: Asked, form: Form) -> Kernel:
    """The backward kernel of a form, with the latest forward tile saved that it can do with.

    Raises:
        ProgramError: something has no derivative, or no kernel has the form; says what.
    """
    fault: ProgramError | None = None
    for saved in (None, *_tiles(program)):
        try:
            found = _Build(program, spec, asked, form, saved).kernel()
        except ProgramError as error:
            fault = fault or error
            continue
        if FORWARD not in _live(found.graph):
            return found
    raise fault or AssertionError("the product itself can be saved")


def _tiles(program: Program) -> list[int]:
    """The forward nodes that could be stored, the latest first."""
    nodes = enumerate(program.graph.nodes)
    return [i for i, n in nodes if n.shape is Shape.TILE and n.op != "operand"][::-1]


def _live(graph: Graph) -> set[str]:
    """The operands that a value depends on; on the product a place does not."""
    live = {*graph.outputs.values()}
    for i in reversed(range(len(graph.nodes))):
        if i in live:
            node = graph.nodes[i]
            live.update(node.args[1:] if node.op in PLACED else node.args)
    return {graph.nodes[i].name for i in live if graph.nodes[i].op == "operand"}


class _Build:
    """One form with one forward node saved."""

    def __init__(
        self, program: Program, spec: Spec, asked: Asked, form: Form, saved: int | None
    ) -> None:
        self.program, self.spec, self.asked, self.form = program, spec, asked, form
        self.forward, self.b = program.graph, Graph()
        into = program.outputs.get(asked.into)
        for name in (f"d{o}" for o in program.outputs if o not in asked.kept):
            if name in spec.inputs or name in spec.outputs:
                raise ProgramError(f"{name!r} would be the name of a gradient too: rename it")
        if into not in (None, Tile, HalfTile, AddTile):
            raise ProgramError(f"no product multiplies output {asked.into!r}, a {into.__name__}")
        self.half = form is Form.MERGED and into is HalfTile
        self.saved = saved
        self.product = self.leaf(PRODUCT, Shape.HALF if self.half else Shape.TILE)
        self.stored: dict[int, str] = {}
        if form is not Form.RECOMPUTED:
            for o, kind in program.outputs.items():
                if kind is Tile and spec.outputs[o].dtype not in ("float32", "float8_e4m3fn"):
                    self.stored.setdefault(self.forward.outputs[o], o)
        if saved is not None:
            self.stored[saved] = named(spec, "P")
        known = {i: self.leaf(o, Shape.TILE) for i, o in self.stored.items()}
        recomputed = form is Form.RECOMPUTED
        acc = self.product if recomputed else self.leaf(FORWARD, Shape.TILE)
        given = {
            n.name: self.leaf(n.name, Shape.COL if n.shape is Shape.INDEX else n.shape)
            for n in self.forward.nodes
            if n.op == "operand"
        }
        self.values: list[Operand] = self.forward.replay(acc, given, recorded, known)

    def leaf(self, name: str, shape: Shape) -> Value:
        return self.b.add(Node("operand", (), shape, name))

    def kernel(self) -> Kernel:
        scale, target = self._scaled_rows()
        left_out = (*self.asked.without, scale)
        operands = {
            n.name: i
            for i, n in enumerate(self.forward.nodes)
            if n.op == "operand" and n.shape is not Shape.INDEX and n.name not in left_out
        }
        leaves = [target, *operands.values()]
        plain, scaled = self._seeds()
        found = adjoints(self.forward, self.values, plain, leaves)
        if self.asked.norm:
            r = self.leaf(self._named("r"), Shape.COL)
            inner = adjoints(self.forward, self.values, scaled, leaves)
            # The residual stream's own gradient comes last: what is added to it may be in place.
            found = {i: plus(times(inner.get(i, 0.0), r), found.get(i, 0.0)) for i in leaves}
        made: dict[str, tuple[type, Operand]] = {}
        gradients: dict[str, str] = {}
        top = found.get(target, 0.0)
        if not isinstance(top, Value):
            raise ProgramError("no output with a gradient varies with the product")
        name = self._named("dH" if scale else "dP")
        made[name] = WideTile if self.half else Tile, top
        if scale and scale not in self.asked.without:
            stat = self._named("z" if not self.asked.norm else "z_r")
            made[stat] = RowMean, times(top, self.values[target])
            columns = f"{self.spec.gemm[1]}.shape[0]" + (" / 2" if self.half else "")
            gradients[scale] = f"{stat} * ({columns}) / {scale}"
        again = self._again()
        if again is not None:
            made[self.asked.into] = Tile, again
        for operand, i in operands.items():
            self._operand(operand, found.get(i, 0.0), name, top, made, gradients)
        graph, roots = self._flattened([value for _, value in made.values()])
        final = Kernel(self.form, self.half, graph, {}, saved=self.saved)
        final.scale, final.target, final.gradients = scale, name, gradients
        final.again = self.asked.into if again is not None else ""
        for (output, (kind, _)), root in zip(made.items(), roots, strict=True):
            for suffix, value in _stored(graph, kind, root) if self.half else [("", root)]:
                final.kinds[output + suffix] = kind
                graph.outputs[output + suffix] = value.index
        final.graph = factored(graph.prune(), {PRODUCT, *(f"d{o}" for o in self.program.outputs)})
        final.leaves = self._order(final.graph)
        self._check(final)
        return final

    def _named(self, wanted: str) -> str:
        return named(self.spec, wanted)

    def _scaled_rows(self) -> tuple[str, int]:
        """The float32 vector that scales the product's rows before all else, if any, and the node
        that is the product, scaled."""
        nodes = self.forward.nodes
        acc = next(i for i, n in enumerate(nodes) if n.op == "acc")
        first, *more = (i for i, n in enumerate(nodes) if acc in n.args and n.op not in PLACED)
        for a in () if more or nodes[first].op != "mul" else nodes[first].args:
            node, users = nodes[a], sum(a in n.args for n in nodes)
            if node.op == "operand" and node.shape is Shape.COL and users == 1:
                if self.spec.inputs[node.name].dtype == "float32":
                    return node.name, first
        return "", acc

    def _seeds(self) -> tuple[dict[int, Operand], dict[int, Operand]]:
        """Gradients of forward nodes; and those that the norm's row scale is still missing in."""
        plain: dict[int, Operand] = {}
        scaled: dict[int, Operand] = {}
        for o, kind in self.program.outputs.items():
            node = self.forward.outputs[o]
            if o == self.asked.into:
                seeds, gradient = scaled if self.asked.norm else plain, self.product
            elif o == self.asked.norm:
                # ds of r = rsqrt(s + ε), where z · N / r is the gradient of r; a mean's by element.
                r, z = (self.leaf(self._named(x), Shape.COL) for x in "rz")
                seeds, gradient = scaled, times(times(z, r), -0.5)
            elif o in self.asked.kept:
                continue
            else:
                seeds, gradient = plain, self._given(o, kind, node)
                if kind is RowGather:
                    node = self.forward.nodes[node].args[0]
            seeds[node] = plus(seeds.get(node, 0.0), gradient)
        return plain, scaled

    def _given(self, o: str, kind: type, node: int) -> Operand:
        """The gradient that a tensor brings of an output."""
        hint = f"where {o} has no gradient, --kept {o}"
        if self.spec.outputs[o].dtype.startswith("float8"):
            raise ProgramError(f"output {o!r} is rounded to 8 bits: no gradient", hint=hint)
        name = f"d{o}"
        if kind in (RowSum, RowMean):
            return self.leaf(name, Shape.COL)
        if kind is ColSum:
            return self.leaf(name, Shape.ROW)
        if kind is RowLogSumExp:
            x = self.values[node]
            return times(self.leaf(name, Shape.COL), exp(x - self.leaf(o, Shape.COL)))  # pyright: ignore
        if kind is RowGather:
            x, index = (self.values[a] for a in self.forward.nodes[node].args)
            return times(self.leaf(name, Shape.COL), equal(column_index(x), index))  # pyright: ignore
        if kind in (Tile, AddTile):
            return self.leaf(name, Shape.TILE)
        if kind is HalfTile and self.form is not Form.ELEMENTWISE:
            raise ProgramError(
                f"no kernel reads a gradient of half width, of output {o!r}", hint=hint
            )
        if kind in (HalfTile, WideTile):
            return self.leaf(name, Shape.HALF if kind is HalfTile else Shape.WIDE)
        raise ProgramError(
            f"output {o!r}, a {kind.__name__}, has no derivative here: its gradient goes to the "
            "one place that has it", hint=hint,
        )  # fmt: skip

    def _again(self) -> Operand | None:
        """The next layer's input, for the gradient of its weight; None where it has to be kept."""
        if self.form is not Form.MERGED:
            return None
        node, value = self.forward.outputs[self.asked.into], None
        if self.program.outputs[self.asked.into] is AddTile:
            return None  # what its buffer held is not known here
        if self.stored.get(node) != self.asked.into:
            value = self.values[node]
        elif self.asked.norm:
            # Computed rather than loaded: what it is made of is loaded anyway.
            n = self.forward.nodes[node]
            value = recorded(n.op, *(self.values[a] for a in n.args))
        if value is None or not self.asked.norm:
            return value
        return times(value, self.leaf(self._named("r"), Shape.COL))

    def _operand(
        self, operand: str, gradient: Operand, top_name: str, top: Value,
        made: dict[str, tuple[type, Operand]], gradients: dict[str, str],
    ) -> None:  # fmt: skip
        """The gradient of an operand, as an output and what PyTorch makes of it."""
        kind, name = self.program.operands[operand], self._named(f"d{operand}")
        if not isinstance(gradient, Value):
            gradients[operand] = f"torch.zeros_like({operand})" if kind is not Scalar else "0.0"
            return
        if gradient.index == top.index and kind is Tile:
            gradients[operand] = top_name
            return
        node = self.b.nodes[gradient.index]
        if kind is Tile and node.op == "operand" and node.name != PRODUCT:
            gradients[operand] = node.name
            return
        reduced = {ColVector: RowSum, RowVector: ColSum, Scalar: RowSum}
        if gradient.shape not in (Shape.TILE, Shape.HALF, Shape.WIDE):
            raise ProgramError(
                f"the gradient of {operand!r} is the same in every row or column",
                hint=f"--without {operand} leaves it out",
            )
        gradients[operand] = f"{name}.sum()" if kind is Scalar else name
        if issubclass(kind, Table):
            gradients[operand] = folded(kind, operand, name, self.spec.gemm[1])
            kind = Tile
        if kind is RowVector and self.half:
            gradients[operand] = f"torch.stack(({name}_even, {name}_odd), dim=-1).flatten()"
        made[name] = reduced.get(kind, WideTile if self.half else kind), gradient

    def _flattened(self, roots: Sequence[Operand]) -> tuple[Graph, list[Value]]:
        """The graph, in a kernel of half width taken apart into column pairs."""
        graph = Graph()
        leaves = {n.name: graph.add(n) for n in self.b.nodes if n.op == "operand"}
        apply = _halved if self.half else recorded
        acc = graph.add(Node("acc", (), Shape.TILE))  # of which a place is told
        values: list[Any] = self.b.replay(acc, leaves, apply)
        return graph, [values[root.index] for root in roots if isinstance(root, Value)]

    def _order(self, graph: Graph) -> dict[str, Shape]:
        """The operands: what is saved, what the forward has too, and gradients."""
        found = {n.name: n.shape for n in graph.nodes if n.op == "operand" and n.name != PRODUCT}
        r, z = ([self._named(x)] if self.asked.norm else [] for x in "rz")
        order = [*self.stored.values(), *r, *self.program.operands, *self.program.outputs, *z]
        live = _live(graph)
        return {x: found[x] for x in dict.fromkeys([*order, *found]) if x in found and x in live}

    def _check(self, final: Kernel) -> None:
        """Raises:
        ProgramError: no kernel can have it.
        """
        if final.form is Form.ELEMENTWISE:
            return
        for node in (n for n in statistics(final.graph).nodes if n.op == "operand"):
            if node.shape is Shape.TILE and node.name != PRODUCT:
                raise Unfused(
                    f"a statistic of groups needs {node.name}, a tile, which a kernel has too late"
                )
        wide = [
            x for x, s in final.leaves.items() if s is (Shape.TILE if self.half else Shape.WIDE)
        ]
        if len(wide) > 1:
            gradient = next((x[1:] for x in wide if x[1:] in self.program.outputs), "")
            said = " and ".join("the product" if x == FORWARD else x for x in wide)
            raise ProgramError(
                f"a kernel reads one double-width tile, and this needs {said}",
                hint=f"where {gradient} has no gradient, --kept {gradient}"
                if gradient
                else "--without leaves out the gradient of an input",
            )
        if self.half and any(s is Shape.ROW for s in final.leaves.values()):
            rows = ", ".join(x for x, s in final.leaves.items() if s is Shape.ROW)
            raise Unfused(f"no kernel of half width reads {rows} of full width")


def expanded(kind: type[Table], table: str, first: str, second: str) -> str:
    """A table as the tile that a kernel of the backward reads, in PyTorch."""
    rows, each = f"{first}.shape[0] // {table}.shape[0]", _each(kind, table, second)
    down = f".repeat_interleave({rows}, 0)" if kind.sample else f".repeat({rows}, 1)"
    across = f"{second}.shape[0] // ({table}.shape[1] * {each})"
    wide = "" if each == "1" else f".repeat_interleave({each}, 1)"
    return f"{table}{down}{wide}.repeat(1, {across})"


def folded(kind: type[Table], table: str, gradient: str, second: str) -> str:
    """The gradient of a table, out of that of the tile."""
    rows = f"({table}.shape[0], -1)).sum(1)" if kind.sample else f"(-1, {table}.shape[0])).sum(0)"
    columns = f"(-1, {table}.shape[1], {_each(kind, table, second)})).sum((1, 3))"
    return f"{gradient}.unflatten(1, {columns}.unflatten(0, {rows}"


def _each(kind: type[Table], table: str, second: str) -> str:
    """How many adjacent columns read one of a table."""
    return str(kind.step) if kind.step else f"({second}.shape[0] // {table}.shape[1])"


def _halved(op: str, *args: Any) -> Any:
    """An operation, on full width as on pairs of columns."""
    wide = any(isinstance(a, Value) and a.shape in (Shape.TILE, Shape.ROW) for a in args)
    if not wide or op in ("even", "odd", "interleave"):
        return recorded(op, *args)
    sides = [pairs(a) if isinstance(a, Value) else (a, a) for a in args]
    return interleave(*(recorded(op, *(s[i] for s in sides)) for i in (0, 1)))


def _stored(graph: Graph, kind: type, value: Value) -> list[tuple[str, Value]]:
    """What is stored as an output, by the suffix of its name; of halves their sum, by row."""
    if graph.nodes[value.index].op != "interleave" or kind in (Tile, WideTile):
        return [("", value)]
    even, odd = pairs(value)
    return [("", even + odd)] if kind in (RowSum, RowMean) else [("_even", even), ("_odd", odd)]
