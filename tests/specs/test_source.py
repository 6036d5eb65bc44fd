"""A user's function as a reference block: what comes along, and what is refused, where."""

from pathlib import Path
from typing import Any

import pytest

from coda_agent.primitives.errors import SpecError
from coda_agent.specs.source import Source, extracted, located

MODULE = '''\
"""A model."""
import math, os
import torch.nn.functional as F
from torch import Tensor, nn
from einops import rearrange
print("what a module does when it is imported")
EPS = 1e-6
SCALE: float = 1 / math.sqrt(128)

def act(x):
    # silu, scaled
    return F.silu(x) * SCALE

@torch.compile
def ffn_gate(x: Tensor, w: "N K", b=None, *, eps: float = EPS) -> Tensor:
    """The gate of an FFN.

    More.
    """
    y = act(x @ w.T + eps)
    return y, [act(z) for z in (y,)]

def make(scale):
    def inner(x, w):
        return x @ w.T * scale
    return inner

def permuted(x, w):
    return rearrange(x @ w.T, "a b -> b a")

class Block(nn.Module):
    def forward(self, x):
        return x

def built(x):
    return Block()(x)

def again(x):
    return again(x)

def reads(x):
    return x + open(x)

def wide(*xs):
    return xs

if EPS:
    late = 3

def lately(x):
    return x * late
'''


def test_a_function_takes_along_what_it_needs() -> None:
    source = extracted(MODULE, "model.py", "ffn_gate")
    assert source.block == (
        "from __future__ import annotations\n\nimport math\n\nimport torch.nn.functional as F\n\n"
        "EPS = 1e-6\nSCALE: float = 1 / math.sqrt(128)\n\n\n"
        "def act(x):\n    # silu, scaled\n    return F.silu(x) * SCALE\n\n\n"
        'def reference(x: Tensor, w: "N K", b=None, *, eps: float = EPS) -> Tensor:\n'
        '    """The gate of an FFN.\n\n    More.\n    """\n'
        "    y = act(x @ w.T + eps)\n    return y, [act(z) for z in (y,)]\n"
    )
    of, to = MODULE.splitlines(), source.block.splitlines()
    for line, number in zip(to, source.lines, strict=True):
        own = line.replace("def reference", "def ffn_gate")
        assert not number or own == of[number - 1] or line.startswith("import")
    assert (source.name, source.summary, source.returned) == (
        "ffn_gate", "The gate of an FFN.", ()
    )  # fmt: skip
    facts = [(a.name, a.default, a.axes) for a in source.arguments]
    assert facts == [
        ("x", False, None),
        ("w", False, ("N", "K")),
        ("b", True, None),
        ("eps", True, ()),
    ]


def test_a_constant_may_hold_functions() -> None:
    text = "def act(x):\n    return x.relu()\n\nACTS = {'relu': act}\n\n"
    source = extracted(f"{text}def f(x, w, kind='relu'):\n    return ACTS[kind](x @ w.T)\n", "m.py")
    space: dict[str, Any] = {}
    exec(source.block, space)
    assert space["ACTS"] == {"relu": space["act"]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("make.inner", "model.py:24: inner is within the function make (write it as a plain"),
        ("inner", "model.py:24: inner is within the function make"),
        ("Block.forward", "model.py:32: forward is within the class Block"),
        ("ffn_gat", "no function 'ffn_gat' in model.py (did you mean ffn_gate?)"),
        ("permuted", "model.py:5: permuted uses rearrange, of einops; a reference stands on torch"),
        ("built", "model.py:31: built uses Block, a class (only imports, functions and constants"),
        ("again", "model.py:38: again calls again again (write a loop)"),
        ("reads", "model.py:41: reads calls open (a reference computes with its arguments"),
        ("wide", "model.py:44: wide takes xs by * or /"),
        ("lately", "model.py:47: lately uses late, no plain definition"),
    ],
)
def test_what_does_not_stand_alone_is_refused(function: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        extracted(MODULE, "model.py", function)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello world", "stdin is no Python: invalid syntax, line 1"),
        ("\0", "stdin is no Python: "),
        ("(" * 1000, "stdin is no Python: "),
        ("x = 3", "stdin defines no function (expected `def ...`)"),
        ("", "stdin defines no function"),
        ("def f(x):\n    return g(x)", "stdin:1: f uses g, which stdin does not define"),
        ("async def f(x):\n    return x", "stdin defines no function"),
        ('def f(x):\n    """\n```\n"""\n    return x', "stdin:3: ``` ends a block of Markdown"),
    ],
)
def test_a_paste_that_is_no_function(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        extracted(text, "stdin")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def only(text: str) -> Source:
    return extracted(text, "stdin")


def test_a_paste_may_be_indented_and_fenced() -> None:
    text = "Here it is:\n```python\n    def g(x):\n        return x\n\n    def f(x):\n        return g(x)\n```\n"
    source = only(text)
    assert source.name == "f" and source.block.startswith(
        "def g(x):\n    return x\n\n\ndef reference"
    )


@pytest.mark.parametrize(
    ("annotation", "axes", "dtype"),
    [
        ('Float[Tensor, "M K"]', ("M", "K"), ""),
        ('jaxtyping.Int32[Tensor, "4096"]', (4096,), "int32"),
        ("Annotated[Tensor, 4096, 128]", (4096, 128), ""),
        ('"4096, 128"', (4096, 128), ""),
        ('"4096x128"', (4096, 128), ""),
        ("float", (), "float32"),
        ('"Tensor"', None, ""),
        ("torch.Tensor", None, ""),
        ("dict[str, int]", None, ""),
    ],
)
def test_annotations_give_shapes(annotation: str, axes: Any, dtype: str) -> None:
    (argument,) = only(f"def f(x: {annotation}):\n    return x").arguments
    assert (argument.axes, argument.dtype) == (axes, dtype)


def test_a_module_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "layers"
    package.mkdir()
    for file in (package / "__init__.py", package / "ffn.py"):
        file.write_text("raise SystemExit('it was imported')\ndef f(x): return x\n")
    monkeypatch.chdir(tmp_path)
    assert located("layers.ffn:f") == (package / "ffn.py", "f")
    assert located("layers:f") == (package / "__init__.py", "f")
    assert located("layers/ffn.py:f") == (Path("layers/ffn.py"), "f")
    for target, message in {
        "layers.absent:f": "no module 'layers.absent'",
        "math:sin": "no module 'math' with Python source",
        "absent.py:f": "no file at absent.py",
        "layers/fn.py:f": "no file at layers/fn.py (did you mean ffn.py?)",
        "layers": "'layers' names no function",
        ":f": "':f' names no function",
    }.items():
        with pytest.raises(SpecError) as caught:
            located(target)
        assert str(caught.value).startswith(message)
