"""The candidate language: what the static gate admits and refuses."""

from __future__ import annotations

import pytest

from coda_agent.agent.judge.static import check_source

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
    return "\n".join(f"{f.message} {f.hint}" for f in check_source(text, expected or ["k"]))


def test_a_candidate_in_the_language_is_admitted() -> None:
    assert check_source(GOOD, ["k"]) == []


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
        (BODY, "    d = acc[0]\n", "not in the candidate language"),
        (BODY, "    d = (lambda: acc)()\n", "only functions of the vocabulary may be called"),
        (BODY, "    d = [acc for acc in acc]\n", "not in the candidate language"),
        (BODY, "    d = __import__('os')\n", "unknown name '__import__'"),
        (BODY, "    d = open('x')\n", "unknown name 'open'"),
        (BODY, "    import os\n    d = acc\n", "a program's body is assignments"),
        (BODY, "    for i in r: pass\n    d = acc\n", "a program's body is assignments"),
        (BODY, "    if r: d = acc\n", "a program's body is assignments"),
        (BODY, "    global d\n    d = acc\n", "a program's body is assignments"),
        (BODY, "    d = acc if r else acc\n", "not in the candidate language"),
        (BODY, "    d = f'{acc}'\n", "not in the candidate language"),
        (BODY, "    d = (acc, r)\n", "tuples may only be unpacked into"),
        (BODY, "    d = swiglu(*r)\n", "not in the candidate language"),
        (BODY, "    d = swiglu(**r)\n", "** is not in the candidate language"),
        (BODY, "    d = acc * None\n", "constant None is not a number"),
        (BODY, "    __d = d = acc\n", "only plain names may be assigned"),
        (BODY, "    d = acc; d.x = r\n", "only plain names may be assigned"),
        ("r: ColVector)", "r: ColVector = 1)", "no defaults"),
        ("r: ColVector)", "*r: ColVector)", "parameters must be plain"),
        ("r: ColVector)", "r: open('x'))", "unknown name 'open'"),
        ("@epilogue(D=Tile, O=HalfTile)", "", "decorated with @epilogue"),
        ("@epilogue(D=Tile", "@epilogue(D=open('x')", "unknown name 'open'"),
        ("def k", "def other", "one program named 'k', found 0"),
        ("def k", "class X: pass\ndef k", "only imports and @epilogue"),
        ("    d = acc * r", "    d = acc *", "not Python"),
        ("def k", "async def k", "only imports and @epilogue"),
    ],
)
def test_everything_else_is_refused(old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert said in messages(GOOD.replace(old, new, 1))


def test_findings_name_the_line() -> None:
    (finding,) = check_source(GOOD.replace(BODY, "    d = open('x')\n"), ["k"])
    assert finding.where == {"line": 8}


def test_an_extra_program_is_refused() -> None:
    extra = GOOD + GOOD.split("\n\n\n")[1].replace("def k", "def extra")
    assert "'extra' is not asked for" in messages(extra)


def test_a_huge_candidate_is_refused() -> None:
    text = GOOD.replace(BODY, "    d = " + " + ".join(["acc"] * 8000) + "\n")
    assert "syntax nodes" in messages(text) or "not Python" in messages(text)
