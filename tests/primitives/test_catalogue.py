"""The vocabulary as an author sees it: complete, and every example runs."""

import re
import subprocess
import sys
from textwrap import dedent, indent

import pytest

import coda_agent.primitives as vocabulary
from coda_agent.primitives.catalogue import KINDS, Entry, entries
from coda_agent.primitives.reader import read_programs

ENTRIES = entries()
EXAMPLES_OF = ("load", "load, store", "store", "reduction", "pairwise", "select", "extension")
COMPOSITES = (
    "clamp", "derivative", "geglu", "glu", "hard_swish", "leaky_relu", "mish", "quick_gelu",
    "reglu", "relu", "relu_squared", "silu", "swiglu", "swiglu_oai",
)  # fmt: skip


def example(entry: Entry) -> str:
    """The last code of a docstring, dedented; an empty string where there is none."""
    code = (part for part in reversed(entry.doc.split("\n\n")) if 'return {"' in part)
    return dedent(next(code, ""))


def as_program(code: str) -> str:
    """A whole definition as it is; a fragment as the body of a program with a bias or an index."""
    if code.startswith("@epilogue"):
        return code
    if "gather(" in code:
        return f"@epilogue(Z=Tile, target=RowGather)\ndef fragment(acc, y: ColIndex):\n{indent(code, '    ')}"
    operand = ", bias: RowVector" if "bias" in code else ""
    kind = "HalfTile" if "pairs(" in code and "interleave(" not in code else "Tile"
    return f"@epilogue(O={kind})\ndef fragment(acc{operand}):\n{indent(code, '    ')}"


WITH_EXAMPLE = [e for e in ENTRIES if example(e)]


def test_every_name_has_an_entry() -> None:
    assert sorted([*(e.name for e in ENTRIES), "Program"]) == sorted(vocabulary.__all__)
    assert list(vocabulary.__all__) == sorted(vocabulary.__all__)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_entry(entry: Entry) -> None:
    assert entry.summary == entry.doc.split("\n")[0] != ""
    assert entry.signature.startswith(entry.name)
    if entry.kind in EXAMPLES_OF or entry.name in COMPOSITES:
        assert example(entry), "no example"


@pytest.mark.parametrize("entry", WITH_EXAMPLE, ids=lambda e: e.name)
def test_example_traces_and_uses_what_it_shows(entry: Entry) -> None:
    code = as_program(example(entry))
    assert entry.name in code
    names = {*re.findall(r"\w+", code)} & {*vocabulary.__all__}
    imports = f"from coda_agent.primitives import {', '.join(sorted(names))}\n"
    assert len(read_programs(imports + code)) == 1


def test_kinds() -> None:
    kind = {e.name: e.kind for e in ENTRIES}
    assert kind["epilogue"] == "program"
    assert kind["Tile"] == "load, store"
    assert {kind[n] for n in ("ColIndex", "ColVector", "RowVector", "Scalar")} == {"load"}
    assert {kind[n] for n in ("HalfTile", "RowGather")} == {"store"}
    reductions = ("RowSum", "RowMean", "RowMax", "RowMin", "RowLogSumExp", "ColSum", "ColMax")
    assert {kind[n] for n in reductions} == {"reduction"}
    assert kind["gather"] == "select"
    assert {kind[n] for n in ("pairs", "interleave", "rotary", "rotate")} == {"pairwise"}
    assert {kind[n] for n in (*COMPOSITES, "exp", "gelu_tanh")} == {"elementwise"}


def test_signatures() -> None:
    signature = {e.name: e.signature for e in ENTRIES}
    assert signature["clamp"] == "clamp(x, low, high)"
    assert signature["leaky_relu"] == "leaky_relu(x, slope=0.01)"
    assert signature["maximum"] == "maximum(x, y)"
    assert signature["epilogue"] == "epilogue(**outputs)"
    assert signature["derivative"] == "derivative(fn, *args, wrt=0)"
    assert signature["RowSum"] == "RowSum"


def test_loads_and_stores_come_first() -> None:
    order = list(dict.fromkeys(e.kind for e in ENTRIES))
    assert order == list(KINDS)
    assert order == [
        "program", "load", "load, store", "store", "pairwise", "group", "select", "reduction",
        "elementwise", "extension",
    ]  # fmt: skip


def test_importing_the_language_imports_neither_torch_nor_cutlass() -> None:
    code = (
        "import sys; import coda_agent.primitives; from coda_agent.primitives import catalogue; "
        "catalogue.entries(); print({'torch', 'cutlass', 'quack', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
