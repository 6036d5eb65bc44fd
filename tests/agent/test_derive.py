"""Backward passes that are derived: right, in the form of the paper, or refused in a line.

All specs of the catalogue: CODA_AGENT_DERIVE=all pytest -n 0 tests/agent/test_derive.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.derive.backward import WEIGHT_GRADIENT, Backward, derive
from coda_agent.agent.derive.checking import check, exactly, gradients
from coda_agent.agent.derive.kernel import Asked, Form
from coda_agent.agent.judge.runners import interpreted
from coda_agent.primitives.errors import CodaError, ProgramError, SpecError
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec, admit, load_spec
from tests.written import spec

ROOT = Path(__file__).parents[2]
CATALOGUE = {p.stem: p for folder in ("", "catalogue/") for p in ROOT.glob(f"specs/{folder}*.md")}
SWIGLU = Asked(into="O", kept=("D",))
NORM = Asked(into="O", norm="s")
WAYS = {
    "gemm_rmsnorm_swiglu": [SWIGLU],
    "gemm_swiglu": [SWIGLU],
    "gemm_fp8_rmsnorm_swiglu": [replace(SWIGLU, without=("scale_a", "scale_b", "r"))],
    "gemm_fp8_swiglu": [replace(SWIGLU, without=("scale_a", "scale_b"))],
    "gemm_partial_swiglu_bwd": [Asked(into="O")],
    "gemm_swiglu_bwd": [Asked(into="dZ")],
    "gemm_residual_partial_rmsnorm": [NORM, Asked()],
    "gemm_fp8_residual_partial_rmsnorm": [NORM],
    "gemm_partial_cross_entropy": [Asked(kept=("Z",)), Asked(into="Z")],
    "gemm_column_amax": [Asked(into="D", kept=("amax",))],
    "gemm_nearest_code": [Asked(kept=("least",))],
}
"""What is said of the layers around, where it is not that the last tile enters the next product."""
FEW = (
    "gemm_rmsnorm_swiglu", "gemm_residual_partial_rmsnorm", "gemm_partial_cross_entropy",
    "gemm_bias_swiglu_clamped", "gemm_fp8_rowwise_bias", "gemm_rope", "gemm_rbf_kernel",
    "gemm_group_norm", "gemm_symlog", "gemm_mse_rows", "gemm_sample_gated_residual",
)  # fmt: skip
"""Pairs, a norm's statistic, a log-sum-exp and a gather, 8 bits, rotations, products computed
again, groups, losses, and tables."""
REFUSED = {
    "gemm_fake_quantised_fp8": "to_e4m3 is a rounding",
    "gemm_fake_quantised_int8": "round_even is a rounding",
    "gemm_quantised": "8 bits|RowMax",
    "gemm_quantised_blocks": "8 bits|RowMax|GroupTile",
    "gemm_fp8_bias_gelu_quantised": "8 bits|RowMax",
    "gemm_fp8_swiglu_quantised": "8 bits|RowMax",
    "gemm_fp8_rmsnorm_swiglu_quantised": "8 bits|RowMax",
    "gemm_swiglu_bwd": "WideTile",
    "gemm_partial_swiglu_bwd": "one double-width tile",
}
UNCOMPOSED = ("gemm_qk_norm_rope",)
"""Whose forward, given its tables as tiles, no program of the composer's is."""
EXTENDED = ("groupsort", "haar", "log_mixture", "maxout", "median", "modrelu", "pair_softmax")
EXTENDED += ("piecewise_linear", "probit", "weighted_log_sum")
ALL = os.environ.get("CODA_AGENT_DERIVE") == "all"
CHOSEN = sorted(CATALOGUE) if ALL else FEW


def ways(name: str) -> list[Asked]:
    """How a spec is derived: with the last tile entering the next product, and alone."""
    spec = load_spec(CATALOGUE[name])
    tiles = [o for o in spec.outputs if len(spec.symbolic_shape(o)) == 2]
    return WAYS.get(name) or [*(Asked(into=o) for o in tiles[-1:]), *([Asked()] if ALL else [])]


def derived(name: str, asked: Asked) -> Backward:
    return derive(load_spec(CATALOGUE[name]), asked)


def composed(text: str, name: str) -> dict[str, Any]:
    return read_programs(
        Composer().write(load_spec(Path(f"{name}.md"), text=text), lambda *_: None)
    )


def running(types: dict[str, str], programs: dict[str, dict[str, Any]]) -> Callable[..., Any]:
    """A kernel as the program that is composed for it, in float32 with its own stores."""
    import torch

    def run(spec: Spec, inputs: dict[str, Any]) -> Any:
        if spec.name not in programs:
            programs[spec.name] = composed(spec.text, spec.name)
        dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
        program = programs[spec.name][spec.variant(spec.bindings()[-1])]
        return interpreted(spec, program, inputs, dtypes=dtypes)

    return run


@pytest.mark.parametrize("name", [x for x in CHOSEN if x not in REFUSED])
def test_gradients_are_autograds_and_within_the_judges_bound(name: str) -> None:
    """In float64 to the order of sums; of composed programs in every type within twice the error of
    autograd in that type, or the roundings of what is saved and what is stored. A number's gradient is a sum of M · N terms that cancel,
    so of it no bound holds but in float64."""
    import torch

    if name.removeprefix("gemm_") in EXTENDED:
        pytest.skip("no program of the composer's")
    for asked in ways(name):
        backward = derived(name, asked)
        check(backward)
        spec = backward.spec
        n = spec.gemm_dims[1]
        # Where an activation jumps, one rounding moves a gradient by more than itself; with many
        # rows autograd's error has that too.
        sizes = dict(spec.check_shapes[-2:][0])
        unit = math.lcm(32, spec.dims[n].multiple_of)
        sizes[n] = -(-sizes[n] // unit) * unit
        programs: dict[str, dict[str, Any]] = {}
        for types in spec.type_choices() if name not in UNCOMPOSED else ():
            dtype = getattr(torch, next(iter(types.values()), "") or "bfloat16")
            _, truth = gradients(backward, sizes, types, torch.float64, exactly)
            got, plain = gradients(backward, sizes, types, dtype, running(types, programs))
            for x, exact in truth.items():
                if exact.ndim:
                    error, own = ((y[x] - exact).norm() / exact.norm() for y in (got, plain))
                    allowed = 2 * max(float(own), torch.finfo(dtype).eps)
                    assert float(error) <= allowed, (asked, dtype, x)


@pytest.mark.parametrize("name", REFUSED if ALL else [*REFUSED][:3])
def test_what_has_no_derivative_is_refused_by_name(name: str) -> None:
    for asked in ways(name):
        with pytest.raises(CodaError, match=REFUSED[name]):
            derived(name, asked)


@pytest.mark.parametrize(
    ("forward", "asked", "accepted"),
    [
        ("gemm_rmsnorm_swiglu", SWIGLU, "gemm_partial_swiglu_bwd"),
        ("gemm_residual_partial_rmsnorm", NORM, "gemm_residual_partial_rmsnorm_bwd"),
    ],
)
def test_the_papers_backward_kernels_come_out(forward: str, asked: Asked, accepted: str) -> None:
    """Kernels 10 and 9: what is derived computes what was accepted, digest by digest."""
    text = derived(forward, asked).files[f"{forward}_bwd"]
    programs = composed(text, f"{forward}_bwd")
    known = read_programs((ROOT / "generated" / accepted / "kernel.py").read_text("utf-8"))
    assert [p.digest for p in programs.values()] == [p.digest for p in known.values()]


def test_without_a_norm_before_it_the_gate_has_no_statistic() -> None:
    backward = derived("gemm_swiglu", SWIGLU)
    assert [*backward.kernel.kinds] == ["dP", "O"]


def dropped(k: int = 64, residual: str = "C", returned: str = "", **outputs: str) -> Spec:
    """Dropout behind a hyperbolic tangent, and a residual."""
    return spec(
        "d = torch.tanh((A @ B.T).float()); u = philox(seed, 3, *d.shape, device=d.device); "
        f"return {{{returned}'O': ({residual} + d * (u >= 0.25) / 0.75).to(A.dtype)}}",
        {
            residual: "[M, N]",
            "seed": "{shape: [], dtype: float32, draw: {integers: [0, 16777216]}}",
        },
        {"O": "[M, N]", **outputs},
        name="dropped",
        header=f"types: {{T: [bfloat16]}}\nbench_shapes: [{{M: 4096, N: 4096, K: {k}}}]\n",
    )


@pytest.mark.parametrize("scaled", [True, False])
def test_a_scale_of_both_columns_of_pairs_is_the_rows(scaled: bool) -> None:
    forward = spec(
        "d, r = (A @ B.T).float(), r[:, None]; "
        f"O = F.silu(d[:, 0::2] * r) * d[:, 1::2]{' * r' * scaled}; "
        "return {'O': O.to(A.dtype), 's': O.mean(-1)}",
        {"B": "[2*N, K]", "r": "{shape: [M], dtype: float32}"},
        {"O": "[M, N]", "s": "{shape: [M], dtype: float32}"},
        name="halves",
        header="types: {T: [bfloat16]}\n",
    )
    backward = derive(forward, Asked(into="O"))
    check(backward)
    assert (backward.kernel.scale == "r") == scaled


def test_a_forward_that_stores_more_keeps_the_types_of_its_outputs() -> None:
    more = {"returned": "'E': torch.exp(d), ", "E": "{shape: [M, N], dtype: float32}"}
    backward = derive(dropped(4096, **more), Asked())
    said = backward.files["dropped_fwd"]
    assert ".to(torch.float32)," in said and said.count(".to(A.dtype),") == 2
    admit(load_spec(Path("dropped_fwd.md"), text=said))


@pytest.mark.parametrize("asked", [Asked(), Asked(into="O")])
def test_dropout_is_drawn_again_from_its_counter(asked: Asked) -> None:
    backward = derive(dropped(), asked)
    check(backward)
    program = composed(backward.files["dropped_bwd"], "dropped_bwd")["dropped_bwd"]
    assert "philox_uniform" in {n.op for n in program.graph.nodes}


def test_a_short_product_is_computed_again_and_a_long_one_saved() -> None:
    forms = {k: derive(dropped(k), Asked()) for k in (64, 4096)}
    assert forms[64].kernel.form is Form.RECOMPUTED and "dropped_fwd" not in forms[64].files
    assert forms[4096].kernel.form is Form.ELEMENTWISE and "dropped_fwd" in forms[4096].files
    assert "dropped_fwd stores P as well, 2·M·N bytes." in forms[4096].notes


def test_what_is_written_is_admitted() -> None:
    backward = derived("gemm_bias_hardswish", Asked(into="O"))
    assert [*backward.files] == [
        "gemm_bias_hardswish_fwd", "gemm_bias_hardswish_bwd", WEIGHT_GRADIENT
    ]  # fmt: skip
    for name, text in backward.files.items():
        admit(load_spec(Path(f"{name}.md"), text=text))
    programs = composed(backward.files[WEIGHT_GRADIENT], WEIGHT_GRADIENT)
    assert programs[WEIGHT_GRADIENT].accumulated == "dW"


def test_names_are_the_specs_own() -> None:
    with pytest.raises(SpecError, match="has no 'Q'; expected one of D, O"):
        derived("gemm_swiglu", Asked(into="Q"))
    with pytest.raises(ProgramError, match=r"one double-width tile.*--kept D"):
        derived("gemm_swiglu", Asked(into="O"))
    with pytest.raises(SpecError, match="row mean of squares"):
        derived("gemm_swiglu", Asked(into="O", norm="D"))


def test_an_input_that_has_the_name_of_a_gradient_is_refused() -> None:
    with pytest.raises(ProgramError, match="'dO' would be the name of a gradient too: rename it"):
        derive(dropped(residual="dO"), Asked())


def test_a_gradient_that_is_wrong_is_found() -> None:
    """The check of a derived pass sees what it is for."""
    backward = derived("gemm_residual_partial_rmsnorm", NORM)
    text = backward.files["gemm_residual_partial_rmsnorm_bwd"].replace("x * z)", "x * z * 1.001)")
    files = dict(backward.files) | {"gemm_residual_partial_rmsnorm_bwd": text}
    with pytest.raises(ProgramError, match="the derived gradient of 'A' is off by"):
        check(replace(backward, files=files))


def test_the_command_writes_specs_and_says_how_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coda_agent.agent.cli import app

    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    assert run(app, ["init", "."]).exit_code == 0
    asked = ["derive", "gemm_swiglu", "--into", "O", "--kept", "D"]
    done = run(app, asked)
    assert done.exit_code == 0, done.output
    assert "out = gemm_swiglu_bwd(A=dY, B=W, D=D)" in done.output
    path = tmp_path / "specs" / "gemm_swiglu_bwd.md"
    admit(load_spec(path))
    assert run(app, asked).exit_code == 0
    path.write_text("mine", "utf-8")
    refused = run(app, asked)
    assert refused.exit_code == 2 and path.read_text("utf-8") == "mine"
