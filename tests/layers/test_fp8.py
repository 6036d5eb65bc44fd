"""The FP8 layers: against float64 on the numbers that e4m3 holds, which are rounded here anew."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from coda_agent.layers import fp8
from coda_agent.layers.modules import DecoderLayer
from tests.layers.llama import Config, Layer, RMSNorm, positions

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper")
EPS = 1e-5


class Sizes(NamedTuple):
    rows: int
    d: int
    ffn: int
    n: int


SHAPES = [Sizes(37, 64, 96, 112), Sizes(130, 144, 80, 176)]


def e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 numbers in float64, ties to even, beyond 448 saturated."""
    x = x.double().clamp(-448, 448)
    step = torch.exp2(x.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (x / step).round() * step


def worth(q: Any) -> Tensor:
    """What quantised numbers stand for, in float64."""
    scale = torch.as_tensor(q.scale, dtype=torch.float64)
    return q.values.double() * (scale[:, None] if scale.ndim else scale)


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def drawn(s: Sizes) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": bf16(s.rows, s.d) * torch.logspace(-3, 3, s.rows, dtype=torch.bfloat16)[:, None],
        "x": bf16(s.rows, s.d),
        "o": bf16(s.d, s.d, scale=s.d**-0.5),
        "gate_up": bf16(2 * s.ffn, s.d, scale=s.d**-0.5),
        "down": bf16(s.d, s.ffn, scale=s.ffn**-0.5),
        "qkv": bf16(s.n, s.d, scale=s.d**-0.5),
        "gamma": torch.rand(s.d).bfloat16() + 0.5,
    }


def holds_norm(given: fp8.Quantised, stream: Tensor, gamma: Tensor) -> None:
    """Hold that tokens are the norm of a float64 stream, but for e4m3's and bfloat16's rounding."""
    n = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + EPS) * gamma.double()
    largest = n.abs().amax(-1)
    torch.testing.assert_close(given.scale.double() * 448, largest, rtol=2**-7, atol=0)
    bound = n.abs() * (2**-4 + 2**-7) + given.scale[:, None] * 2.0**-10
    assert ((worth(given) - n).abs() <= bound).all()


def test_weights_and_rows_are_the_nearest_e4m3_numbers() -> None:
    torch.manual_seed(0)
    weight = bf16(48, 80) * torch.logspace(-4, 4, 48, dtype=torch.bfloat16)[:, None]
    weight[7] = 0
    for q in (fp8.quantised(weight), fp8.quantised_rows(weight)):
        scale = weight.abs().amax(-1).double() / 448
        torch.testing.assert_close(q.scale.double(), scale.clamp(min=1e-12 / 448))
        assert torch.equal(q.values.double(), e4m3(weight.float() / q.scale[:, None]))
        assert not q.values[7].double().any()
    whole = fp8.quantised_whole(weight)
    assert whole.scale == pytest.approx(float(weight.abs().max()) / 448)
    assert torch.equal(whole.values.double(), e4m3(weight.float() / whole.scale))


@pytest.mark.parametrize("s", SHAPES)
def test_a_residual_and_its_norm(s: Sizes) -> None:
    t = drawn(s)
    o = fp8.quantised(t["o"])
    out, given = fp8.linear_residual_norm(t["a"], o, t["x"], t["gamma"], EPS)
    truth = worth(fp8.quantised_rows(t["a"])) @ worth(o).T + t["x"].double()
    torch.testing.assert_close(out.double(), truth, rtol=2**-8, atol=1e-4)
    holds_norm(given, truth, t["gamma"])
    holds_norm(fp8.normed(t["x"], t["gamma"], EPS), t["x"].double(), t["gamma"])


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("s", SHAPES)
def test_an_mlp(s: Sizes, share: float) -> None:
    t = drawn(s)
    gate_up, down = fp8.quantised(t["gate_up"]), fp8.quantised(t["down"])
    given = fp8.normed(t["x"], t["gamma"], EPS)
    z = worth(given) @ worth(gate_up).T
    v = torch.nn.functional.silu(z[:, 0::2]) * z[:, 1::2]
    inner = float(v.abs().max()) / 448 * share  # a smaller one saturates
    out, after, amax = fp8.mlp(t["x"], given, gate_up, down, inner, t["gamma"], EPS)
    torch.testing.assert_close(amax.double(), v.abs().amax(-1), rtol=1e-4, atol=1e-6)
    truth = e4m3(v / inner) * inner @ worth(down).T + t["x"].double()
    torch.testing.assert_close(out.double(), truth, rtol=2**-8, atol=1e-3)
    holds_norm(after, truth, t["gamma"])


@pytest.mark.parametrize("s", SHAPES)
def test_a_projection_with_and_without_rotation(s: Sizes) -> None:
    t = drawn(s)
    qkv, given = fp8.quantised_whole(t["qkv"]), fp8.normed(t["x"], t["gamma"], EPS)
    sizes = (s.n - 32, 16, 16)
    y = worth(given) @ worth(qkv).T
    for part, truth in zip(fp8.norm_linear(given, qkv, sizes), y.split(sizes, 1), strict=True):
        torch.testing.assert_close(part.double(), truth, rtol=2**-8, atol=1e-5)
    table = bf16(s.rows, s.n)
    cos, sin = table[:, 0::2].double(), table[:, 1::2].double()
    left, right = y[:, 0::2], y[:, 1::2]
    turned = torch.stack((left * cos + right * sin, right * cos - left * sin), -1).flatten(1)
    found = fp8.norm_linear(given, qkv, sizes, table)
    for part, truth in zip(found, turned.split(sizes, 1), strict=True):
        torch.testing.assert_close(part.double(), truth, rtol=2**-8, atol=1e-5)


@pytest.fixture(scope="module")
def pair() -> tuple[Layer, RMSNorm, DecoderLayer]:
    torch.manual_seed(0)
    c = Config()
    layer, norm = Layer(c).bfloat16(), RMSNorm(c.width, c.eps).bfloat16()
    ours = DecoderLayer(
        c.width, c.ffn, c.heads, c.kv_heads, c.head_dim, c.eps, dtype=torch.bfloat16
    )
    ours.load_state_dict(layer.state_dict())
    return layer, norm, ours


def test_a_layer_is_near_float64(pair: tuple[Layer, RMSNorm, DecoderLayer]) -> None:
    layer, norm, ours = pair
    x = torch.randn(2, 37, Config().width).bfloat16()
    cos, sin = positions(x[..., 0], Config(), x.dtype)
    table, after = ours.table(cos, sin), torch.nn.RMSNorm(Config().width, Config().eps)
    after.weight.data = norm.weight.data
    with torch.no_grad():
        truth = copy.deepcopy(layer).double()(
            x.double(), position_embeddings=(cos.double(), sin.double())
        )
        attended = list[Tensor]()

        def attend(*qkv: Tensor) -> Tensor:
            attended.extend(qkv)
            return ours._attend(*qkv)

        rest = None, table, after, attend
        ours(x, *rest)
        *_, amax = fp8.DecoderLayer.of(ours, 1.0)(x, *rest)
        inner = float(amax.max()) / fp8.LARGEST
        out, given, again = fp8.DecoderLayer.of(ours, inner)(x, *rest)
    torch.testing.assert_close(again, amax)
    for wide, mine in zip(attended[:3], attended[3:6], strict=True):
        assert (mine.float() - wide.float()).norm() < 0.05 * wide.float().norm()
    branch = truth - x  # the stream itself is not quantised
    assert (out - truth).norm() < 0.08 * branch.norm()
    holds_norm(given, out.double().flatten(0, 1), norm.weight.detach())


def test_gradients_are_refused(pair: tuple[Layer, RMSNorm, DecoderLayer]) -> None:
    t = drawn(SHAPES[0])
    o, gate_up, down = (fp8.quantised(t[n]) for n in ("o", "gate_up", "down"))
    given = fp8.normed(t["x"], t["gamma"], EPS)
    for name in ("a", "x", "gamma"):
        mine = t | {name: t[name].clone().requires_grad_()}
        args = mine["a"], o, mine["x"], mine["gamma"], EPS
        with pytest.raises(ValueError, match="no gradients and an input requires one; call them"):
            fp8.linear_residual_norm(*args)
        with torch.no_grad():
            fp8.linear_residual_norm(*args)
        if name != "a":
            with pytest.raises(ValueError, match="no gradients"):
                fp8.mlp(mine["x"], given, gate_up, down, 1.0, mine["gamma"], EPS)
            with pytest.raises(ValueError, match="no gradients"):
                fp8.normed(mine["x"], mine["gamma"], EPS)
    layer = fp8.DecoderLayer.of(pair[2], 1.0)
    norm = pair[2].mlp_norm
    with pytest.raises(ValueError, match="no gradients"):
        layer(bf16(1, 3, Config().width), None, None, norm, pair[2]._attend)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    for shape in ((40, 64), (64, 40), (64,)):
        for quantise in (fp8.quantised, fp8.quantised_whole):
            with pytest.raises(ValueError, match=r"a weight is \(.*expected \(N, K\) in multiples"):
                quantise(bf16(*shape))
    t = drawn(SHAPES[0])
    given = fp8.normed(t["x"], t["gamma"], EPS)
    weights = fp8.quantised(t["gate_up"]), fp8.quantised(t["down"])
    with pytest.raises(ValueError, match=r"inner is 0\.0, expected a positive scale"):
        fp8.mlp(t["x"], given, *weights, 0.0, t["gamma"], EPS)
    gelu = DecoderLayer(32, 32, 2, 1, 16, activation="gelu")
    for layer, what in (
        (gelu, "gate 'gelu'"),
        (DecoderLayer(32, 32, 2, 1, 16, qk_norm=True), "norms of heads"),
    ):
        with pytest.raises(ValueError, match=f"a layer with {what} has no FP8 kernels"):
            fp8.DecoderLayer.of(layer, 1.0)
