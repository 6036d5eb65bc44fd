"""`coda-agent spec`, and what runs of a user's: in a child, and nowhere else."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coda_agent.agent import references, workspace
from coda_agent.agent.cli import app
from coda_agent.agent.execution import confinement
from coda_agent.primitives.errors import SpecError
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.draft import Example
from coda_agent.specs.names import reached
from coda_agent.specs.source import extracted

MODULE = """\
import pathlib
import torch

pathlib.Path("ran").touch()

def ffn_gate(x, w, b, scale=0.5):
    return torch.relu(x @ w.T + b) * scale

def make():
    def inner(x, w):
        return x @ w.T
    return inner
"""
SHAPES = ["--shape", "x=4096,4096", "--shape", "w=14336,4096", "--shape", "b=14336"]
runner = CliRunner()


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    made, _ = workspace.init(tmp_path / "kernels")
    (made.root / "my_model.py").write_text(MODULE)
    monkeypatch.chdir(made.root)
    return made


def test_from_a_function_to_a_spec(where: workspace.Workspace) -> None:
    done = runner.invoke(app, ["spec", "my_model:ffn_gate", *SHAPES, "--json"])
    assert done.exit_code == 0, done.output
    assert not Path("ran").exists()
    said = json.loads(done.stdout)
    assert said["inputs"] == {"x": ["M", "K"], "w": ["N", "K"], "b": ["N"]}
    spec = load_spec(where.specs / "ffn_gate.md")
    assert said["digest"] == spec.digest and spec.bench_shapes == (
        {"M": 4096, "N": 14336, "K": 4096},
    )
    again = runner.invoke(app, ["spec", "my_model:ffn_gate", *SHAPES])
    assert (
        again.exit_code == 2
        and "is there already (give another name, or overwrite it)" in again.output
    )
    checked = runner.invoke(app, ["check", "specs/ffn_gate.md"])
    assert checked.exit_code == 0, checked.output
    assert "ffn_gate.md: x [M, K], w [N, K], b [N] -> out [M, N]" in checked.output
    flat = spec.text.replace("* scale\n", "* 0\n")
    spec.path.write_text(flat)
    refused = runner.invoke(app, ["check", "specs/ffn_gate.md"])
    assert refused.exit_code == 2 and "output 'out' is all zero" in refused.output


def test_a_function_that_is_called_like_a_primitive(where: workspace.Workspace) -> None:
    text = "import torch\ndef swiglu(x, w):\n    a, b = (x @ w.T).chunk(2, -1)\n"
    text += "    return torch.nn.functional.silu(a) * b"
    given = ["--shape", "x=64,64", "--shape", "w=64,64"]
    done = runner.invoke(app, ["spec", "-", *given], input=text)
    assert done.exit_code == 0, done.output
    assert [x.stem for x in where.specs.glob("*.md")] == ["gemm_swiglu"]
    assert "a primitive is called swiglu: --name gives another than gemm_swiglu" in done.output


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        (["my_model:ffn_gat", *SHAPES], "", "no function 'ffn_gat' in "),
        (["absent:f"], "", "no module 'absent' with Python source"),
        (["absent.py:f"], "", "no file at absent.py"),
        (["my_model:make.inner", *SHAPES[:4]], "", "inner is within the function make (write it"),
        (["my_model:ffn_gate"], "", "my_model.py:6: nothing says what x is (give its shape, x=SIZES"),
        (["my_model:ffn_gate", "--shape", "y=3"], "", "ffn_gate has no argument 'y'"),
        (["my_model:ffn_gate", "--shape", "x=3;4"], "", "shape 'x=3;4' is no example (expected"),
        (["my_model:ffn_gate", "--shape", "x=3:bool"], "", "(no kernel reads bool: give x in another"),
        (["my_model:ffn_gate", *SHAPES, "--name", "a-b"], "", "'a-b' is no name of a spec"),
        (["my_model:ffn_gate", *SHAPES, "--name", "swiglu"], "", "(name it gemm_swiglu)"),
        (["-"], "hello world", "stdin is no Python: invalid syntax, line 1"),
        (["-"], "x = 3", "stdin defines no function"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_writes_nothing(
    where: workspace.Workspace, args: list[str], stdin: str, message: str
) -> None:
    done = runner.invoke(app, ["spec", *args], input=stdin)
    assert done.exit_code == 2 and message in done.output
    assert done.output.count("\n") == 1 and done.output.startswith("error: ")
    assert not [*where.specs.glob("*.md")] and not Path("ran").exists()


def limit_of(body: str) -> float:
    """Seconds for a function: what never ends needs none, what ends may run on busy cores."""
    return 1.0 if body.startswith("while True") else 20.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("math.inf.__class__.__base__.__subclasses__()[0].x", "m.py:3: the function raises Attrib"),
        ("print(3)", "m.py:3: the function prints; a reference only computes"),
        (
            "while True: pass",
            "m.py: the function did not end in 1 s (write loops as operations on tensors)",
        ),
        ("x = x @ torch.ones(1 << 40)", "m.py:3: the function raises RuntimeError: "),
        ("torch.os.kill(torch.os.getppid(), 9)", "m.py:3: the function signals a process (a refer"),
        ("torch.os._exit(3)", "m.py: the function ended without a result: exit status 3"),
        ("torch.os.system('touch {path}')", "m.py:3: the function starts a program (a reference"),
        ("open_ = torch.os.open('{path}', 65); x", "m.py:3: the function opens a file for writing"),
    ],
)
def test_a_function_that_does_more_than_compute(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "made"
    text = f"import math, torch\ndef f(x, w):\n    {body.format(path=path)}\n    return x @ w.T\n"
    examples = {"x": Example((64, 32)), "w": Example((48, 32))}
    with pytest.raises(SpecError) as caught:
        references.drafted(extracted(text, "m.py"), examples, "f", limit_s=limit_of(body))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert not path.exists()


def test_what_is_written_past_python_is_stopped_by_bubblewrap(tmp_path: Path) -> None:
    if reason := confinement.missing():
        pytest.skip(reason)
    path = tmp_path / "made"
    text = (
        f"import torch\ndef f(x, w):\n    torch.save(torch.ones(1), '{path}')\n    return x @ w.T\n"
    )
    examples = {"x": Example((64, 32)), "w": Example((48, 32))}
    with pytest.raises(
        SpecError, match=r"m.py:3: the function raises RuntimeError: .*Read-only file system"
    ):
        references.drafted(extracted(text, "m.py"), examples, "f")
    assert not path.exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("while True: pass", "toy.md: the function did not end in 1 s"),
        ("import subprocess; subprocess.run(['ls'])", "toy.md:62: the function starts a program ("),
        ("torch.os.remove('{path}')", "toy.md:62: the function removes a file (a reference only"),
    ],
)
def test_no_spec_is_admitted_whose_reference_does_more_than_compute(
    tmp_path: Path, body: str, message: str
) -> None:
    path = tmp_path / "made"
    text = workspace.packaged_specs()["gemm_symlog"].read_text("utf-8")
    head, found, rest = text.partition("):\n")
    spec = load_spec("toy.md", text=f"{head}{found}    {body.format(path=path)}\n{rest}")
    with pytest.raises(SpecError) as caught:
        references.admitted(spec, limit_s=limit_of(body))
    assert str(caught.value).startswith(message), str(caught.value)
    assert not path.exists()


NO_FUNCTIONS = {
    "counts its calls": (
        "calls = []", "calls.append(1)\n    x = x * (1.5 if len(calls) > 9 else 1)", "the reference ",
    ),
    "counts its calls and has not come far": (
        "import itertools\nturn = itertools.count()", "x = x * (1 if next(turn) < 10**6 else 2)",
        "the reference changes turn, which the next call would see (a reference computes with its",
    ),
    "counts its calls where it is defined": (
        "", "reference.calls = getattr(reference, 'calls', 0) + 1",
        "the reference changes reference, which",
    ),
    "keeps tensors of a call": (
        "first = {}", "first.setdefault(x.shape, x)", "the reference changes first, which",
    ),
    "draws random numbers": (
        "", "x = x + 0.01 * torch.rand_like(x)", "the function changes torch's random numbers",
    ),
    "counts where nobody sees it": (
        "turn = iter(range(10**6))", "x = x * (1 + 0.01 * next(turn))",
        "the reference gives another O of gemm_rmsnorm bfloat16, draw 0 in another order of calls",
    ),
    "draws and leaves it out": ("", "torch.rand(1)", "the function changes torch's random numbers"),
    "looks at the clock": ("import time", "x = x * (1 if time.time() < 4e9 else 2)", "imports time"),
    "looks at torch's clock": ("", "x = x * (1 if torch.os.times()[4] > 0 else 2)", "reaches "),
    "looks at a file": ("", "open('/etc/hostname').read()", "calls open"),
    "calls native code": ("import ctypes", "ctypes.CDLL(None).getpid()", "calls native code"),
    "replaces a function of torch": (
        "", "torch.nn.functional.relu = torch.sigmoid",
        "the function changes torch.nn.functional.relu (a reference only computes)",
    ),
    "replaces a method": (
        "", "torch.Tensor.__mul__ = torch.Tensor.mul", "the function changes Tensor.__mul__",
    ),
    "sets a default": ("", "torch.set_default_dtype(torch.float32)\n    torch.set_grad_enabled(False)",
                       "the function changes whether torch records gradients"),
    "differs by type": (
        "", "x = x if x.dtype is torch.float64 else 0.5 * x",
        "in 100% of its elements; compute it in float32, or draw smaller values",
    ),
}  # fmt: skip


def toy(top: str, body: str) -> Spec:
    text = workspace.packaged_specs()["gemm_rmsnorm"].read_text("utf-8")
    block = f"import torch\n{top}\n\n\ndef reference(A, B, r):\n    x = A @ B.T * r[:, None]\n"
    block += f"    {body}\n    return x.to(A.dtype)\n"
    head = text.partition("```python reference\n")[0]
    return load_spec("toy.md", text=f"{head}```python reference\n{block}```\n")


@pytest.mark.parametrize("name", NO_FUNCTIONS)
def test_a_reference_that_is_no_function_is_not_admitted(name: str) -> None:
    top, body, said = NO_FUNCTIONS[name]
    with pytest.raises(SpecError) as caught:
        references.admitted(toy(top, body))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_reference_of_a_file_with_late_annotations_is_admitted() -> None:
    spec = toy("from typing import Any", "one: Any = 1")
    late = spec.reference_source.replace("import torch", "from __future__ import annotations", 1)
    late = late.replace("import Any\n", "import Any\nimport torch\n")
    assert late.startswith("from __future__") and reached(late) is None


def test_what_a_reference_replaced_is_gone_with_it() -> None:
    with pytest.raises(SpecError, match="changes"):
        references.admitted(toy("", "torch.nn.functional.relu = torch.sigmoid"))
    references.admitted(
        toy("SLOPE = torch.arange(3.0)", "x = torch.nn.functional.relu(x) * SLOPE[1]")
    )


def test_a_shipped_spec_is_copied(where: workspace.Workspace) -> None:
    assert runner.invoke(app, ["spec", "gemm_symlog"]).exit_code == 0
    assert load_spec(where.specs / "gemm_symlog.md").name == "gemm_symlog"
    again = runner.invoke(app, ["spec", "gemm_symlog"])
    assert again.exit_code == 2 and "is there already" in again.output
    unknown = runner.invoke(app, ["spec", "gemm_symlo"])
    assert unknown.exit_code == 2 and "no shipped spec 'gemm_symlo' (did you mean" in unknown.output
