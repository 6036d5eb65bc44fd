"""The canonical digest, and programs as data."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColVector,
    HalfTile,
    HeadTable,
    Program,
    RowGather,
    RowMean,
    RowSum,
    RowVector,
    Scalar,
    Tile,
    WideTile,
    epilogue,
    gather,
    interleave,
    maximum,
    pairs,
    swiglu,
)
from coda_agent.primitives.errors import ProgramError
from tests.programs import program


@epilogue(O=Tile)
def base(acc, r: ColVector, b: RowVector):
    """The program others are compared with."""
    return {"O": acc * r + b * 2.0}


@epilogue(result=Tile)
def renamed(acc, scale: ColVector, bias: RowVector):
    two = 2.0
    product = acc * scale
    return {"result": product + bias * two}


@epilogue(O=Tile)
def with_dead_code(acc, r: ColVector, b: RowVector):
    _ = acc - 17.0
    return {"O": 2 * b + r * acc}


@pytest.mark.parametrize("other", [renamed, with_dead_code], ids=lambda p: p.name)
def test_same_computation_same_digest(other: Program) -> None:
    assert other.digest == base.digest


DIFFERENT: dict[str, tuple[type, Callable[..., Any], Callable[..., Any]]] = {
    "a constant": (Tile, lambda acc, r: {"O": acc * r + 2.0}, lambda acc, r: {"O": acc * r + 2.0000000000000004}),
    "operands in order": (Tile, lambda acc, r, b: {"O": acc * r + b}, lambda acc, b, r: {"O": acc * r + b}),
    "an operation": (Tile, lambda acc, r: {"O": acc + r}, lambda acc, r: {"O": acc - r}),
    "kinds of operands": (Tile, lambda acc, r: {"O": acc * r}, lambda acc, b: {"O": acc * b}),
    "the order of what does not commute": (Tile, lambda acc, C: {"O": acc - C}, lambda acc, C: {"O": C - acc}),
    "which of two like operands": (Tile, lambda acc, p, q: {"O": acc * p + q}, lambda acc, p, q: {"O": acc * q + p}),
    "lanes of a pair": (
        HalfTile,
        lambda acc: {"O": swiglu(*pairs(acc))},
        lambda acc: {"O": swiglu(*reversed(pairs(acc)))},
    ),
    "lanes of a wide tile": (
        WideTile,
        lambda acc, Z: {"O": interleave(*[acc * x for x in pairs(Z)])},
        lambda acc, Z: {"O": interleave(*[acc * x for x in reversed(pairs(Z))])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("of", DIFFERENT)
def test_different_computation_different_digest(of: str) -> None:
    kind, first, second = DIFFERENT[of]
    assert program(first, O=kind).digest != program(second, O=kind).digest


def test_digest_is_a_sha256_and_does_not_change_between_runs() -> None:
    @epilogue(O=Tile)
    def identity(acc):
        return {"O": acc}

    # Evidence of accepted kernels records digests: changing this value orphans them.
    assert identity.digest == IDENTITY_DIGEST


IDENTITY_DIGEST = "6a34b2195ea119016cfce5439ca7d6f380ed356429fbc5eb7f84e1cc4327f144"


def test_order_and_kind_of_outputs_matter() -> None:
    def values(acc) -> dict[str, Any]:
        return {"D": acc + 1.0, "O": acc * acc}

    digests = {
        epilogue(D=Tile, O=Tile)(values).digest,
        epilogue(O=Tile, D=Tile)(values).digest,
        epilogue(D=Tile, O=RowSum)(values).digest,
        epilogue(D=Tile, O=RowMean)(values).digest,
    }
    assert len(digests) == 4


def test_kinds_of_one_shape_differ() -> None:
    """Each pair computes one value from one shape; what becomes of it, or how it is read, differs."""

    def product(acc, C: Tile):
        return {"O": acc * C}

    def by_table(acc, C: HeadTable):
        return {"O": acc * C}

    digests = {
        epilogue(O=Tile)(product).digest,
        epilogue(O=AddTile)(product).digest,
        epilogue(O=Tile)(by_table).digest,
        epilogue(O=AddTile)(by_table).digest,
    }
    assert len(digests) == 4


@epilogue(D=Tile, O=HalfTile, s=RowMean)
def everything(acc, C: Tile, r: ColVector, b: RowVector, beta: Scalar):
    """One of each."""
    d = maximum(acc * r + b, -3.5) + beta * C
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up), "s": d * d}


@epilogue(dZ=WideTile, O=Tile, t=RowGather)
def widened(acc, Z: WideTile, y: ColIndex):
    """A saved gate, its gradients."""
    gate, up = pairs(Z)
    return {"dZ": interleave(acc * up, acc * gate), "O": gate * up, "t": gather(acc, y)}


@epilogue(X=AddTile, O=Tile)
def accumulating(acc, cs: HeadTable, C: Tile):
    """A table, a sum in place."""
    return {"X": acc * cs, "O": C - acc}


@pytest.mark.parametrize(
    ("program", "doc"),
    [
        (everything, "One of each."),
        (widened, "A saved gate, its gradients."),
        (accumulating, "A table, a sum in place."),
    ],
    ids=lambda x: x.name if isinstance(x, Program) else "",
)
def test_round_trip_through_json(program: Program, doc: str) -> None:
    data = json.loads(json.dumps(program.to_dict()))
    back = Program.from_dict(data)
    assert back.digest == program.digest
    assert back.doc == doc
    assert (back.name, back.wide) == (program.name, program.wide)
    assert (back.paired, back.accumulated) == (program.paired, program.accumulated)
    assert list(back.operands.items()) == list(program.operands.items())
    assert list(back.outputs.items()) == list(program.outputs.items())
    assert back.graph.nodes == program.graph.nodes
    assert back.graph.outputs == program.graph.outputs
    assert back.to_dict() == program.to_dict()


def test_infinite_constants_survive_json() -> None:
    @epilogue(O=Tile)
    def program(acc):
        return {"O": maximum(acc, float("-inf"))}

    assert Program.from_dict(json.loads(json.dumps(program.to_dict()))).digest == program.digest


def test_from_dict_refuses_an_unknown_operation() -> None:
    data = everything.to_dict()
    data["nodes"][-1][0] = "system"
    with pytest.raises(ProgramError) as error:
        Program.from_dict(data)
    assert str(error.value) == "unknown operation 'system' in a serialised program"


@pytest.mark.parametrize("edge", [1, 2, 99, -1])
def test_from_dict_refuses_an_edge_that_does_not_point_backwards(edge: int) -> None:
    data = {
        "name": "loop",
        "doc": "",
        "operands": {},
        "outputs": {"O": ["Tile", 1]},
        "nodes": [["acc", [], "TILE", "", 0.0], ["neg", [edge], "TILE", "", 0.0]],
    }
    with pytest.raises(ProgramError) as error:
        Program.from_dict(data)
    assert str(error.value) == "operation 'neg' refers to a value that does not precede it"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("nodes", 0, 2), "HALF"),  # a shape its arguments do not give
        (("nodes", 0, 3), "../../x"),
        (("nodes", 0, 4), "x"),
        (("name",), "../../x"),
        (("name",), None),
        (("outputs", "O", 0), "HalfTile"),  # a kind its value does not have
        (("outputs", "O", 1), -1),
        (("outputs", "O", 1), True),
        (("operands", "r"), "RowSum"),
        (("operands", "unused"), "Tile"),
        (("nodes",), [["const", [], "SCALAR", "", 1.0]]),
        (("nodes",), {"0": "acc"}),
    ],
)
def test_from_dict_refuses_a_forged_record(path: tuple[Any, ...], value: Any) -> None:
    @epilogue(O=Tile)
    def scaled(acc: Any, r: ColVector) -> Any:
        return {"O": acc * r}

    data: Any = json.loads(json.dumps(scaled.to_dict()))
    assert Program.from_dict(data).digest == scaled.digest
    *outer, last = path
    target = data
    for key in outer:
        target = target[key]
    target[last] = value
    with pytest.raises(ProgramError):
        Program.from_dict(data)


def test_a_program_of_too_many_operations_is_refused() -> None:
    with pytest.raises(ProgramError, match="at most 512"):

        @epilogue(O=Tile)
        def long(acc: Any) -> Any:
            x = acc
            for i in range(600):
                x = x * acc + float(i)
            return {"O": x}
