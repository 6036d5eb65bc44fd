"""Derivatives of the vocabulary's functions against torch autograd in float64, and what a program
records for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import coda_agent.primitives as vocabulary
from coda_agent.primitives import (
    HalfTile,
    Program,
    RowSum,
    Tile,
    derivative,
    epilogue,
    exp,
    gelu_erf,
    gelu_tanh,
    greater,
    hard_swish,
    interleave,
    leaky_relu,
    log,
    maximum,
    minimum,
    mish,
    pairs,
    relu,
    rsqrt,
    sigmoid,
    silu,
    softplus,
    swiglu,
    swiglu_oai,
    tanh,
    where,
)
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.ops import add, div, fma, mul, neg, rint, sub
from coda_agent.primitives.reader import read_programs
from coda_agent.runtime.target import sass
from tests.meanings import BINARY, GRID, UNARY, domain
from tests.programs import built

NOT_ELEMENTWISE = {
    "clamp", "column_index", "derivative", "dropout", "epilogue", "exchange", "gather", "group_max",
    "group_mean", "group_min", "group_sum", "interleave", "pairs", "philox_uniform", "ptx", "rotary", "rotate", "rotate_half",
    "row_index", "where",
}  # fmt: skip


def slopes(fn: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [a.detach().requires_grad_() for a in args]
    return torch.autograd.grad(fn(*leaves).sum(), leaves)


def test_the_tables_below_hold_every_function() -> None:
    functions = {name for name in vocabulary.__all__ if name[0].islower()}
    rounding = {name for name in functions if name.startswith(("to_", "stochastic_"))}
    # Those that round have slopes by convention, which tests/primitives/test_rounding.py has.
    assert functions - NOT_ELEMENTWISE - rounding == set(UNARY) | set(BINARY)


@pytest.mark.parametrize("name", UNARY)
def test_unary_function(name: str) -> None:
    x = domain(name)
    (want,) = slopes(UNARY[name], x)
    got = torch.as_tensor(derivative(getattr(vocabulary, name), x), dtype=x.dtype)
    torch.testing.assert_close(got.expand_as(x), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", BINARY)
def test_binary_function(name: str) -> None:
    x, y = domain(name), GRID.flip(0) * 0.9 + 0.0007
    for wrt, want in enumerate(slopes(BINARY[name], x, y)):
        got = torch.as_tensor(derivative(getattr(vocabulary, name), x, y, wrt=wrt), dtype=x.dtype)
        got = got.expand_as(x)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_choice_passes_the_slope_of_what_is_taken() -> None:
    fn = lambda x, y: where(greater(x, y), x * y, x - y)
    in_torch = lambda x, y: torch.where(x > y, x * y, x - y)
    x, y = GRID, GRID.flip(0) * 0.9 + 0.0007
    for wrt, want in enumerate(slopes(in_torch, x, y)):
        torch.testing.assert_close(derivative(fn, x, y, wrt=wrt), want)


@pytest.mark.parametrize("fn", [add, sub, mul, div], ids=lambda f: f.__name__)
def test_arithmetic(fn: Callable[..., Any]) -> None:
    x, y = GRID, GRID.flip(0) * 0.9 + 0.0007
    for wrt, want in enumerate(slopes(fn, x, y)):
        got = torch.as_tensor(derivative(fn, x, y, wrt=wrt), dtype=x.dtype)
        torch.testing.assert_close(got.expand_as(x), want)


def composed(x: Any, y: Any) -> Any:
    """Every rule at once, with shared and constant parts."""
    z = x * y + 3.0 * (2.0 * x) - y * 5.0
    w = fma(x, x, z) / (1.0 + exp(-x)) + rint(x) * 4.0
    return tanh(w * 0.1) * softplus(z) + log(1.0 + w * w) * rsqrt(1.0 + z * z) - neg(silu(w))


def in_torch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * y + 6.0 * x - y * 5.0
    w = (x * x + z) / (1.0 + (-x).exp()) + x.detach().round() * 4.0
    return (w * 0.1).tanh() * F.softplus(z) + (1.0 + w * w).log() / (1 + z * z).sqrt() + F.silu(w)


def test_a_composition() -> None:
    x, y = GRID, GRID.flip(0) * 0.9 + 0.0007
    for wrt, want in enumerate(slopes(in_torch, x, y)):
        torch.testing.assert_close(derivative(composed, x, y, wrt=wrt), want, rtol=1e-8, atol=1e-7)


def test_second_derivative() -> None:
    x = GRID.detach().requires_grad_()
    (first,) = torch.autograd.grad(F.silu(x).sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(first.sum(), x)
    got = derivative(lambda t: derivative(silu, t), GRID)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_at_kinks() -> None:
    zero = torch.zeros(1)
    for fn, want in ((relu, 0.0), (leaky_relu, 0.01), (vocabulary.absolute, 0.0)):
        reference = {relu: F.relu, leaky_relu: F.leaky_relu}.get(fn, torch.abs)
        assert derivative(fn, zero).item() == pytest.approx(want)
        assert slopes(reference, zero)[0].item() == pytest.approx(want)
    assert derivative(lambda x: maximum(0.0, x), zero).item() == 0.0
    ends = torch.tensor([-1.5, -1.0, 0.0, 2.0, 2.5])
    assert derivative(vocabulary.clamp, ends, -1.0, 2.0).tolist() == [0, 0, 1, 0, 0]
    assert derivative(hard_swish, torch.tensor([-3.0, 3.0])).tolist() == [0, 1]
    assert [derivative(minimum, zero, zero, wrt=i).item() for i in (0, 1)] == [0.0, 0.0]


@pytest.mark.parametrize("fn", [sigmoid, silu, softplus, gelu_erf, gelu_tanh, tanh, mish])
def test_float32_is_as_good_as_torch(fn: Callable[..., Any]) -> None:
    """Largest error against float64, at most twice that of torch's own float32 backward."""
    x = torch.linspace(-30, 30, 60001)
    torch_fn = UNARY[fn.__name__]
    (exact,), (single,) = slopes(torch_fn, x.double()), slopes(torch_fn, x)
    ours = (derivative(fn, x).double() - exact).abs().max()
    assert ours <= 2 * (single.double() - exact).abs().max() + 1e-7


def test_tanh_keeps_its_digits_where_it_saturates() -> None:
    x = torch.linspace(-20, 20, 4001)
    exact = 1 / x.double().cosh().square()
    assert ((derivative(tanh, x) - exact).abs() / exact).max() < 1e-5


def test_numbers() -> None:
    assert derivative(relu, 2.0) == 1.0
    assert derivative(mul, 2.0, 3.0, wrt=1) == 2.0
    assert derivative(lambda x: x * 3.0 + 1.0, GRID) == 3.0
    assert derivative(rint, GRID) == 0.0


# --- in programs


def ops_of(program: Program) -> list[str]:
    return [n.op for n in program.graph.nodes if n.args]


@epilogue(dX=Tile)
def relu_backward(acc, X: Tile):
    return {"dX": acc * derivative(relu, X)}


@epilogue(dX=Tile, O=Tile)
def silu_backward(acc, X: Tile):
    return {"dX": acc * derivative(silu, X), "O": silu(X)}


@epilogue(dG=HalfTile, dU=HalfTile, s=RowSum)
def gate_backward(acc, Z: Tile):
    grad, _ = pairs(acc)
    gate, up = pairs(Z)
    d_gate = grad * derivative(swiglu, gate, up)
    d_up = grad * derivative(swiglu, gate, up, wrt=1)
    return {"dG": d_gate, "dU": d_up, "s": gate * d_gate + up * d_up}


@epilogue(O=Tile, P=Tile)
def many(acc, X: Tile):
    y = acc * derivative(gelu_tanh, X) + derivative(gelu_erf, X) + derivative(tanh, X)
    return {"O": y, "P": acc * (derivative(mish, X) + derivative(swiglu_oai, X, acc))}


def test_nothing_trivial_is_recorded() -> None:
    assert ops_of(relu_backward) == ["step", "mul"]
    recorded = [n.value for p in (silu_backward, gate_backward) for n in p.graph.nodes]
    assert 1.0 not in recorded


def test_the_function_and_its_derivative_share_their_parts() -> None:
    assert ops_of(silu_backward).count("sigmoid") == 1
    assert ops_of(gate_backward).count("sigmoid") == 1


def test_arguments_may_depend_on_one_another() -> None:
    @epilogue(O=Tile)
    def dependent(acc):
        return {"O": derivative(mul, acc, acc * acc)}

    @epilogue(O=Tile)
    def square(acc):
        return {"O": acc * acc}

    assert dependent.digest == square.digest


def test_program_equals_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, z = (torch.randn(*s, generator=generator) for s in ((9, 24), (32, 24), (9, 32)))
    dtypes = dict.fromkeys(gate_backward.outputs, torch.float64)
    got = interpret(gate_backward, a, b, {"Z": z}, dtypes=dtypes, compute=torch.float64)
    z = z.double().requires_grad_()
    grad = (a.double() @ b.double().mT)[:, 0::2]
    (want,) = torch.autograd.grad(F.silu(z[:, 0::2]) * z[:, 1::2], z, grad)
    torch.testing.assert_close(got["dG"], want[:, 0::2])
    torch.testing.assert_close(got["dU"], want[:, 1::2])
    torch.testing.assert_close(got["s"], (z * want).sum(-1).detach())


@pytest.mark.parametrize("program", [gate_backward, many, relu_backward], ids=lambda p: p.name)
@pytest.mark.one_in(3)
@pytest.mark.usefixtures("fresh_cache")
def test_compiles_for_hopper(program: Program) -> None:
    found = built(program)
    assert found["mma_instructions"] > 0
    text = sass(Path(found["object"]))
    assert ("MUFU.EX2" in text) == (program is not relu_backward)
    assert "MUFU.TANH" not in text


@epilogue(dX=Tile, O=Tile)
def gelu_backward(acc, X: Tile):
    return {"dX": acc * derivative(gelu_erf, X), "O": gelu_erf(X)}


@pytest.mark.usefixtures("fresh_cache")
def test_gelu_and_its_slope_have_one_exponential() -> None:
    text = sass(Path(built(gelu_backward)["object"]))
    assert text.count("MUFU.EX2") == text.count("MUFU.RCP") > 0


def test_a_text_may_hand_on_a_function() -> None:
    text = (
        "from coda_agent.primitives import Tile, derivative, epilogue, silu\n\n\n"
        "@epilogue(O=Tile)\ndef p(acc, X: Tile):\n    return {'O': acc * derivative(silu, X, wrt=0)}\n"
    )
    assert [n.op for n in read_programs(text)["p"].graph.nodes].count("sigmoid") == 1


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no function": (lambda x: derivative(x, x), "got Value, expected a function"),
    "a class": (lambda x: derivative(Tile, x, x), "got Tile, expected a function"),
    "too few arguments": (lambda x: derivative(swiglu, x), "derivative.. of swiglu: missing"),
    "an argument that is not there": (lambda x: derivative(silu, x, wrt=1), "wrt is 1, expected 0"),
    "two results": (lambda x: derivative(vocabulary.rotate, x, x, x, x), "gives tuple, expected"),
    "a structural function": (lambda x: derivative(lambda t: pairs(t)[0] * 2, x), "of even, for which"),
    "one of the other argument": (
        lambda x: derivative(lambda s, t: s * interleave(*pairs(t)), x, x),
        "of even, for which",
    ),
    "a value from outside": (lambda x: derivative(lambda t: t * x, x), "of another program"),
    "mixed widths": (lambda x: derivative(swiglu, x, pairs(x)[0]), "mixes a full-width"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_use(case: str) -> None:
    call, message = BAD[case]

    def body(acc):
        return {"O": call(acc)}

    with pytest.raises(ProgramError, match=message):
        epilogue(O=Tile)(body)
