"""What looks like what a rule reads, and is something else: results and gradients are eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.fuse import backend, explain, head
from coda_agent.fuse.backend import coda
from tests.fuse.test_regions import drawn

M, K, N = 48, 32, 64


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*interpreted by PyTorch")
        warnings.filterwarnings("error", message=".*left as it was")
        yield


X, W = drawn(M, K), drawn(N, K, seed=1) / 4
MASK = torch.rand(M, N, generator=torch.Generator().manual_seed(2)) > 0.5
ROW = torch.rand(M, 1, generator=torch.Generator().manual_seed(3)) > 0.5
AT = torch.randint(0, N, (1, 3), generator=torch.Generator().manual_seed(4))
LABELS = torch.randint(0, N, (M,), generator=torch.Generator().manual_seed(10))


class Silu(torch.autograd.Function):
    """A function whose `backward` AOTAutograd does not tag as the backward pass's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * s * (1 + x * (1 - s))


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.T).float()


def a_softmax_by_hand(x: Tensor, w: Tensor) -> Tensor:
    e = (product(x, w) - product(x, w).amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def scaled_by_its_largest(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    return z / z.abs().amax(-1, keepdim=True)


def the_largest_of_a_gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w.T).amax(-1)


def the_smallest_of_columns(x: Tensor, w: Tensor) -> Tensor:
    return product(x, w).amin(0)


def places_of_the_largest(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    return (z == z.amax(-1, keepdim=True)).sum(-1) + z.tanh()[:, 0]


def no_less_than_the_largest(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    return ((z - z.amax(-1, keepdim=True)) >= 0).sum(-1) + z.tanh()[:, 0]


def a_masked_scaled_softmax(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    return torch.where(MASK, (z - z.amax(-1, keepdim=True)) * 0.125, -1e9).softmax(-1)


def a_masked_difference(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    return torch.where(MASK, (z - z.amax(-1, keepdim=True)) * 0.125, z.tanh() - 3)


def a_shift_of_choice(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    m = torch.where(ROW, 0.0, z.amax(-1, keepdim=True))
    return (z - m).exp().sum(-1, keepdim=True).log() + m


def gathered_of_one_row(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    return (z - z.logsumexp(-1, keepdim=True)).gather(1, AT)


def a_value_and_itself(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.T).tanh() * (torch.arange(N) == torch.arange(N))


def a_function_of_the_users(x: Tensor, w: Tensor) -> Tensor:
    return Silu.apply(F.linear(x, w, w[:, 0]))


def another_between_products(x: Tensor, w: Tensor) -> Tensor:
    return Silu.apply(x @ w.T) @ w


def a_distance_from_the_largest(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    return (z.amax(-1, keepdim=True) - z + 1e-6).sqrt()


def floors_of_shares(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w).abs() + 0.5
    return (z / z.amax(-1, keepdim=True)).floor() + z


def a_product_with_the_logarithm(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    z = z - z.amax(-1, keepdim=True)
    return z * z.exp().sum(-1, keepdim=True).log()


def one_hot_of_halves(x: Tensor, w: Tensor) -> Tensor:
    hot = torch.where(torch.arange(M)[:, None] + 0.5 == torch.arange(N), 1.0, 0.0)
    return (hot * product(x, w)[:, :1]).sum(-1, keepdim=True) + product(x, w).tanh()


def a_permutation_from_the_end(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.T)[None].permute(-1, 1, 0).float().tanh()


def parts_that_are_written(x: Tensor, w: Tensor) -> Tensor:
    a = product(x, w).log_softmax(-1)
    s = torch.stack([a, (a * 2).log_softmax(-1)])
    s[0] += 1.5
    return s.logsumexp(0)


def a_bias_of_each_row(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, torch.cat([w] * 8), torch.ones(M, 8 * N, dtype=torch.bfloat16))[1:].tanh()


def a_softmax_of_large_numbers(x: Tensor, w: Tensor) -> Tensor:
    return ((x * 2.0**17) @ w.T).softmax(-1)


def a_cumulative_product(x: Tensor, w: Tensor) -> Tensor:
    return product(x, w).sigmoid().cumprod(-1)


def the_first_of_bools(x: Tensor, w: Tensor) -> Tensor:
    return product(x, w).relu() + MASK.max(1).indices[:, None]


def four_parts_of_two_products(x: Tensor, w: Tensor) -> Tensor:
    i, j, g, o = (x @ w.T + x.flip(0) @ w.T).float().chunk(4, -1)
    return i * j + g * o


def halves_of_two_products(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w.T)[:, :32].float(), ((x.flip(0) @ w.T)[:, 32:] * 0.5).float()
    return torch.lerp(a, b, 0.3)


def rows_by_a_named_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, weight=w)[1:].tanh()


def a_loss_by_a_named_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight=w).float(), LABELS)


def a_loss_of_the_first_half(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.T).chunk(2, -1)[0].float(), LABELS % 32)


def a_loss_of_the_larger_of_pairs(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).view(M, -1, 2).max(-1)[0].float(), LABELS % 32)


def a_loss_of_scores_by_a_vector(x: Tensor, w: Tensor) -> Tensor:
    scores = F.linear((x @ w.T).relu().view(4, -1, N), torch.ones(N, dtype=x.dtype))
    return F.cross_entropy(scores.float(), LABELS[:4] % 12)


LOOKALIKES: list[Callable[[Tensor, Tensor], Tensor]] = [
    a_softmax_by_hand, scaled_by_its_largest, the_largest_of_a_gelu, the_smallest_of_columns,
    places_of_the_largest, no_less_than_the_largest, a_masked_scaled_softmax, a_masked_difference,
    a_shift_of_choice, gathered_of_one_row, a_value_and_itself, a_function_of_the_users,
    another_between_products,
    a_distance_from_the_largest, floors_of_shares, a_product_with_the_logarithm, one_hot_of_halves,
    a_permutation_from_the_end, parts_that_are_written, a_bias_of_each_row,
    a_softmax_of_large_numbers, a_cumulative_product, the_first_of_bools,
    four_parts_of_two_products, halves_of_two_products, rows_by_a_named_weight,
    a_loss_by_a_named_weight, a_loss_of_the_first_half, a_loss_of_the_larger_of_pairs,
    a_loss_of_scores_by_a_vector,
]  # fmt: skip


def ran(function: Callable[..., Tensor], *args: Tensor, weight: Tensor) -> list[Tensor]:
    """What a function gives, and the weight's gradient of a sum of its elements' own shares."""
    w = weight.detach().clone().requires_grad_()
    out = function(*args, w)
    shares = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out.float() * shares).sum().backward()
    assert w.grad is not None
    return [out.detach(), w.grad]


def compare(got: list[Tensor], expected: list[Tensor], within: float = 2e-2) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert float((one.double() - other.double()).norm()) <= within * float(
            other.double().norm()
        )


@pytest.mark.parametrize("function", LOOKALIKES)
@pytest.mark.one_in(2)
def test_results_and_gradients_are_those_of_eager(function: Callable[..., Tensor]) -> None:
    compiled = torch.compile(function, backend=coda)
    compare(ran(compiled, X, weight=W), ran(function, X, weight=W))
    with torch.no_grad():
        compare([compiled(X, W)], [function(X, W)])


def ranks_of_labels(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w)
    return (z > z.gather(1, LABELS[:, None])).sum(-1)


def sums_of_shares(x: Tensor, w: Tensor) -> Tensor:
    e = product(x * 64, w).exp()
    return (e / e.sum(-1, keepdim=True)).sum(-1)


def rows_of_one_number_normalised(x: Tensor, w: Tensor) -> Tensor:
    z = product(x, w[:1].expand(N, K))
    return 1 + (z - z.mean(-1, keepdim=True)) * torch.rsqrt(z.var(-1, keepdim=True) + 1e-12)


def a_high_part_and_the_rest(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = product(x, w) * torch.linspace(1, 2, N)
    high = a.bfloat16()
    return high, a - high.float()


def sums_of_shares_of_halves(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x * 4 @ (w * 4).T).chunk(2, -1)
    e = (gate * up).float().exp()
    return (e / e.sum(-1, keepdim=True)).sum(-1)


def probabilities_beside_a_copy(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = product(x * 16, w) / 0.7
    return a.bfloat16().isfinite(), a.log_softmax(-1).exp().sum(-1)


def a_spread_by_second_moments(x: Tensor, w: Tensor) -> Tensor:
    z = product(x * 0.01, w) + (x @ w[:1].T) * 64
    z = z.bfloat16().float()
    mean = z.mean(-1, keepdim=True)
    return ((z * z).mean(-1, keepdim=True) - mean * mean + 1e-5).isnan().sum(-1) + 1


def the_most_likely(x: Tensor, w: Tensor) -> Tensor:
    z = x * 16 @ w.T
    return (z.amax(-1).float() - z.float().logsumexp(-1)).clamp(min=0).sum() + 1


def constant_columns_normalised(x: Tensor, w: Tensor) -> Tensor:
    z = product(x[:1].expand(M, K), w)
    return 1 + (z - z.sum(0) / M) * 64


def roundings_met_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    a = product(x, w) * torch.linspace(1, 2, N)
    q = a.bfloat16().float()
    near = a.logsumexp(-1) - q.logsumexp(-1)
    found = torch.add(a, q, alpha=-1), a / q - 1, near, a.sum(-1) - q.sum(-1)
    return torch.stack([t.norm() > 1e-5 for t in found]).float()


def whole_by_a_large_number(x: Tensor, w: Tensor) -> Tensor:
    return (product(x, w) * 100 + 12582912.0) - 12582912.0


def what_leaves_float16(x: Tensor, w: Tensor) -> Tensor:
    return (product(x, w) * 1e6).half().float().abs().amax(-1)[:4].clamp(max=1e9)


def millions_for_each(x: Tensor, w: Tensor) -> Tensor:
    return ((product(x, w) > 0).long() * 1000003).sum(-1)


def lengths_beyond_float32(x: Tensor, w: Tensor) -> Tensor:
    return product(x * 2.0**80, w).double().square().sum(-1).sqrt()


DIGITS: list[Callable[[Tensor, Tensor], Any]] = [
    ranks_of_labels, sums_of_shares, rows_of_one_number_normalised, a_high_part_and_the_rest,
    millions_for_each, lengths_beyond_float32, sums_of_shares_of_halves,
    probabilities_beside_a_copy, a_spread_by_second_moments, the_most_likely,
    constant_columns_normalised, roundings_met_elsewhere, whole_by_a_large_number,
    what_leaves_float16,
]  # fmt: skip


@pytest.mark.parametrize("function", DIGITS)
def test_digits_are_those_of_eager(function: Callable[..., Any]) -> None:
    with torch.no_grad():
        results = (f(X, W) for f in (torch.compile(function, backend=coda), function))
        compare(*([*x] if isinstance(x, tuple) else [x] for x in results), within=1e-4)


def test_what_a_sum_leaves_is_its_rounding() -> None:
    b = torch.linspace(1000, 2000, N)

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = product(x, w)
        s = a + b
        t = s - a
        return s, (a - (s - t)) + (b - t)

    with torch.no_grad():
        s, rest = (t.double() for t in torch.compile(f, backend=coda)(X, W))
    assert rest.any()
    assert torch.equal(s + rest - b, (s + rest - b).bfloat16().double())  # the product


@pytest.mark.parametrize("name", ["a norm", "a divergence", "float64"])
def test_a_head_by_rows_beside_other_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS", 1 << 12)
    dtype = torch.float64 if name == "float64" else torch.bfloat16
    x, w, within = drawn(256, K, seed=8).to(dtype), W.to(dtype), 2e-2
    given = torch.randn(256, N, generator=torch.Generator().manual_seed(11))

    def f(x: Tensor, w: Tensor) -> Tensor:
        z = F.linear(x, w)
        if name == "a norm":
            return z.float().norm()
        if name == "float64":
            return z.tanh().sum()
        p, q = z.float().log_softmax(-1), given.log_softmax(-1)
        return F.kl_div(p, q, log_target=True, reduction="batchmean")

    within = 1e-12 if name == "float64" else within
    compare(ran(torch.compile(f, backend=coda), x, weight=w), ran(f, x, weight=w), within)


def test_a_logsumexp_and_a_size_as_a_factor_with_sizes_that_change() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        z = product(x, w)
        return z.logsumexp(-1), (z * x.shape[0]).relu()

    compiled = torch.compile(f, backend=coda, dynamic=True)
    for rows in (M, M // 2):
        compare([*compiled(X[:rows], W)], [*f(X[:rows], W)])


def test_a_largest_that_nothing_is_compared_with_is_made_by_a_kernel() -> None:
    def quantised(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        z = product(x, w)
        return z.abs().amax(-1), z.tanh()

    with torch.no_grad():
        assert "amax" in str(explain(quantised, X, W))


def test_float16_keeps_a_residual_that_a_weight_takes_out_of_its_range() -> None:
    x, wo, w = (drawn(*s, seed=i).half() / 8 for i, s in enumerate(((M, K), (64, K), (N, 64))))
    res, g = drawn(M, 64, seed=4).half(), torch.ones(64).half()
    res[:, 3], g[3] = 4000, 20

    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.linear(F.rms_norm(res + F.linear(x, wo), (64,), g, 1e-5), w))

    with torch.no_grad():
        compare([torch.compile(f, backend=coda)(x, w)], [f(x, w)])


def test_as_many_rows_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS", 1 << 12)
    labels = torch.randint(0, N, (N,), generator=torch.Generator().manual_seed(6))
    own = torch.rand(N, generator=torch.Generator().manual_seed(7))
    x = drawn(N, K, seed=8)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), labels, weight=own)

    compare(ran(torch.compile(f, backend=coda), x, weight=W), ran(f, x, weight=W))


def test_an_index_that_changes_before_it_is_used() -> None:
    x, w = drawn(M, K), drawn(512, K, seed=1)

    def f(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
        z = F.linear(x, w)
        i.add_(1)
        return z[i].tanh()

    with torch.no_grad():
        got = torch.compile(f, backend=coda)(x, w, torch.arange(4))
        compare([got], [f(x, w, torch.arange(4))])


def test_a_mask_that_is_drawn_is_drawn_at_each_call() -> None:
    q = torch.randn(2, 4, 24, 16, generator=torch.Generator().manual_seed(9))

    def f(q: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.rand(24, 24) < 0.9999
        return F.scaled_dot_product_attention(q, q, q, attn_mask=m), m

    torch.manual_seed(0)  # of which the first draw hides nothing
    compiled = torch.compile(f, backend=coda)
    hidden = 0
    for _ in range(60):
        out, mask = compiled(q)
        hidden += int((~mask).sum())
        expected = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        torch.testing.assert_close(out, expected)
    assert hidden


def test_one_query_head_of_keys_that_are_repeated() -> None:
    q, k = (torch.randn(2, h, 24, 16, generator=torch.Generator().manual_seed(h)) for h in (1, 2))
    mask = torch.ones(24, 24, dtype=torch.bool).tril()

    def f(q: Tensor, k: Tensor) -> Tensor:
        wide = k[:, :, None].expand(2, 2, 2, 24, 16).reshape(2, 4, 24, 16)
        return F.scaled_dot_product_attention(q, wide, wide, attn_mask=mask)

    torch.testing.assert_close(torch.compile(f, backend=coda)(q, k), f(q, k))


def test_parts_that_are_computed_under_autocast_stay_there() -> None:
    graphs: list[list[str]] = []

    def seen(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        from coda_agent.fuse.loops import join_loops

        join_loops(graph.graph)
        graphs.append([n.name for n in graph.graph.nodes])
        return graph.forward

    def f(x: Tensor) -> Tensor:
        y = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            parts = [(part * 2).exp() for part in y]
        return torch.stack(parts)

    torch.compile(f, backend=seen)(torch.randn(2, 4))
    (names,) = graphs
    assert names.index("exp") < names.index("_exit_autocast")


def test_keys_that_are_written_or_turned() -> None:
    q, k = (torch.randn(2, h, 24, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2))
    mask = torch.ones(24, 24, dtype=torch.bool).tril()

    def written(q: Tensor, k: Tensor) -> Tensor:
        wide = k[:, :, None].expand(2, 2, 2, 24, 16).reshape(2, 4, 24, 16)
        wide[..., :8] = 0
        return F.scaled_dot_product_attention(q, wide, wide, attn_mask=mask)

    def turned(q: Tensor, k: Tensor) -> Tensor:
        wide = k[:, [1, 0], None].expand(2, 2, 2, 24, 16).reshape(2, 4, 24, 16)
        return F.scaled_dot_product_attention(q, wide, wide, attn_mask=mask)

    for f in (written, turned):
        torch.testing.assert_close(torch.compile(f, backend=coda)(q, k), f(q, k))


def test_loops_whose_parts_differ() -> None:
    y, i = torch.randn(16, 64), torch.randint(0, 64, (8, 1))
    buffer = torch.zeros(16, 64)

    def fewer_rows(y: Tensor) -> Tensor:
        return torch.cat(
            [(a * 2).gather(-1, b) for a, b in zip(y.split(8), i.split(4), strict=True)]
        )

    def into_a_buffer(y: Tensor) -> Tensor:
        torch.stack([part.exp() for part in y], out=buffer)
        return buffer * 1

    def written_between(y: Tensor) -> Tensor:
        y = y * 1
        z = y
        a = z[0] * 2
        y //= 2
        return torch.stack([a, *(part * 2 for part in z[1:])])

    for f in (fewer_rows, into_a_buffer, written_between):
        torch.testing.assert_close(torch.compile(f, backend=coda)(y), f(y))


def test_rows_of_a_batch_of_one_are_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are others', made by rules: their sizes are symbols, too."""
    graphs, called = [], backend._called
    monkeypatch.setattr(
        backend, "_called", lambda module, *of, **by: graphs.append(1) or called(module, *of, **by)
    )
    largest = lambda x, w: torch.bmm(x[None], w.t()[None]).max(-1).values
    compiled = torch.compile(largest, backend=coda, dynamic=True)
    for rows in (24, 40, 72):
        x, w = drawn(rows, K), drawn(N, K)
        with torch.no_grad():
            assert torch.equal(compiled(x, w), largest(x, w))
    assert len(graphs) == 1
