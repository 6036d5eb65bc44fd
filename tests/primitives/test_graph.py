"""The language's errors, the sharing of equal nodes, shapes, and pruning."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColSum,
    ColVector,
    HalfTile,
    Program,
    RowGather,
    RowLogSumExp,
    RowMean,
    RowSum,
    RowVector,
    Scalar,
    Tile,
    WideTile,
    epilogue,
    exp,
    gather,
    interleave,
    maximum,
    pairs,
    silu,
)
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Shape, Value, join
from coda_agent.primitives.inspect import describe
from coda_agent.primitives.interpret import interpret
from tests.programs import program


def bare_operand(acc, r):
    return {"O": acc * r}


def half_operand(acc, h: HalfTile):
    return {"O": acc * h}


def number_operand(acc, r: float):
    return {"O": acc * r}


def starred(acc, *rest):
    return {"O": acc}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (bare_operand, "'r' is annotated nothing"),
        (half_operand, "'h' is annotated HalfTile"),
        (number_operand, "'r' is annotated float"),
        (starred, "'rest' is annotated nothing"),
    ],
)
def test_an_operand_is_of_a_kind(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ProgramError) as error:
        epilogue(O=Tile)(function)
    assert str(error.value) == (
        f"{function.__name__}: operand {said}, expected one of Tile, HeadTable, PositionTable, "
        "SampleTable, PositionPairs, PositionHeads, SampleHeads, WideTile, ColVector, RowVector, "
        "Scalar, ColIndex"
    )


FIRST = "program: the first parameter must be acc, the accumulator"
BRANCH = (
    "a program cannot branch on a value: it runs once, for every element (use maximum, minimum or "
    "clamp)"
)
ONE_WIDTH = "expected two values of one width, (M, N/2) or (M, N)"
MIXED = (
    "{} mixes a full-width value with a half-width one (take both apart with pairs(), or join "
    "halves with interleave())"
)
DECLARED = "program: output '{}' is declared {} but its value is {}, expected {}"
ERRORS: list[tuple[Callable[..., Any], str]] = [
    (lambda: {}, FIRST),
    (lambda acc: acc, "program returned Value, expected a dict of outputs"),
    (lambda acc: {}, "program: output 'O' is declared but never written"),
    (lambda acc: {"O": acc, "P": acc}, "program: returned 'P', which is not a declared output (declared: O)"),
    (lambda acc: {"O": 1.0}, "program: output 'O' is float, expected a value"),
    (lambda acc, r: {"O": acc}, "program: operand 'r' is never used"),
    (lambda acc, r: {"O": (acc * r, acc)[1]}, "program: operand 'r' is never used"),
    (lambda acc, C: {"O": C}, "program: no output depends on the accumulator"),
    (lambda acc: {"O": acc if acc > 0 else -acc}, BRANCH),
    (lambda acc: {"O": acc and -acc}, BRANCH),
    (lambda acc: {"O": acc * pairs(acc)[0]}, MIXED.format("mul")),
    (lambda acc, b: {"O": pairs(acc)[0] + b}, MIXED.format("add")),
    (lambda acc: {"O": silu(pairs(acc)[0])}, DECLARED.format("O", "Tile", "(M, N/2)", "(M, N)")),
    (lambda acc, r: {"O": exp(r)}, DECLARED.format("O", "Tile", "(M, 1)", "(M, N)")),
    (lambda acc: {"O": pairs(pairs(acc)[0])[0]}, "pairs() got a half-width value, expected a full-width one"),
    (lambda acc: {"O": interleave(acc, acc)}, DECLARED.format("O", "Tile", "(M, 2N)", "(M, N)")),
    (lambda acc, r: {"O": acc + interleave(r, r)}, f"interleave() got (M, 1) and (M, 1), {ONE_WIDTH}"),
    (lambda acc, b: {"O": acc + interleave(b, b)}, f"interleave() got (1, N) and (1, N), {ONE_WIDTH}"),
    (lambda acc: {"O": interleave(pairs(acc)[0], acc)}, MIXED.format("interleave()")),
    (lambda acc: {"O": acc * interleave(2.0, 0.0)}, f"interleave() {ONE_WIDTH.replace('expected', 'expects')}"),
    (lambda acc: {"O": acc * "2"}, "mul got str, expected a value of the program or a number"),
    (lambda acc: {"O": maximum(acc, True)}, "maximum got bool, expected a value of the program or a number"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "message"), ERRORS)
def test_error_of_the_language(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProgramError) as error:
        program(function, O=Tile)
    assert str(error.value) == message


def test_the_first_parameter_is_called_acc() -> None:
    with pytest.raises(ProgramError) as error:
        program(lambda x: {"O": x}, O=Tile)
    assert str(error.value) == FIRST


@pytest.mark.parametrize(
    ("function", "kind", "value", "expected"),
    [
        (lambda acc: {"D": acc, "s": acc}, HalfTile, "(M, N)", "(M, N/2)"),
        (lambda acc, r: {"D": acc, "s": r}, RowSum, "(M, 1)", "(M, N) or (M, N/2)"),
        (lambda acc, y: {"D": acc, "s": y}, RowGather, "(M,) integers", "(M,)"),
        (lambda acc, y: {"D": gather(acc, y), "s": y}, Tile, "(M,) integers", "(M, N)"),
        (lambda acc: {"D": acc, "s": acc}, RowGather, "(M, N)", "(M,)"),
        (lambda acc: {"D": acc, "s": pairs(acc)[0]}, ColSum, "(M, N/2)", "(M, N)"),
        (lambda acc, y: {"D": acc, "s": gather(acc, y)}, ColSum, "(M,)", "(M, N)"),
        (lambda acc: {"D": acc, "s": interleave(acc, acc)}, Tile, "(M, 2N)", "(M, N)"),
        (lambda acc, Z: {"D": acc * pairs(Z)[0], "s": Z}, Tile, "(M, 2N)", "(M, N)"),
        (lambda acc, Z: {"D": acc, "s": acc * pairs(Z)[0]}, WideTile, "(M, N)", "(M, 2N)"),
        (lambda acc, Z: {"D": acc, "s": interleave(*pairs(acc))}, WideTile, "(M, N)", "(M, 2N)"),
        (lambda acc, Z: {"D": acc, "s": Z}, RowSum, "(M, 2N)", "(M, N) or (M, N/2)"),
        (lambda acc: {"D": acc, "s": pairs(acc)[0]}, AddTile, "(M, N/2)", "(M, N)"),
    ],
)
def test_a_value_has_the_shape_that_its_output_declares(
    function: Callable[..., Any], kind: type, value: str, expected: str
) -> None:
    with pytest.raises(ProgramError) as error:
        program(function, s=kind, D=Tile)
    assert str(error.value) == (
        f"program: output 's' is declared {kind.__name__} but its value is {value}, expected "
        f"{expected}"
    )


GATHER_FIRST = "gather() takes its first argument at full width, (M, N)"
GATHER_INDEX = "gather() takes a ColIndex operand as its second argument"
COMPUTED = (
    "{} cannot compute with an index or a gathered value (an index goes into gather(), and what "
    "that gives into a RowGather output)"
)


GATHER_ERRORS: list[tuple[Callable[..., Any], str]] = [
    (lambda acc, y: {"Z": acc, "t": gather(pairs(acc)[0], y)}, GATHER_FIRST),
    (lambda acc, y: {"Z": acc, "t": gather(gather(acc, y), y)}, GATHER_FIRST),
    (lambda acc, y: {"Z": acc, "t": gather(2.0, y)}, GATHER_FIRST),  # pyright: ignore[reportArgumentType]
    (lambda acc, W, y: {"Z": acc, "t": gather(W, y)}, GATHER_FIRST),
    (lambda acc, r: {"Z": acc, "t": gather(acc, r)}, GATHER_INDEX),
    (lambda acc: {"Z": acc, "t": gather(acc, 3)}, GATHER_INDEX),  # pyright: ignore[reportArgumentType]
    (lambda acc, y: {"Z": acc, "t": gather(acc, gather(acc, y))}, GATHER_INDEX),
    (lambda acc, y: {"Z": acc + y, "t": gather(acc, y)}, COMPUTED.format("add")),
    (lambda acc, y: {"Z": acc, "t": gather(acc, -y)}, COMPUTED.format("neg")),
    (lambda acc, y: {"Z": acc, "t": gather(acc, y) * 2.0}, COMPUTED.format("mul")),
    (lambda acc, y: {"Z": maximum(acc, gather(acc, y)), "t": acc}, COMPUTED.format("maximum")),
    (
        lambda acc, y: {"Z": interleave(pairs(acc)[0], gather(acc, y)), "t": gather(acc, y)},
        COMPUTED.format("interleave()"),
    ),
    (lambda acc, y: {"Z": interleave(y, pairs(acc)[1]), "t": gather(acc, y)}, COMPUTED.format("interleave()")),
    (lambda acc, y: {"Z": pairs(acc)[0] * pairs(y)[0], "t": acc}, COMPUTED.format("mul")),
]  # fmt: skip


@pytest.mark.parametrize(("function", "message"), GATHER_ERRORS)
def test_error_of_gather(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProgramError) as error:
        program(function, Z=Tile, t=RowGather)
    assert str(error.value) == message


@pytest.mark.parametrize("shape", [Shape.INDEX, Shape.GATHERED])
def test_join_refuses_indices_and_gathered_values(shape: Shape) -> None:
    for other in set(Shape) - {Shape.WIDE}:
        with pytest.raises(ProgramError, match="add cannot compute with an index"):
            join([other, shape], "add")


def test_join_refuses_double_width() -> None:
    for other in Shape:
        with pytest.raises(ProgramError, match="add cannot compute with a double-width value"):
            join([other, Shape.WIDE], "add")


def test_a_gathering_program_survives_serialisation() -> None:
    @epilogue(Z=Tile, lse=RowLogSumExp, t=RowGather, g=ColSum)
    def program(acc, y: ColIndex):
        return {"Z": acc, "lse": acc, "t": gather(acc, y), "g": acc}

    copy = Program.from_dict(json.loads(json.dumps(program.to_dict())))
    assert copy.to_dict() == program.to_dict()
    assert copy.digest == program.digest
    assert list(program.reductions) == ["lse", "g"]
    assert not program.paired
    assert describe(program.graph).splitlines()[2] == "%2 = gather(%1, %0)  # (M,)"


DOUBLE = (
    "{} cannot compute with a double-width value (take it apart with pairs() into two full-width "
    "ones)"
)
COUNT = (
    "program has {} WideTile operands and {} outputs{}, expected one of each (a wide tile takes the "
    "place of the accumulator's own pairs)"
)
PAIRED = " and pairs the accumulator"


KINDS = {"W": WideTile, "V": WideTile, "T": Tile, "H": HalfTile, "A": AddTile, "B": AddTile}
ADDED = "program has {} AddTile outputs, expected one, and no WideTile beside it"
STORE_ERRORS: list[tuple[Callable[..., Any], str, str]] = [
    (lambda acc, Z: {"W": Z * acc}, "W", DOUBLE.format("mul")),
    (lambda acc, Z: {"W": interleave(Z, acc)}, "W", DOUBLE.format("interleave()")),
    (lambda acc: {"W": interleave(acc, -acc)}, "W", COUNT.format(0, 1, "")),
    (lambda acc, Y, Z: {"W": interleave(acc * pairs(Y)[0], pairs(Z)[1])}, "W", COUNT.format(2, 1, "")),
    (
        lambda acc, Z: {"W": interleave(acc, pairs(Z)[1]), "V": interleave(acc, pairs(Z)[0])},
        "WV",
        COUNT.format(1, 2, ""),
    ),
    (lambda acc, Z: {"T": acc * pairs(Z)[0]}, "T", COUNT.format(1, 0, "")),
    (lambda acc, Z: {"W": interleave(acc, pairs(Z)[0]), "H": pairs(acc)[0]}, "WH", COUNT.format(1, 1, PAIRED)),
    (
        lambda acc, Z, t: {"W": interleave(acc * interleave(*pairs(t * acc)), pairs(Z)[0])},
        "W",
        COUNT.format(1, 1, PAIRED),
    ),
    (lambda acc, Z: {"W": interleave(acc, pairs(Z)[0]), "A": acc}, "WA", ADDED.format(1)),
    (lambda acc: {"A": acc, "B": -acc}, "AB", ADDED.format(2)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "outputs", "message"), STORE_ERRORS)
def test_error_of_wide_and_added_tiles(
    function: Callable[..., Any], outputs: str, message: str
) -> None:
    with pytest.raises(ProgramError) as error:
        program(function, **{o: KINDS[o] for o in outputs})
    assert str(error.value) == message


def test_pairs_of_a_wide_tile_are_full_width_and_their_interleave_double() -> None:
    @epilogue(dZ=WideTile, O=Tile, s=RowSum)
    def program(acc, Z: WideTile, r: ColVector, t: RowVector):
        gate, up = pairs(Z)
        again, _ = pairs(interleave(gate * acc, up))
        return {"dZ": interleave(again, r * t), "O": up + acc, "s": gate}

    assert program.wide and not program.paired and program.accumulated is None
    shapes = {n.op: n.shape for n in program.graph.nodes}
    assert shapes["even"] is shapes["odd"] is shapes["mul"] is Shape.TILE
    assert shapes["interleave"] is Shape.WIDE
    # pairs() of interleave() found its arguments: only the stored one is left.
    assert [n.op for n in program.graph.nodes].count("interleave") == 1


def test_a_number_may_be_one_side_of_a_wide_tile() -> None:
    @epilogue(dZ=WideTile)
    def program(acc, Z: WideTile):
        return {"dZ": interleave(0.0, acc * pairs(Z)[0])}

    assert program.graph.nodes[program.graph.outputs["dZ"]].shape is Shape.WIDE


def test_vectors_are_interleaved_where_they_make_a_tile() -> None:
    @epilogue(O=Tile)
    def program(acc, r: ColVector, t: RowVector):
        x, y = pairs(acc)
        cosine, _ = pairs(t)
        return {"O": interleave(cosine, r) + interleave(y, x)}

    a, b = torch.randn(3, 8), torch.randn(6, 8)
    r, t = torch.randn(3), torch.randn(6)
    out = interpret(program, a, b, {"r": r, "t": t}, dtypes={"O": torch.float32})["O"]
    acc = a @ b.T
    torch.testing.assert_close(out[:, 0::2], t[0::2] + acc[:, 1::2])
    torch.testing.assert_close(out[:, 1::2], r[:, None] + acc[:, 0::2])


def test_accumulated_names_the_added_output() -> None:
    @epilogue(D=Tile, dX=AddTile)
    def program(acc, C: Tile):
        return {"D": acc, "dX": acc * C}

    assert program.accumulated == "dX"
    assert not program.wide and not program.paired


def test_declaring_nothing() -> None:
    with pytest.raises(ProgramError) as error:
        epilogue()
    assert str(error.value) == "@epilogue declares no output (e.g. @epilogue(O=Tile))"


@pytest.mark.parametrize(
    ("kind", "label"), [(ColVector, "ColVector"), (float, "float"), (None, "nothing"), (3, "3")]
)
def test_declaring_a_wrong_kind(kind: Any, label: str) -> None:
    with pytest.raises(ProgramError) as error:
        epilogue(O=kind)
    assert str(error.value) == (
        f"output 'O' is declared as {label}, expected one of Tile, HalfTile, WideTile, "
        "AddTile, RowGather, GroupTile4, GroupTile8, GroupTile16, GroupTile32, GroupTile64, "
        "GroupTile128, RowSum, RowMean, RowMax, RowMin, RowLogSumExp, ColSum, ColMax"
    )


def test_one_name_for_operand_and_output() -> None:
    def clash(acc, O: Tile):
        return {"O": acc + O}

    with pytest.raises(ProgramError) as error:
        epilogue(O=Tile)(clash)
    assert str(error.value) == "clash: 'O' is an operand and an output"


def test_a_value_of_another_program() -> None:
    kept: list[Value] = []

    @epilogue(O=Tile)
    def first(acc):
        kept.append(acc)
        return {"O": acc}

    def second(acc):
        return {"O": acc + kept[0]}

    assert first.name == "first"
    with pytest.raises(ProgramError) as error:
        epilogue(O=Tile)(second)
    assert str(error.value) == "add got a value of another program"


def test_program_records_its_declaration_in_order() -> None:
    @epilogue(D=Tile, O=HalfTile, s=RowMean)
    def program(acc, C: Tile, r: ColVector, beta: Scalar):
        """What it computes.

        And how.
        """
        d = acc * r + beta * C
        gate, up = pairs(d)
        return {"s": d * d, "O": silu(gate) * up, "D": d}

    assert program.name == "program"
    assert program.doc == "What it computes.\n\nAnd how."
    assert list(program.operands.items()) == [("C", Tile), ("r", ColVector), ("beta", Scalar)]
    assert list(program.outputs.items()) == [("D", Tile), ("O", HalfTile), ("s", RowMean)]
    assert program.reductions == {"s": RowMean}
    assert program.paired


def test_equal_nodes_are_shared() -> None:
    @epilogue(D=Tile, s=RowSum)
    def program(acc, r: ColVector):
        return {"D": acc * r + 1.0, "s": (acc * r + 1.0) * (acc * r + 1)}

    assert [n.op for n in program.graph.nodes] == ["operand", "acc", "mul", "const", "add", "mul"]


def test_dead_nodes_are_pruned() -> None:
    @epilogue(O=Tile)
    def program(acc):
        wasted = exp(acc) + 3.0
        _ = wasted * wasted
        return {"O": acc * 2.0}

    assert describe(program.graph) == (
        "%0 = acc()  # (M, N)\n%1 = const(2)  # ()\n%2 = mul(%0, %1)  # (M, N)\nO <- %2"
    )


def test_prune_renumbers_arguments_and_outputs() -> None:
    graph = Graph()
    acc = graph.add(Node("acc", (), Shape.TILE))
    dead = graph.const(7.0)
    root = graph.add(Node("neg", (acc.index,), Shape.TILE))
    graph.outputs = {"O": root.index, "P": acc.index}
    assert (dead.index, root.index) == (1, 2)
    pruned = graph.prune()
    assert pruned.nodes == [Node("acc", (), Shape.TILE), Node("neg", (0,), Shape.TILE)]
    assert pruned.outputs == {"O": 1, "P": 0}
    assert graph.outputs == {"O": 2, "P": 0}


def test_a_number_may_be_interleaved() -> None:
    @epilogue(O=Tile)
    def even_only(acc):
        return {"O": interleave(pairs(acc)[0], 0.0)}

    a, b = torch.randn(3, 8), torch.randn(6, 8)
    out = interpret(even_only, a, b, {}, dtypes={"O": torch.float32})["O"]
    expected = a @ b.T
    expected[:, 1::2] = 0
    torch.testing.assert_close(out, expected)


def test_pairs_of_interleave_are_its_arguments() -> None:
    @epilogue(O=HalfTile)
    def program(acc):
        x, y = pairs(acc)
        a, b = pairs(interleave(x + y, x - y))
        return {"O": a * b}

    assert [n.op for n in program.graph.nodes] == ["acc", "even", "odd", "add", "sub", "mul"]


def test_pairs_of_a_value_without_columns_is_the_value_twice() -> None:
    @epilogue(O=HalfTile)
    def program(acc, r: ColVector):
        x, y = pairs(acc)
        a, b = pairs(r)
        return {"O": x * a + y * b}

    assert [n.op for n in program.graph.nodes].count("even") == 1


SCALAR, COL, ROW, TILE = Shape.SCALAR, Shape.COL, Shape.ROW, Shape.TILE
HALF_ROW, HALF = Shape.HALF_ROW, Shape.HALF


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([SCALAR], SCALAR),
        ([SCALAR, COL], COL),
        ([SCALAR, ROW], ROW),
        ([COL, ROW], TILE),
        ([COL, COL], COL),
        ([ROW, TILE], TILE),
        ([COL, HALF_ROW], HALF),
        ([SCALAR, HALF_ROW], HALF_ROW),
        ([HALF, COL], HALF),
    ],
)
def test_join_is_broadcasting(shapes: list[Shape], expected: Shape) -> None:
    assert join(shapes, "add") is expected
    assert join(shapes[::-1], "add") is expected


@pytest.mark.parametrize("full", [ROW, TILE])
@pytest.mark.parametrize("half", [HALF_ROW, HALF])
def test_join_refuses_two_widths(full: Shape, half: Shape) -> None:
    with pytest.raises(ProgramError, match="add mixes a full-width value with a half-width one"):
        join([full, half], "add")


def test_arithmetic_records_both_orders() -> None:
    @epilogue(O=Tile)
    def program(acc, C: Tile):
        return {"O": (2 - acc) + (1 / C) - (acc / 4) * (3 + C) / C + -acc}

    ops = [n.op for n in program.graph.nodes if n.op not in ("acc", "operand", "const")]
    assert sorted(ops) == ["add", "add", "add", "div", "div", "mul", "mul", "neg", "sub", "sub"]
    assert 0.25 in [n.value for n in program.graph.nodes]


@pytest.mark.parametrize(
    "call",
    [
        lambda acc: exp(acc, 2.0),
        lambda acc: maximum(acc),
        lambda acc: maximum(acc, acc, acc),
        lambda acc: acc**2,
        lambda acc: acc * pairs(2.0)[0],  # pyright: ignore[reportArgumentType]
        lambda acc: acc / 0,
    ],
    ids=["two for one", "one for two", "three for two", "power", "pairs", "by 0"],
)
def test_wrong_arguments_are_errors_of_the_language(call: Any) -> None:
    def program(acc):
        return {"O": call(acc)}

    with pytest.raises(ProgramError):
        epilogue(O=Tile)(program)
