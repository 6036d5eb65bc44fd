"""Rotated queries and keys, as models spell them: the rotation is in the product's kernel, and what
looks like one is right too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.fuse import fuse
from coda_agent.fuse.show import Shown
from tests.fuse.test_joint import compared
from tests.fuse.test_regions import D, drawn
from tests.fuse.test_rules import both

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
ROWS = 24


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def by_chunks(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def by_slices(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def exchanged(x: Tensor) -> Tensor:
    return torch.cat((*x.chunk(2, -1)[::-1],), -1)


def other_sign(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((b, -a), -1)


def in_order(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-a, b), -1)


def unequal(x: Tensor) -> Tensor:
    a, b = x.split([x.shape[-1] // 4, x.shape[-1] * 3 // 4], -1)
    return torch.cat((-b, a), -1)


def attention(turned: Callable[[Tensor], Tensor], width: int, permuted: bool) -> Callable[..., Any]:
    """Projections of one x, with or without biases; queries and keys are rotated."""

    def function(x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        count = len(weights) // 3
        y = [F.linear(x, *weights[i : i + count]) for i in range(0, len(weights), count)]
        q, k, v = (t.view(*x.shape[:-1], -1, width) for t in y)
        if permuted:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        cos, sin = (t.unsqueeze(1 if permuted else -2) for t in (cos, sin))
        return *(t * cos + turned(t) * sin for t in (q, k)), v

    return function


def given(width: int, heads: int, kv: int, *, biased: bool, permuted: bool) -> list[Tensor]:
    lead = (2, ROWS) if permuted else (2 * ROWS,)
    angle = drawn(*lead, width).float() * 6
    args = [drawn(*lead, D), angle.cos().bfloat16(), angle.sin().bfloat16()]
    for i, n in enumerate((heads * width, kv * width, kv * width)):
        args += [drawn(n, D, seed=i), *([drawn(n, seed=i)] if biased else [])]
    return args


def rotates(shown: Shown) -> bool:
    """Whether the only kernel of a forward graph has all of it."""
    outside = [c.step for c in shown.steps if c.what.startswith("PyTorch")]
    return len(shown.kernels) == 1 and "rotate_half(" in shown.kernels[0][0] and not outside


@pytest.mark.parametrize(
    ("turned", "width", "heads", "kv", "biased", "permuted"),
    [
        (by_chunks, 64, 4, 2, False, False),
        (by_slices, 128, 2, 2, True, False),
        (by_chunks, 64, 4, 2, True, True),
        (by_slices, 128, 4, 1, False, False),  # one head has no columns beside its own
    ],
)
@pytest.mark.one_in(2)
def test_rotated_queries_and_keys_and_values_are_one_kernel(
    turned: Any, width: int, heads: int, kv: int, biased: bool, permuted: bool
) -> None:
    args = given(width, heads, kv, biased=biased, permuted=permuted)
    shown = compared(attention(turned, width, permuted), args)
    assert rotates(shown)
    ((_, program),) = shown.kernels
    assert len(program["outputs"]) == 1  # queries, keys and values are ranges of its columns
    assert {*program["operands"].values()} <= {"PositionTable", "RowVector"}


def by_split(y: Tensor, heads: int, kv: int, width: int) -> list[Tensor]:
    parts = y.split([heads * width, kv * width, kv * width], -1)
    return [t.unflatten(-1, (-1, width)) for t in parts]


def by_heads(y: Tensor, heads: int, kv: int, width: int) -> list[Tensor]:
    y = y.unflatten(-1, (-1, width))
    return [y[..., :heads, :], y[..., heads : heads + kv, :], y[..., heads + kv :, :]]


def by_thirds(y: Tensor, heads: int, kv: int, width: int) -> list[Tensor]:
    y = y.reshape(2, -1, 3, heads, width).permute(2, 0, 1, 3, 4)
    return [t.flatten(0, 1) for t in y.unbind(0)]


def packed(parted: Any, heads: int, kv: int, width: int) -> Callable[..., tuple[Tensor, ...]]:
    """Queries, keys and values of one weight."""

    def function(x: Tensor, cos: Tensor, sin: Tensor, w: Tensor, *bias: Tensor) -> Any:
        y = F.linear(x, w, *bias)
        q, k, v = parted(y if bias else y * 0.5, heads, kv, width)
        cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        return *(t * cos + by_chunks(t) * sin for t in (q, k)), v

    return function


@pytest.mark.parametrize(
    ("parted", "heads", "kv", "biased"),
    [(by_split, 4, 2, True), (by_heads, 4, 1, False), (by_thirds, 2, 2, True)],
)
def test_parts_of_one_weight_are_rotated_apart(
    parted: Any, heads: int, kv: int, biased: bool
) -> None:
    x, cos, sin, *_ = given(64, 4, 2, biased=False, permuted=False)
    n = (heads + 2 * kv) * 64
    args = [x, cos, sin, drawn(n, D), *([drawn(n)] if biased else [])]
    shown = compared(packed(parted, heads, kv, 64), args)
    assert rotates(shown)
    ((_, program),) = shown.kernels
    assert str(program["nodes"]).count("rotate_half") == 1  # queries and keys alike
    assert len(program["outputs"]) == 1


def test_parts_of_one_transposed_weight_have_gradients() -> None:
    x, cos, sin, *_ = given(64, 4, 2, biased=False, permuted=False)

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        c, s = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
        q, k, v = by_split(torch.addmm(b, x, w), 4, 2, 64)
        q, k = (t * c + by_chunks(t) * s for t in (q, k))
        return torch.cat([q.sin(), k.cos(), v.exp()], 1)

    shown = both(function, [x, drawn(D, 512), drawn(512)])
    assert sum("rotate_half(" in text for text, _ in shown.kernels) == 1


def overlapping(y: Tensor) -> tuple[Tensor, ...]:
    return y[:, :256].sigmoid(), y[:, 128:].exp()


def with_the_whole(y: Tensor) -> tuple[Tensor, ...]:
    return y[:, :256].sigmoid(), y[:, 256:].exp(), y.relu()


def with_a_gap(y: Tensor) -> tuple[Tensor, ...]:
    return y[:, :128].sigmoid(), y[:, 256:].exp()


def with_rows_left_out(y: Tensor) -> tuple[Tensor, ...]:
    return y[:32, :256].sigmoid(), y[:, 256:].exp()


def in_turns(y: Tensor) -> tuple[Tensor, ...]:
    return y[:, ::2].sigmoid(), y[:, 1::2].exp()


def by_head(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = y.unflatten(-1, (2, 3, -1)).unbind(-2)
    return q.sigmoid(), k.exp(), v.relu()


def twice(y: Tensor) -> tuple[Tensor, ...]:
    return y[:, :256].sigmoid(), y[:, :256].exp(), y[:, 256:]


def with_a_statistic(y: Tensor) -> tuple[Tensor, ...]:
    latent, pe = y.split([256, y.shape[1] - 256], -1)
    return F.rms_norm(latent, (256,)), pe.sin()


@pytest.mark.parametrize(
    "parted",
    [
        *(overlapping, with_the_whole, with_a_gap, with_rows_left_out),
        *(in_turns, by_head, twice, with_a_statistic),
    ],
)
def test_columns_that_are_taken_apart_otherwise_are_right(parted: Any) -> None:
    shown = compared(lambda x, w: parted(F.linear(x, w)), [drawn(48, D), drawn(384, D)])
    assert len(shown.kernels) <= 1


@pytest.mark.parametrize("biased", [False, True])
def test_a_forward_pass_with_gradients_rotates_in_the_kernel(biased: bool) -> None:
    x, cos, sin, *weights = given(64, 4, 2, biased=biased, permuted=True)
    projected = attention(by_chunks, 64, permuted=True)

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = projected(x, cos.to(x.dtype), sin.to(x.dtype), *weights)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    shown = both(function, [x, *weights])
    assert sum("rotate_half(" in text for text, _ in shown.kernels) == 1
    (step,) = (c for c in shown.steps if "cat, cat_1" in c.what)
    assert step.step.count(" + ") == 2  # neither queries nor keys are stored as they were before


def test_a_norm_before_the_rotation_keeps_its_statistic_for_the_gradient() -> None:
    x, cos, sin, w, *_ = given(64, 4, 2, biased=False, permuted=False)

    def function(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        q = F.rms_norm(F.linear(x, w).unflatten(-1, (-1, 64)), (64,), g, 1e-6)
        return q * cos.to(x.dtype)[:, None] + by_chunks(q) * sin.to(x.dtype)[:, None]

    shown = both(function, [x, w, drawn(64).abs() + 0.5])
    assert "rotate_half(" in shown.kernels[0][0]
    assert "GroupTile64" in {kind for kind, _ in shown.kernels[0][1]["outputs"].values()}


@pytest.mark.parametrize(
    ("turned", "permuted"),
    [(exchanged, False), (other_sign, True), (in_order, False), (unequal, True)],
)
def test_what_looks_like_a_rotation_is_right(turned: Any, permuted: bool) -> None:
    args = given(64, 4, 2, biased=False, permuted=permuted)
    compared(attention(turned, 64, permuted), args)


@pytest.mark.parametrize("width", [96, 256])
@pytest.mark.one_in(2)
def test_heads_of_a_width_that_no_kernel_rotates_are_right(width: int) -> None:
    args = given(width, 4, 2, biased=False, permuted=True)
    shown = compared(attention(by_chunks, width, permuted=True), args)
    assert not any("rotate_half(" in text for text, _ in shown.kernels)


def test_a_part_of_a_head_is_rotated_right() -> None:
    def partly(x: Tensor) -> Tensor:
        a, b = x[..., :32], x[..., 32:]
        return torch.cat((by_slices(a), b), -1)

    compared(attention(partly, 64, permuted=True), given(64, 4, 2, biased=False, permuted=True))


@pytest.mark.parametrize("unbound", [False, True])
def test_pairs_are_rotated_in_the_kernel(unbound: bool) -> None:
    def function(x: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> Tensor:
        q = F.linear(x, w).unflatten(-1, (-1, 32, 2))
        a, b = q.unbind(-1) if unbound else (q[..., 0], q[..., 1])
        c, s = cos[:, None, :32], sin[:, None, :32]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)

    shown = compared(function, given(64, 4, 2, biased=False, permuted=False)[:4])
    assert len(shown.kernels) == 1 and "interleave(" in shown.kernels[0][0]


def test_gate_and_up_of_one_weight_are_halves_of_its_product() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up

    (kernel,) = compared(function, [drawn(ROWS, D), drawn(2 * D, D)]).kernels
    assert {kind for kind, _ in kernel[1]["outputs"].values()} == {"HalfTile"}


def test_what_is_split_by_a_size_that_changes_stays(recwarn: pytest.WarningsRecorder) -> None:
    function = attention(by_chunks, 64, permuted=False)
    args = given(64, 4, 2, biased=False, permuted=False)
    with torch.no_grad():
        for got, own in zip(fuse(function, dynamic=True)(*args), function(*args), strict=True):
            assert torch.allclose(got, own, atol=1e-2, rtol=1e-2)
    assert not any("left as it was" in str(warning.message) for warning in recwarn)
