"""The language's errors, the sharing of equal nodes, shapes, and pruning."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColMax,
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


def no_accumulator(x):
    return {"O": x}


def no_parameters():
    return {}


def bare_operand(acc, r):
    return {"O": acc * r}


def half_operand(acc, h: HalfTile):
    return {"O": acc * h}


def number_operand(acc, r: float):
    return {"O": acc * r}


def starred(acc, *rest):
    return {"O": acc}


def not_a_dict(acc):
    return acc


def missing(acc):
    return {}


def extra(acc):
    return {"O": acc, "P": acc}


def number_output(acc):
    return {"O": 1.0}


def unused(acc, r: ColVector):
    return {"O": acc}


def unused_in_effect(acc, r: ColVector):
    _ = acc * r
    return {"O": acc}


def accumulator_unused(acc, C: Tile):
    return {"O": C}


def branches(acc):
    return {"O": acc if acc > 0 else -acc}


def compares(acc):
    return {"O": acc if acc == 0 else -acc}


def truth(acc):
    return {"O": acc and -acc}


def mixed(acc):
    gate, _ = pairs(acc)
    return {"O": acc * gate}


def half_with_row_vector(acc, b: RowVector):
    gate, _ = pairs(acc)
    return {"O": gate + b}


def half_as_tile(acc):
    gate, up = pairs(acc)
    return {"O": silu(gate) * up}


def vector_output(acc, r: ColVector):
    return {"O": exp(r)}


def pairs_of_half(acc):
    gate, _ = pairs(acc)
    x, _ = pairs(gate)
    return {"O": x}


def interleave_full(acc):
    return {"O": interleave(acc, acc)}


def interleave_vectors(acc, r: ColVector):
    return {"O": acc + interleave(r, r)}


def interleave_rows(acc, b: RowVector):
    return {"O": acc + interleave(b, b)}


def interleave_widths(acc):
    return {"O": interleave(pairs(acc)[0], acc)}


def interleave_numbers(acc):
    return {"O": acc * interleave(2.0, 0.0)}


def text_argument(acc):
    return {"O": acc * "2"}


def truth_argument(acc):
    return {"O": maximum(acc, True)}


OPERANDS = (
    "Tile, HeadTable, PositionTable, SampleTable, PositionPairs, PositionHeads, SampleHeads, "
    "WideTile, ColVector, RowVector, Scalar, ColIndex"
)
ONE_WIDTH = "expected two values of one width, (M, N/2) or (M, N)"
MIXED = (
    "{} mixes a full-width value with a half-width one (take both apart with pairs(), or join "
    "halves with interleave())"
)
ERRORS: list[tuple[Callable[..., Any], str]] = [
    (no_accumulator, "no_accumulator: the first parameter must be acc, the accumulator"),
    (no_parameters, "no_parameters: the first parameter must be acc, the accumulator"),
    (
        bare_operand,
        "bare_operand: operand 'r' is annotated nothing, expected one of " + OPERANDS,
    ),
    (
        half_operand,
        "half_operand: operand 'h' is annotated HalfTile, expected one of " + OPERANDS,
    ),
    (
        number_operand,
        "number_operand: operand 'r' is annotated float, expected one of " + OPERANDS,
    ),
    (
        starred,
        "starred: operand 'rest' is annotated nothing, expected one of " + OPERANDS,
    ),
    (not_a_dict, "not_a_dict returned Value, expected a dict of outputs"),
    (missing, "missing: output 'O' is declared but never written"),
    (extra, "extra: returned 'P', which is not a declared output (declared: O)"),
    (number_output, "number_output: output 'O' is float, expected a value"),
    (unused, "unused: operand 'r' is never used"),
    (unused_in_effect, "unused_in_effect: operand 'r' is never used"),
    (accumulator_unused, "accumulator_unused: no output depends on the accumulator"),
    (
        branches,
        "a program cannot branch on a value: it runs once, for every element (use maximum, "
        "minimum or clamp)",
    ),
    (
        compares,
        "a program cannot branch on a value: it runs once, for every element (use maximum, "
        "minimum or clamp)",
    ),
    (
        truth,
        "a program cannot branch on a value: it runs once, for every element (use maximum, "
        "minimum or clamp)",
    ),
    (mixed, MIXED.format("mul")),
    (half_with_row_vector, MIXED.format("add")),
    (
        half_as_tile,
        "half_as_tile: output 'O' is declared Tile but its value is (M, N/2), expected (M, N)",
    ),
    (
        vector_output,
        "vector_output: output 'O' is declared Tile but its value is (M, 1), expected (M, N)",
    ),
    (pairs_of_half, "pairs() got a half-width value, expected a full-width one"),
    (
        interleave_full,
        "interleave_full: output 'O' is declared Tile but its value is (M, 2N), expected (M, N)",
    ),
    (interleave_vectors, f"interleave() got (M, 1) and (M, 1), {ONE_WIDTH}"),
    (interleave_rows, f"interleave() got (1, N) and (1, N), {ONE_WIDTH}"),
    (interleave_widths, MIXED.format("interleave()")),
    (interleave_numbers, f"interleave() {ONE_WIDTH.replace('expected', 'expects')}"),
    (text_argument, "mul got str, expected a value of the program or a number"),
    (truth_argument, "maximum got bool, expected a value of the program or a number"),
]


@pytest.mark.parametrize(("function", "message"), ERRORS, ids=[f.__name__ for f, _ in ERRORS])
def test_error_of_the_language(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProgramError) as error:
        epilogue(O=Tile)(function)
    assert str(error.value) == message


def test_half_tile_of_a_full_value() -> None:
    def full(acc):
        return {"O": acc}

    with pytest.raises(ProgramError) as error:
        epilogue(O=HalfTile)(full)
    assert str(error.value) == (
        "full: output 'O' is declared HalfTile but its value is (M, N), expected (M, N/2)"
    )


def test_reduction_of_a_vector() -> None:
    def vector(acc, r: ColVector):
        return {"D": acc, "s": r}

    with pytest.raises(ProgramError) as error:
        epilogue(D=Tile, s=RowSum)(vector)
    assert str(error.value) == (
        "vector: output 's' is declared RowSum but its value is (M, 1), expected (M, N) or (M, N/2)"
    )


GATHER_FIRST = "gather() takes its first argument at full width, (M, N)"
GATHER_INDEX = "gather() takes a ColIndex operand as its second argument"
COMPUTED = (
    "{} cannot compute with an index or a gathered value (an index goes into gather(), and what "
    "that gives into a RowGather output)"
)


def gathers_half(acc, y: ColIndex):
    return {"Z": acc, "t": gather(pairs(acc)[0], y)}


def gathers_vector(acc, y: ColIndex, b: RowVector):
    return {"Z": acc, "t": gather(b, y)}


def gathers_index(acc, y: ColIndex):
    return {"Z": acc, "t": gather(y, y)}


def gathers_twice(acc, y: ColIndex):
    return {"Z": acc, "t": gather(gather(acc, y), y)}


def gathers_number(acc, y: ColIndex):
    return {"Z": acc, "t": gather(2.0, y)}  # pyright: ignore[reportArgumentType]


def by_vector(acc, y: ColVector):
    return {"Z": acc, "t": gather(acc, y)}


def by_number(acc):
    return {"Z": acc, "t": gather(acc, 3)}  # pyright: ignore[reportArgumentType]


def by_gathered(acc, y: ColIndex):
    return {"Z": acc, "t": gather(acc, gather(acc, y))}


def computes_with_index(acc, y: ColIndex):
    return {"Z": acc + y, "t": gather(acc, y)}


def negates_index(acc, y: ColIndex):
    return {"Z": acc, "t": gather(acc, -y)}


def computes_with_gathered(acc, y: ColIndex):
    return {"Z": acc, "t": gather(acc, y) * 2.0}


def normalises_by_gathered(acc, y: ColIndex):
    return {"Z": maximum(acc, gather(acc, y)), "t": gather(acc, y)}


def stores_index(acc, y: ColIndex):
    return {"Z": acc, "t": y}


def stores_index_as_tile(acc, y: ColIndex):
    return {"Z": y, "t": gather(acc, y)}


def stores_gathered_as_tile(acc, y: ColIndex):
    return {"Z": gather(acc, y), "t": gather(acc, y)}


def stores_tile_as_gathered(acc):
    return {"Z": acc, "t": acc}


def interleaves_gathered(acc, y: ColIndex):
    return {"Z": interleave(pairs(acc)[0], gather(acc, y)), "t": gather(acc, y)}


def interleaves_index(acc, y: ColIndex):
    return {"Z": interleave(y, pairs(acc)[1]), "t": gather(acc, y)}


GATHER_ERRORS: list[tuple[Callable[..., Any], str]] = [
    (gathers_half, GATHER_FIRST),
    (gathers_vector, GATHER_FIRST),
    (gathers_index, GATHER_FIRST),
    (gathers_twice, GATHER_FIRST),
    (gathers_number, GATHER_FIRST),
    (by_vector, GATHER_INDEX),
    (by_number, GATHER_INDEX),
    (by_gathered, GATHER_INDEX),
    (computes_with_index, COMPUTED.format("add")),
    (negates_index, COMPUTED.format("neg")),
    (computes_with_gathered, COMPUTED.format("mul")),
    (normalises_by_gathered, COMPUTED.format("maximum")),
    (
        stores_index,
        "stores_index: output 't' is declared RowGather but its value is (M,) integers, "
        "expected (M,)",
    ),
    (
        stores_index_as_tile,
        "stores_index_as_tile: output 'Z' is declared Tile but its value is (M,) integers, "
        "expected (M, N)",
    ),
    (
        stores_gathered_as_tile,
        "stores_gathered_as_tile: output 'Z' is declared Tile but its value is (M,), "
        "expected (M, N)",
    ),
    (
        stores_tile_as_gathered,
        "stores_tile_as_gathered: output 't' is declared RowGather but its value is (M, N), "
        "expected (M,)",
    ),
]


@pytest.mark.parametrize(
    ("function", "message"), GATHER_ERRORS, ids=[f.__name__ for f, _ in GATHER_ERRORS]
)
def test_error_of_gather(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProgramError) as error:
        epilogue(Z=Tile, t=RowGather)(function)
    assert str(error.value) == message


@pytest.mark.parametrize("function", [interleaves_gathered, interleaves_index])
def test_interleave_takes_neither_indices_nor_gathered_values(function: Any) -> None:
    with pytest.raises(ProgramError):
        epilogue(Z=Tile, t=RowGather)(function)


def test_pairs_takes_no_index() -> None:
    def paired_index(acc, y: ColIndex):
        even, _ = pairs(y)
        return {"O": pairs(acc)[0] * even}

    with pytest.raises(ProgramError):
        epilogue(O=HalfTile)(paired_index)


@pytest.mark.parametrize("shape", [Shape.INDEX, Shape.GATHERED])
def test_join_refuses_indices_and_gathered_values(shape: Shape) -> None:
    for other in set(Shape) - {Shape.WIDE}:
        with pytest.raises(ProgramError, match="add cannot compute with an index"):
            join([other, shape], "add")


def test_join_refuses_double_width() -> None:
    for other in Shape:
        with pytest.raises(ProgramError, match="add cannot compute with a double-width value"):
            join([other, Shape.WIDE], "add")


@pytest.mark.parametrize("kind", [ColSum, ColMax])
def test_reduction_over_rows_of_a_half_width_value(kind: type) -> None:
    def half(acc):
        gate, up = pairs(acc)
        return {"O": gate * up, "g": gate}

    with pytest.raises(ProgramError) as error:
        epilogue(O=HalfTile, g=kind)(half)
    assert str(error.value) == (
        f"half: output 'g' is declared {kind.__name__} but its value is (M, N/2), expected (M, N)"
    )


@pytest.mark.parametrize("kind", [RowLogSumExp, ColSum, ColMax])
def test_reduction_of_a_gathered_value(kind: type) -> None:
    def reduced(acc, y: ColIndex):
        return {"Z": acc, "s": gather(acc, y)}

    with pytest.raises(ProgramError, match=r"its value is \(M,\), expected"):
        epilogue(Z=Tile, s=kind)(reduced)


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
    "{} has {} WideTile operands and {} outputs{}, expected one of each (a wide tile takes the "
    "place of the accumulator's own pairs)"
)
PAIRED = " and pairs the accumulator"


def computes_wide(acc, Z: WideTile):
    return {"W": Z * acc}


def stores_wide_as_tile(acc, Z: WideTile):
    return {"W": interleave(acc, pairs(Z)[0]), "T": Z}


def stores_tile_as_wide(acc, Z: WideTile):
    return {"W": acc * pairs(Z)[0]}


def stores_half_pairs_as_wide(acc, Z: WideTile):
    return {"W": interleave(*pairs(acc))}


def interleaves_wide(acc, Z: WideTile):
    return {"W": interleave(Z, acc)}


def sums_wide(acc, Z: WideTile):
    return {"W": interleave(acc, pairs(Z)[0]), "S": Z}


def gathers_wide(acc, Z: WideTile, y: ColIndex):
    return {"W": interleave(acc, pairs(Z)[0]), "G": gather(Z, y)}


def wide_output_alone(acc):
    return {"W": interleave(acc, -acc)}


def two_wide_operands(acc, Y: WideTile, Z: WideTile):
    return {"W": interleave(acc * pairs(Y)[0], pairs(Z)[1])}


def two_wide_outputs(acc, Z: WideTile):
    gate, up = pairs(Z)
    return {"W": interleave(acc, up), "V": interleave(acc, gate)}


def wide_operand_alone(acc, Z: WideTile):
    return {"T": acc * pairs(Z)[0]}


def wide_beside_pairs(acc, Z: WideTile):
    x, y = pairs(acc)
    return {"W": interleave(acc, pairs(Z)[0]), "H": x * y}


def wide_beside_paired_vector(acc, Z: WideTile, t: RowVector):
    gate, up = pairs(Z)
    return {"W": interleave(acc * interleave(*pairs(t * acc)), gate), "T": up, "H": pairs(up)[0]}


def wide_beside_added(acc, Z: WideTile):
    return {"W": interleave(acc, pairs(Z)[0]), "A": acc}


def two_added(acc):
    return {"A": acc, "B": -acc}


def half_added(acc):
    x, y = pairs(acc)
    return {"A": x * y}


KINDS = {"W": WideTile, "V": WideTile, "T": Tile, "H": HalfTile, "S": RowSum, "G": RowGather}
KINDS |= {"A": AddTile, "B": AddTile}
STORE_ERRORS: list[tuple[Callable[..., Any], str, str]] = [
    (computes_wide, "W", DOUBLE.format("mul")),
    (
        stores_wide_as_tile,
        "WT",
        "stores_wide_as_tile: output 'T' is declared Tile but its value is (M, 2N), expected (M, N)",
    ),
    (
        stores_tile_as_wide,
        "W",
        "stores_tile_as_wide: output 'W' is declared WideTile but its value is (M, N), "
        "expected (M, 2N)",
    ),
    (
        stores_half_pairs_as_wide,
        "W",
        "stores_half_pairs_as_wide: output 'W' is declared WideTile but its value is (M, N), "
        "expected (M, 2N)",
    ),
    (interleaves_wide, "W", DOUBLE.format("interleave()")),
    (
        sums_wide,
        "WS",
        "sums_wide: output 'S' is declared RowSum but its value is (M, 2N), expected (M, N) or "
        "(M, N/2)",
    ),
    (gathers_wide, "WG", GATHER_FIRST),
    (wide_output_alone, "W", COUNT.format("wide_output_alone", 0, 1, "")),
    (two_wide_operands, "W", COUNT.format("two_wide_operands", 2, 1, "")),
    (two_wide_outputs, "WV", COUNT.format("two_wide_outputs", 1, 2, "")),
    (wide_operand_alone, "T", COUNT.format("wide_operand_alone", 1, 0, "")),
    (wide_beside_pairs, "WH", COUNT.format("wide_beside_pairs", 1, 1, PAIRED)),
    (wide_beside_paired_vector, "WTH", COUNT.format("wide_beside_paired_vector", 1, 1, PAIRED)),
    (
        wide_beside_added,
        "WA",
        "wide_beside_added has 1 AddTile outputs, expected one, and no WideTile beside it",
    ),
    (two_added, "AB", "two_added has 2 AddTile outputs, expected one, and no WideTile beside it"),
    (
        half_added,
        "A",
        "half_added: output 'A' is declared AddTile but its value is (M, N/2), expected (M, N)",
    ),
]


@pytest.mark.parametrize(
    ("function", "outputs", "message"), STORE_ERRORS, ids=[f.__name__ for f, *_ in STORE_ERRORS]
)
def test_error_of_wide_and_added_tiles(
    function: Callable[..., Any], outputs: str, message: str
) -> None:
    with pytest.raises(ProgramError) as error:
        epilogue(**{o: KINDS[o] for o in outputs})(function)
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
        "AddTile, RowGather, GroupTile16, GroupTile32, GroupTile64, "
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
