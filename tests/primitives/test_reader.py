"""The candidate language: what is read, what is refused, and that reading is all that happens."""

from __future__ import annotations

import pytest

from coda_agent.primitives import ColVector, Tile, epilogue, exp
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.syntax import program_names
from tests.programs import faults

GOOD = '''"""A candidate."""
from coda_agent.primitives import ColVector, HalfTile, Tile, epilogue, pairs, swiglu


@epilogue(D=Tile, O=HalfTile)
def k(acc, r: ColVector):
    """Doc."""
    d = acc * r
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up)}
'''


def messages(text: str, expected: list[str] | None = None) -> str:
    return "\n".join(f"{f.message} {f.hint}" for f in faults(text, expected or ["k"]))


def test_a_candidate_in_the_language_is_admitted() -> None:
    assert faults(GOOD, ["k"]) == []


BODY = "    d = acc * r\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("from coda_agent", "import os\nfrom coda_agent", "only imports and @epilogue functions"),
        ("from coda_agent.primitives", "from os", "only `from coda_agent.primitives import"),
        ("from coda_agent.primitives", "from coda_agent.primitives.ops", "only `from coda_agent"),
        ("swiglu\n\n", "swigloo\n\n", "'swigloo' is not a name of the vocabulary"),
        ("swiglu\n\n", "swiglu as s\n\n", "not a name of the vocabulary"),
        (BODY, "    d = acc.graph\n", "not in the candidate language"),
        (BODY, "    d = (lambda: acc)()\n", "only functions of the vocabulary may be called"),
        (BODY, "    d = [acc for acc in acc]\n", "not in the candidate language"),
        (BODY, "    d = open('x')\n", "unknown name 'open'"),
        (BODY, "    import os\n    d = acc\n", "a program's body is assignments"),
        (BODY, "    d = acc if r else acc\n", "not in the candidate language"),
        (BODY, "    d = (acc, r)\n", "tuples may only be unpacked into"),
        (BODY, "    d = swiglu(**r)\n", "may be called, without **"),
        (BODY, "    d = acc * None\n", "constant is not a number"),
        (BODY, "    d = acc * 'r'\n", "constant is not a number"),
        (BODY, "    d = acc * 1e39\n", "constant is beyond float32"),
        (BODY, f"    d = acc * 0x{'f' * 5000}\n", "constant is beyond float32"),
        (BODY, "    d = acc * swiglu\n", "'swiglu' is not a value"),
        (BODY, "    d = Tile(acc, 0)\n", "only functions of the vocabulary may be called"),
        (BODY, "    __d = d = acc\n", "the name '__d' is not free"),
        (BODY, "    pairs = d = acc\n", "the name 'pairs' is not free"),
        (BODY, "    d += acc\n", "a program's body is assignments"),
        (BODY, "    return {}\n    d = acc\n", "a program's body is assignments"),
        (BODY, "    d = acc; d.x = r\n", "only plain names may be assigned"),
        ("r: ColVector)", "r: ColVector = 1)", "parameters are plain, without defaults"),
        ("r: ColVector)", "*r: ColVector)", "parameters are plain"),
        ("r: ColVector)", "r: ColVector) -> open('x')", "no type is returned"),
        ("r: ColVector)", "r: open('x'))", "declared by their kind"),
        ("r: ColVector)", "r: HalfTile)", "declared by their kind: `HalfTile` one of Tile, HeadTable"),
        ("r: ColVector)", "pairs: ColVector)", "the name 'pairs' is not free"),
        ("@epilogue(D=Tile, O=HalfTile)", "", "decorated with @epilogue"),
        ("@epilogue(D=Tile", "@epilogue(D=open('x')", "declared by their kind"),
        ("@epilogue(D=Tile", "@epilogue(**{'D': Tile}", "the name '__' is not free"),
        ("@epilogue(D=Tile", "@epilogue(__D=Tile", "the name '__D' is not free"),
        ("@epilogue(D=Tile", "@epilogue(D=ColVector", "declared by their kind"),
        ("@epilogue(D=Tile, O=HalfTile)", "@swiglu\n@epilogue(D=Tile)", "and nothing else"),
        ('{"D": d', "{**d", "outputs are returned by their names"),
        ('{"D": d', '{"O": d', "by their names, each once"),
        ("def k", "def other", "one program named 'k', found 0"),
        ("def k", "class X: pass\ndef k", "only imports and @epilogue"),
        ("    d = acc * r", "    d = acc *", "not Python"),
        ("def k", "async def k", "only imports and @epilogue"),
    ],
)  # fmt: skip
def test_everything_else_is_refused(old: str, new: str, said: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    assert said in messages(text)
    for finding in faults(text, ["k"]):
        assert finding.hint and "\n" not in finding.message
        assert 1 <= finding.line <= text.count("\n") + 1


def test_findings_name_the_line() -> None:
    (finding,) = faults(GOOD.replace(BODY, "    d = open('x')\n"), ["k"])
    assert finding.line == 8
    (finding,) = faults(GOOD.replace("\n", "\r\n").replace("acc * r", "acc @ r"), ["k"])
    assert finding.line == 8 and finding.message.endswith("`acc @ r`")


def test_an_extra_program_is_refused() -> None:
    extra = GOOD + GOOD.split("\n\n\n")[1].replace("def k", "def extra")
    assert "'extra' is not asked for" in messages(extra)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    d = " + " + ".join(["acc"] * 8000), "characters, at most 40000"),
        ("    d = " + "+".join(["acc"] * 500), "too long or too deep"),
        ("    d = " + "-" * 30_000 + "acc", "too long or too deep"),
        ("    d = " + "(" * 33 + "acc" + ")" * 33, "too long or too deep"),
        ("    d = acc\n" + "    d = d + 1.5\n" * 200, "over 1000 syntax nodes"),
    ],
)
def test_a_huge_candidate_is_refused(body: str, said: str) -> None:
    assert said in messages(GOOD.replace(BODY, f"{body}\n"))


def test_what_is_well_below_the_bounds_is_admitted() -> None:
    sums = "    d = acc * r\n" + "    d = (((d + 1.5 * (acc - 2)))) / -3\n" * 30
    assert faults(GOOD.replace(BODY, sums), ["k"]) == []
    assert faults(GOOD.replace("\n", "\r\n"), ["k"]) == []


def test_findings_are_few_however_long_the_text() -> None:
    text = GOOD + "import os\n" * 3000
    assert len(faults(text, ["k"])) == 20


def test_names_of_programs_are_read_and_nothing_is_made_of_hostile_text() -> None:
    assert program_names(GOOD) == ["k"]
    for text in ("def k(", "x = " + "-" * 100_000 + "1", "x = '\ud800'", "\0"):
        assert program_names(text) == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('ptx("asinh", "tanh.approx.f32 $0, $1;", acc)', None),
        ('ptx("asinh", acc, "tanh.approx.f32 $0, $1;")', "ptx() takes two texts first, its meaning and its code"),
        ('ptx("asinh", "tanh.approx.f32 $0, $1;", acc, "x")', "constant is not a number"),
        ('ptx("asinh", code="tanh.approx.f32 $0, $1;")', "ptx() takes two texts first, its meaning and its code"),
        ('ptx("asinh", f"{acc}", acc)', "ptx() takes two texts first, its meaning and its code"),
        ('exp("asinh", "tanh.approx.f32 $0, $1;", acc)', "constant is not a number"),
    ],
)  # fmt: skip
def test_texts_stand_only_where_ptx_takes_them(call: str, said: str | None) -> None:
    text = f"""from coda_agent.primitives import Tile, epilogue, exp, ptx


@epilogue(O=Tile)
def kernel(acc):
    return {{"O": {call}}}
"""
    found = [f.message.partition(":")[0] for f in faults(text, ["kernel"])]
    assert found == ([said] if said else [])


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("x = maximum(acc, (acc)", "not Python: '(' is never closed", "close it"),
        ("x = maximum(acc, acc))", "not Python: ')' closes nothing", "take it out, or open it before"),
        ("x = maximum(acc, acc]", "not Python: '(' is closed by ']'", "close it before"),
        ("x = interleave(*rotate(acc, acc, acc, acc))", "* does not unpack here", "write u, v = rotate(...)"),
        ("x = acc.relu()", "a value has no methods", "write relu(...)"),
        ("x = acc ** 2", "not in the candidate language", "write x * x, or power(x, y)"),
        ("x = acc > 2", "not in the candidate language", "greater(x, y), greater_equal and equal give 1 or 0"),
        ("x = acc if 1 else acc", "not in the candidate language", "write where(condition, x, y)"),
    ],
)  # fmt: skip
def test_usual_slips_are_named_with_their_line_and_what_to_write(
    line: str, said: str, hint: str
) -> None:
    text = f"""from coda_agent.primitives import Tile, epilogue, interleave, maximum, rotate


@epilogue(O=Tile)
def kernel(acc):
    {line}
    y = acc
    return {{"O": y}}
"""
    (found,) = faults(text, ["kernel"])
    message = found.message if "Python" in said else found.message.partition(": `")[0]
    assert (message, found.line, found.hint) == (said, 6, hint)


HEAD = """from coda_agent.primitives import (
    ColVector, HalfTile, Tile, epilogue, exp, group_sum, log, pairs, silu
)


"""


def body(*lines: str, declared: str = "O=Tile", parameters: str = "acc, r: ColVector") -> str:
    text = "".join(f"    {line}\n" for line in lines)
    return f"{HEAD}@epilogue({declared})\ndef k({parameters}):\n{text}"


@pytest.mark.parametrize(
    ("lines", "line", "said"),
    [
        (["h, _ = pairs(acc)", 'return {"O": acc + h * r}'], 9, "add mixes a full-width value with a half-width one: `acc + h * r`"),
        (["d = silu(acc, r)", 'return {"O": d}'], 8, "silu() takes 1 positional argument but 2 were given: `silu(acc, r)`"),
        (["d = exp(acc, r)", 'return {"O": d}'], 8, "exp(): too many positional arguments: `exp(acc, r)`"),
        (["d = silu(y=acc)", 'return {"O": d}'], 8, "silu() got an unexpected keyword argument 'y': `silu(y=acc)`"),
        (["d = silu(x=acc, x=r)", 'return {"O": d}'], 8, "an argument is given twice: `silu(x=acc, x=r)`"),
        (["d = 1 / 0 * acc", 'return {"O": d * r}'], 8, "division by zero: `1 / 0`"),
        (["d = acc / 0", 'return {"O": d * r}'], 8, "division by the constant 0: `acc / 0`"),
        (["d = group_sum(acc, 65)", 'return {"O": d * r}'], 8, "group_sum(): width is 65, expected one of (4, 8, 16, 32, 64, 128): `group_sum(acc, 65)`"),
        (["d = 3e38 * 10", "e = 300000000000000000000000000000000000000 * 10", 'return {"O": acc * r}'], 9, "constant is beyond float32: `300000000000000000000000000000000000000 * 10`"),
        (["d, e, f = pairs(acc)", 'return {"O": d * r}'], 8, "3 names for 2 values: `d, e, f`"),
        (["d, e = acc", 'return {"O": d * r}'], 8, "2 names for 1 value: `d, e`"),
        (["d = silu(pairs(acc))", 'return {"O": d * r}'], 8, "2 values stand where one is taken: `silu(pairs(acc))`"),
        (['return {"O": pairs(acc)}'], 7, "k: output 'O' is tuple, expected a value"),
        (['return {"O": acc}'], 7, "k: operand 'r' is never used"),
        (['return {"O": r}'], 7, "k: output 'O' is declared Tile but its value is (M, 1)"),
        (['return {"D": acc * r}'], 7, "k: output 'O' is declared but never written"),
    ],
)  # fmt: skip
def test_a_program_that_breaks_a_rule_is_refused_on_its_line(
    lines: list[str], line: int, said: str
) -> None:
    (fault,) = faults(body(*lines), ["k"])
    assert fault.line == line and fault.message.startswith(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"declared": ""}, "@epilogue declares no output: `def k(acc, r: ColVector):`"),
        ({"declared": "O=Tile, O=HalfTile"}, "the name 'O' is not free: `O=HalfTile`"),
        ({"parameters": "acc, r: ColVector, r: Tile"}, "the name 'r' is not free: `r: Tile`"),
        ({"parameters": "r: ColVector"}, "k: the first parameter must be acc, the accumulator"),
        ({"parameters": "acc, r"}, "k: operand 'r' is annotated nothing, expected one of Tile"),
        ({"declared": "r=Tile"}, "k: 'r' is an operand and an output"),
    ],
)
def test_what_is_declared_wrongly_is_refused(given: dict[str, str], said: str) -> None:
    (fault,) = [f for f in faults(body('return {"O": r}', **given), ["k"]) if "unknown" not in f[0]]
    assert fault.message.startswith(said)


def test_every_fault_is_told_once_and_none_that_follows_from_another() -> None:
    lines = ["d = acc ** 2", "e = d + open(r)", "f, g = pairs(e * h)", 'return {"O": silu(f) + g}']
    found = [(fault.line, fault.message.partition(":")[0]) for fault in faults(body(*lines), ["k"])]
    assert found == [
        (8, "not in the candidate language"), (9, "unknown name 'open'"), (10, "unknown name 'h'"),
    ]  # fmt: skip


def test_it_computes_what_python_would() -> None:
    lines = ["a = b = acc * (2 + 3 * 4 - 6 / 4)", "d = 1.5 / b - a", "b = exp(x=d) * (+7 / -2)"]
    read = read_programs(body(*lines, 'return {"O": b * r}'))["k"]

    @epilogue(O=Tile)
    def k(acc, r: ColVector):
        a = b = acc * (2 + 3 * 4 - 6 / 4)
        d = 1.5 / b - a
        b = exp(x=d) * (+7 / -2)
        return {"O": b * r}

    assert read.to_dict() == k.to_dict() and read.digest == k.digest
    assert sorted(n.value for n in read.graph.nodes if n.op == "const") == [-3.5, 1.5, 12.5]


def test_infinity_is_a_number_that_is_computed() -> None:
    program = read_programs(body('return {"O": acc * r + log(0.0)}'))["k"]
    assert [n.value for n in program.graph.nodes if n.op == "const"] == [float("-inf")]


def test_the_deepest_statement_that_is_read_is_evaluated() -> None:
    signs = "-" * 390
    program = read_programs(body(f"d = {signs}acc", 'return {"O": d * r}'))["k"]
    assert [n.op for n in program.graph.nodes].count("neg") == 390


def test_programs_come_in_the_order_that_is_asked_for() -> None:
    first = body('return {"O": acc * r}')
    text = first + first.replace(HEAD, "\n\n").replace("def k", "def j")
    assert [*read_programs(text)] == ["k", "j"] and [*read_programs(text, ["j", "k"])] == ["j", "k"]
    assert faults(first + first.replace(HEAD, ""), ["k"])[-1].message.endswith("found 2")


@pytest.mark.parametrize("name", ["swigloo", "Program", "silu as s"])
def test_a_name_that_may_not_be_imported_is_refused_once(name: str) -> None:
    called = name.partition(" ")[0]
    text = body(f"d = {called}(acc)", 'return {"O": d * r}').replace("silu\n)", f"{name}\n)")
    (fault,) = faults(text, ["k"])
    assert fault.message.startswith(f"{called!r} is not a name of the vocabulary")
