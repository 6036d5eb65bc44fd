"""Functions written at random: the composer refuses them in a line, or is right, and the judge says
the same."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_agent.agent.authors.composer import Composer
from coda_agent.evals.judge import generated
from coda_agent.evals.judge.scores import Judge
from tests.written import spec


@settings(max_examples=30)
@given(st.data())
def test_no_function_is_composed_wrongly(data: st.DataObject) -> None:
    made = generated.reference(lambda options: data.draw(st.sampled_from(options)))
    found = generated.judged(made, None, seed=1)
    assert found["layer"] in ("not admitted", "refused", "right"), found["said"]
    assert "\n" not in found.get("said", "")


def test_the_judge_agrees_with_the_interpreter() -> None:
    cells = [generated.tried(31, number) for number in range(10)]
    assert {"right"} < {c["layer"] for c in cells} <= {"not admitted", "refused", "right"}


SHAPES = "check_shapes: [{M: 1, N: 16, K: 8}, {M: 37, N: 48, K: 24}]\n"
REMAINDER = "torch.fmod(torch.log(1 + torch.exp(D.clamp(max=60))), 1.5).to(A.dtype)"
CANCELLED = "(0.5 * torch.addcdiv(torch.rsub(D, D), D, D.square() + 1)).to(A.dtype)"
COSINE = "torch.where((F.relu(D).cos() > 0) & (D > 0), F.relu(D).cos(), D).to(A.dtype)"


@pytest.mark.parametrize(
    ("number", "dtype", "body"),
    [
        (467, "float32", "(torch.asinh(-D) + D).float()"),
        (1181, "T", COSINE),
        (0, "T", REMAINDER),
        (1766, "T", CANCELLED),
    ],
    ids=[
        "no digit is left of a small difference",
        "a sign by the cosine of a huge angle",
        "a remainder of a softplus, which is cut",
        "a value less itself, beside a small one",
    ],
)
def test_a_right_program_that_few_digits_are_left_of_is_not_refused(
    number: int, dtype: str, body: str
) -> None:
    made = spec(
        f"D = A @ B.T; return {{'O': {body}}}",
        outputs={"O": f"{{shape: [M, N], dtype: {dtype}}}"},
        name=f"generated_{number}",
        header=SHAPES,
    )
    assert generated.judged(made, Judge(Path(), "cpu"), seed=number + 1) == {"layer": "right"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("seed", "number", "inputs", "lines", "results"),
    [
        pytest.param(
            2,
            1274,
            {"r": "[M, 1], dtype: float32"},
            ["x = 2 * D", "h = torch.hypot(x / (x.abs() + 1), x)"],
            {"O": ("torch.clamp(h, -r.abs(), r.abs())", "float32")},
            id="a hypotenuse of NaN and infinity",
        ),
        pytest.param(
            2,
            1290,
            {},
            ["x = D.abs().sinc().clamp(-1, 2)"],
            {"O": ("x", "T"), "s": ("(x > 0).float().sum(-1)", "float32")},
            id="signs of a sinc of integers",
        ),
        pytest.param(
            2,
            2613,
            {"C": "[M, N], dtype: T"},
            ["x = F.gelu(torch.rsub(2 * D + 0.5, C), approximate='tanh')"],
            {"O": ("x % 1.5", "T")},
            id="a remainder of a gelu",
        ),
        pytest.param(
            2,
            3184,
            {"b": "[N], dtype: T"},
            ["h = torch.hypot(D**3, b)"],
            {
                "O": ("torch.where(h > b[None, :], h, b[None, :] * 2)", "float32"),
                "H": ("F.silu(h[..., 0::2]) * h[..., 1::2]", "T"),
            },
            id="a hypotenuse compared with a side",
        ),
        pytest.param(
            2,
            4869,
            {},
            [
                "x = 0.5 * D",
                "t = torch.atan(x)",
                "p = torch.stack((t[..., 0::2] * 2, t[..., 1::2] + 1), dim=-1).reshape(t.shape)",
            ],
            {"O": ("torch.fmod(p, x.abs() + 1)", "T")},
            id="remainders of pairs",
        ),
        pytest.param(
            2,
            3894,
            {},
            ["x = (2 * D).sinc()"],
            {
                "O": ("F.hardswish((3 * x).ceil().div(x.abs() + 1, rounding_mode='floor'))", "T"),
                "n": ("2 * D.sum(0)", "float32"),
            },
            id="a ceiling of what is nearly 0",
        ),
        pytest.param(
            3,
            216,
            {
                "r": "[M], dtype: float32, draw: {uniform: [0.5, 1.5]}",
                "b": "[N], dtype: float32, draw: {uniform: [0.5, 1.5]}",
            },
            ["D = (A * 0.5) @ B.T", "x = torch.addcmul(D, D, D, value=0.5)"],
            {
                "O": ("torch.clamp(x, -b.abs(), b.abs()) - r[..., None]", "float32"),
                "s": ("D.mean(-1)", "float32"),
            },
            id="what torch rounds once",
        ),
        pytest.param(
            3,
            918,
            {"b": "[N], dtype: float32"},
            ["x = F.softshrink(A.float() @ B.float().T).frac()", "w = b[None, :]"],
            {
                "O": (
                    "F.leaky_relu(torch.hypot(x.div(w.abs() + 1, rounding_mode='floor'), w), 2.0)",
                    "float32",
                )
            },
            id="a whole number that float32 hits",
        ),
        pytest.param(
            3,
            1497,
            {},
            ["x = (2 * D).unflatten(-1, (-1, 2)).flip(-1).flatten(-2).frac()"],
            {"O": ("torch.where(x < 0, x, 0.3).sign()", "T")},
            id="the sign of what float32 rounds to 0",
        ),
        pytest.param(
            3,
            3659,
            {},
            ["x = (0.25 * D).sigmoid()"],
            {
                "O": ("x", "float32"),
                "H": ("x.unflatten(-1, (-1, 2)).sum(-1).clamp(-1, 2).frac()", "T"),
            },
            id="jumps in the norm of an output",
        ),
        pytest.param(
            4,
            1358,
            {
                "B": "[K, N]",
                "r": "[M, 1], dtype: T",
                "b": "[N], dtype: T, draw: {uniform: [0.5, 1.5]}",
            },
            [
                "x1 = torch.lerp(D, r, 0.25)",
                "x2 = torch.stack((-x1[..., 1::2], x1[..., 0::2]), -1).flatten(-2)",
                "x4 = torch.fmod(torch.where(x2 > D, x2, D * 2), b[None, :].abs() + 1)",
            ],
            {"O": ("x4", "T"), "s": ("(x4 > 0).float().sum(-1)", "float32")},
            id="a remainder that is 0 in one step of many",
        ),
        pytest.param(
            4,
            1400,
            {},
            ["x = D.frac().sign()"],
            {"O": ("(x == x).float() * x", "T"), "s": ("2 * x.sum(-1)", "float32")},
            id="a whole number that few runs hit",
        ),
        pytest.param(
            4,
            4424,
            {},
            ["x = torch.exp(-(A.float() @ B.float().T).abs())"],
            {"O": ("torch.hypot(x, x)", "T")},
            id="a hypotenuse whose squares vanish",
        ),
        pytest.param(
            5,
            3929,
            {"b": "[N], dtype: T"},
            ["x = D - torch.sign(D) * torch.floor(D.abs())"],  # how torch 2.11 has frac
            {"O": ("torch.add(x, b, alpha=2)", "T")},
            id="a fraction in a longer sum",
        ),
    ],
)
def test_a_right_program_near_a_jump_is_not_refused(
    seed: int,
    number: int,
    inputs: dict[str, str],
    lines: list[str],
    results: dict[str, tuple[str, str]],
) -> None:
    """On a case of integers, the few probes at first all left an element on one side of a jump."""
    shapes = {"O": "[M, N]", "H": "[M, N/2]", "s": "[M]", "n": "[N]"}
    product = "A @ B" if inputs.get("B") == "[K, N]" else "A @ B.T"
    returned = ", ".join(
        f"'{o}': ({x}).{'to(A.dtype)' if d == 'T' else 'float()'}" for o, (x, d) in results.items()
    )
    made = spec(
        "\n".join([f"D = {product}", *lines, f"return {{{returned}}}"]),
        {n: f"{{shape: {how}}}" for n, how in inputs.items()},
        {o: f"{{shape: {shapes[o]}, dtype: {d}}}" for o, (_, d) in results.items()},
        name=f"generated_{number}",
        header=SHAPES,
    )
    assert generated.judged(made, Judge(Path(), "cpu"), seed=seed + number) == {"layer": "right"}


@pytest.mark.parametrize(("old", "new"), [("maximum(", "minimum("), ("0.25", "0.26")])
def test_a_wrong_program_is_found(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    lines = {"D": "A @ B.T", "x1": "torch.maximum(D, E)", "O": "x1.masked_fill(x1 > 1, 0.25)"}
    picks = iter([generated.LAYOUTS[0], ("r", "[M, 1]"), "A @ B.T", 2, "binary", "E", "torch.maximum({x}, {y})", "unary",
                  "{x}.masked_fill({x} > 1, 0.25)", 1, 1, 1, "T", "", "float32"])  # fmt: skip
    made = generated.reference(lambda options: next(picks))
    assert all(line in made.reference_source for line in lines.values())
    judge = Judge(Path(), "cpu")
    assert generated.judged(made, judge, seed=1) == {"layer": "right"}
    write = Composer.write
    monkeypatch.setattr(Composer, "write", lambda *a: _imported(write(*a).replace(old, new)))
    found = generated.judged(made, judge, seed=1)
    assert found["layer"] == "wrong" and found["said"].startswith("O is off by")


def _imported(text: str) -> str:
    head, _, body = text.partition("@epilogue")
    start = head.index("from coda_agent")
    names = "Tile, epilogue, greater, maximum, minimum, where"
    return f"{head[:start]}from coda_agent.primitives import {names}\n\n\n@epilogue{body}"


SLOW = """
import os, sys, time
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from coda_agent.evals.judge.generated import score_batches
from coda_agent.evals.judge.scores import Judge

def one(seed, number):
    Path(sys.argv[1], f"{os.getpid()}.pid").touch()
    time.sleep(600)

if __name__ == "__main__":
    score_batches(Judge(Path(sys.argv[1]), "cpu"), "slow", one, 100, seed=1)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    try:
        assert waited(lambda: [*tmp_path.glob("*.pid")], 120)
    finally:
        parent.kill()
        parent.wait()
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert waited(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 60)


def waited(done: Callable[[], object], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not done():
        time.sleep(0.1)
    return bool(done())
