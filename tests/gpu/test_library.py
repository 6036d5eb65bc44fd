"""Kernels as a library on a Hopper GPU: torch operators, compilation, graphs, odd and huge inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from coda_agent import generated
from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColSum,
    ColVector,
    Program,
    RowGather,
    RowSum,
    Scalar,
    Tile,
    epilogue,
    gather,
)
from coda_agent.runtime.function import ProgramFunction, untuned
from coda_agent.runtime.kernel import Kernel
from coda_agent.specs import draw_inputs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
M, N, K = 300, 272, 64


def given(kernel: Kernel, seed: int = 0) -> list[Any]:
    """The kernel's inputs at a ragged check shape of its spec, scalars as tensors."""
    spec = kernel.spec
    sizes, types = spec.check_shapes[1], spec.default_types()
    values = draw_inputs(spec, sizes, types, seed=seed, device=DEVICE).values()
    return [torch.as_tensor(v, device=DEVICE) for v in values]


def outputs(kernel: Kernel, values: list[Any]) -> tuple[torch.Tensor, ...]:
    results = kernel(*values)
    return results if isinstance(results, tuple) else (results,)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    return drawn.mul_(scale)


def bound(program: Program) -> ProgramFunction:
    return ProgramFunction(program, {}, untuned)


@epilogue(D=Tile, s=RowSum)
def rows(acc, C: Tile, r: ColVector, alpha: Scalar):
    d = alpha * acc * r + C
    return {"D": d, "s": d}


@epilogue(D=Tile, g=ColSum)
def columns(acc):
    return {"D": acc, "g": acc}


@pytest.fixture(scope="module")
def operands() -> dict[str, Any]:
    values = {
        "A": normal(M, K),
        "B": normal(N, K, seed=1, scale=K**-0.5),
        "C": normal(M, N, seed=2),
    }
    r = torch.rand(M, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE)
    return {**values, "r": r, "alpha": 0.5}


def run(values: dict[str, Any], **changed: Any) -> dict[str, torch.Tensor]:
    """`rows` on `values`, some of them changed."""
    values = {**values, **{x: v for x, v in changed.items() if x != "block_size"}}
    a, b = values.pop("A"), values.pop("B")
    return bound(rows)(a, b, values, block_size=changed.get("block_size"))


# Torch's own machinery.

PUBLIC = (
    "gemm_rmsnorm_swiglu",
    "gemm_residual_partial_rmsnorm",
    "gemm_partial_cross_entropy",
    "gemm_bias_act",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_operator(name: str) -> None:
    kernel = getattr(generated, name)
    packet, values = getattr(torch.ops.coda_agent, name), given(kernel)
    if name == "gemm_bias_act":
        torch.library.opcheck(packet.Tensor, tuple(values))
        values = [float(v) if v.ndim == 0 else v for v in values]
    for keywords in ({}, {"block_size": 128}) if name == "gemm_residual_partial_rmsnorm" else ({},):
        torch.library.opcheck(packet.default, tuple(values), keywords)


def test_compiled_without_graph_breaks() -> None:
    kernel = generated.gemm_rmsnorm_swiglu

    def layer(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return kernel(a * 2, b, r)[1].relu()

    values = given(kernel)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(*values), layer(*values))
    torch._dynamo.reset()
    dynamic = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    a, b, r = values
    for m in (40, 56, 8):
        assert torch.equal(dynamic(a[:m], b, r[:m]), layer(a[:m], b, r[:m]))


def test_graph_replays_new_contents() -> None:
    kernels = [getattr(generated, name) for name in PUBLIC]
    values = [given(kernel) for kernel in kernels]

    def run_all() -> list[torch.Tensor]:
        pairs = zip(kernels, values, strict=True)
        return [t for kernel, inputs in pairs for t in outputs(kernel, inputs)]

    run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_all()
    for seed in (1, 2):
        for kernel, inputs in zip(kernels, values, strict=True):
            for held, fresh in zip(inputs, given(kernel, seed), strict=True):
                held.copy_(fresh)
        for t in captured:
            t.fill_(77)
        graph.replay()
        for got, want in zip(captured, run_all(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", PUBLIC)
def test_no_call_waits_for_the_device(name: str) -> None:
    kernel = getattr(generated, name)
    values = given(kernel)
    outputs(kernel, values)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second
    outputs(kernel, values)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def launches(call: Callable[[], Any]) -> list[str]:
    """Names of what `call` runs on the device, once compiled."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [e.name for e in seen.events() or () if e.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("block", [64, 128, 192, 256])
def test_partials_of_each_block_come_from_one_launch(operands: dict[str, Any], block: int) -> None:
    a, b, c, r = (operands[x] for x in ("A", "B", "C", "r"))
    product = a.float() @ b.float().T
    d = 0.5 * product * r[:, None] + c.float()
    by_rows = run(operands, block_size=block)["s"]
    by_columns = bound(columns)(a, b, {}, block_size=block)["g"]
    torch.testing.assert_close(by_rows, RowSum.partials(d, block), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(by_columns, ColSum.partials(product, block), rtol=1e-5, atol=1e-4)
    for call in (
        lambda: run(operands, block_size=block),
        lambda: bound(columns)(a, b, {}, block_size=block),
    ):
        assert len(found := launches(call)) == 1, found


# Odd operands.


def test_leading_dimensions(operands: dict[str, Any]) -> None:
    want = run(operands)
    lead = (2, 3, 50)
    batched = {x: operands[x].reshape(*lead, *operands[x].shape[1:]) for x in ("A", "C", "r")}
    got = run(operands, **batched)
    assert got["D"].shape == (*lead, N) and got["s"].shape == lead
    for o in want:
        assert torch.equal(got[o].flatten(0, 2), want[o])


def test_no_rows(operands: dict[str, Any]) -> None:
    empty = {x: operands[x][:0] for x in ("A", "C", "r")}
    got, raw = run(operands, **empty), run(operands, **empty, block_size=128)
    assert got["D"].shape == (0, N) and got["s"].shape == (0,) and raw["s"].shape == (0, 3)
    a, b = empty["A"], operands["B"]
    assert torch.equal(bound(columns)(a, b, {})["g"], torch.zeros(N, device=DEVICE))
    assert bound(columns)(a, b, {}, block_size=128)["g"].shape == (N, 0)


def test_few_rows_and_ragged_ones(operands: dict[str, Any]) -> None:
    want = run(operands)
    for m in (1, 2, 7, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        got = run(operands, **{x: operands[x][:m] for x in ("A", "C", "r")})
        for o in want:
            assert torch.equal(got[o], want[o][:m]), (o, m)


def padded(t: torch.Tensor, columns: int, start: int = 0) -> torch.Tensor:
    """`t` inside rows that have `columns` elements more."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + columns), 9, dtype=t.dtype, device=t.device)
    wide[..., start : start + t.shape[-1]] = t
    return wide[..., start : start + t.shape[-1]]


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.T.contiguous().T


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows of 16 bytes more": lambda t: padded(t, 8),
    "rows of 2 bytes more": lambda t: padded(t, 1),
    "a start off by 2 bytes": lambda t: padded(t, 8, 1),
    "a start off by 16 bytes": lambda t: padded(t, 16, 8),
    "transposed": transposed,
    "transposed, columns of 16 bytes": lambda t: padded(t.T, -t.shape[0] % 8 + 8).T,
    "every other column": lambda t: torch.stack([t, t + 1], -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_and_offsets_do_not_matter(operands: dict[str, Any], view: str) -> None:
    want = run(operands)
    for x in ("A", "B", "C"):
        got = run(operands, **{x: VIEWS[view](operands[x])})
        for o in want:
            torch.testing.assert_close(got[o], want[o], rtol=2**-7, atol=1e-4)


def test_a_row_at_an_odd_stride_and_expanded_operands(operands: dict[str, Any]) -> None:
    want = run(operands, **{x: operands[x][:1] for x in ("A", "C", "r")})
    odd = {x: padded(operands[x], 7)[:1] for x in ("A", "C")}
    got = run(operands, **odd, r=operands["r"][:1])
    same = {"A": operands["A"][:1].expand(5, K), "C": operands["C"][:1].expand(5, N)}
    five = run(operands, **same, r=operands["r"][:1].expand(5))
    for o in want:
        assert torch.equal(got[o], want[o]), o
        assert torch.equal(five[o], want[o].expand_as(five[o])), o


def test_a_scalar_read_by_the_kernel(operands: dict[str, Any]) -> None:
    numbers = torch.tensor([9.0, 0.5, -2.0], device=DEVICE)
    for i, value in ((1, 0.5), (2, -2.0)):
        want = run(operands, alpha=value)
        for alpha in (numbers[i], numbers[i : i + 1]):
            assert torch.equal(run(operands, alpha=alpha)["D"], want["D"])


def test_adding_in_place() -> None:
    @epilogue(X=AddTile)
    def program(acc):
        return {"X": acc}

    generator = torch.Generator(DEVICE).manual_seed(0)
    a, b, x = (
        torch.randint(-1, 2, shape, generator=generator, device=DEVICE).bfloat16()
        for shape in ((M, K), (N, K), (M, N))
    )
    want = x + a @ b.T  # integers of at most 65: exact
    for held in (x.clone(), padded(x, 8), padded(x, 1), transposed(x)):
        got = bound(program)(a, b, {"X": held})
        assert got["X"] is held
        assert torch.equal(held, want)


# Sizes past 32 bits: 2³² elements an output.

HUGE_M, HUGE_N = 131072, 32768
SAMPLE = [0, 1, 127, 128, 16383, 16384, 32767, 65535, 65536, 65537, 100_001, 131_070, 131_071]


def test_huge_pairs() -> None:
    a, b = normal(HUGE_M, K), normal(HUGE_N, K, seed=1, scale=K**-0.5)
    r = torch.rand(HUGE_M, device=DEVICE) + 0.5
    d, o = generated.gemm_rmsnorm_swiglu(a, b, r)
    want = (a[SAMPLE].float() @ b.float().T) * r[SAMPLE, None]
    gated = torch.nn.functional.silu(want[:, 0::2]) * want[:, 1::2]
    torch.testing.assert_close(d[SAMPLE].float(), want, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(o[SAMPLE].float(), gated, rtol=2**-7, atol=1e-3)


@epilogue(D=Tile, s=RowSum, g=ColSum, t=RowGather)
def everything(acc, C: Tile, y: ColIndex):
    d = acc + C
    return {"D": d, "s": d, "g": d, "t": gather(acc, y)}


def test_huge_tiles_sums_and_gathers() -> None:
    a, b = normal(HUGE_M, K), normal(HUGE_N, K, seed=1, scale=K**-0.5)
    c = normal(HUGE_M, HUGE_N, seed=2)
    y = torch.randint(HUGE_N, (HUGE_M,), device=DEVICE)
    got = bound(everything)(a, b, {"C": c, "y": y})
    want = a[SAMPLE].double() @ b.double().T + c[SAMPLE].double()
    torch.testing.assert_close(got["D"][SAMPLE].double(), want, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(got["s"][SAMPLE].double(), want.sum(-1), rtol=1e-4, atol=1e-2)
    chosen = [0, 1, 127, 128, 16384, 32767]
    sums = (a.double() @ b[chosen].double().T + c[:, chosen].double()).sum(0)
    torch.testing.assert_close(got["g"][chosen].double(), sums, rtol=1e-4, atol=5e-2)
    found = (a.float() * b[y].float()).sum(-1)
    torch.testing.assert_close(got["t"], found, rtol=1e-4, atol=1e-4)


def test_labels_may_begin_anywhere() -> None:
    """Labels are most often those of the next token, a slice that begins where it likes."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    h, w = (
        torch.randn(size, K, generator=generator, device=DEVICE).bfloat16() * K**-0.5
        for size in (M, 512)
    )
    labels = torch.randint(0, 512, (M + 4,), generator=generator, device=DEVICE)
    for start in range(5):
        given = labels[start : start + M]
        for got, want in zip(
            generated.gemm_partial_cross_entropy(h, w, given),
            generated.gemm_partial_cross_entropy(h, w, given.clone()),
            strict=True,
        ):
            assert torch.equal(got, want), start


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("gemm_rmsnorm_rope", ["D"]),
        ("gemm_rmsnorm_swiglu", ["D"]),
        ("gemm_rmsnorm_partial_cross_entropy", ["Z"]),
        ("gemm_residual_partial_rmsnorm", ["D", "s"]),
        ("gemm_fp8_rmsnorm_rope", ["D"]),
        ("gemm_fp8_rmsnorm_swiglu_quantised", ["amax"]),
    ],
)
def test_what_is_left_of_a_kernel_is_what_it_was(name: str, dropped: list[str]) -> None:
    kernel: Kernel = getattr(generated, name)
    less, values = kernel.without(*dropped), given(kernel)
    whole = dict(zip(kernel.spec.outputs, outputs(kernel, values), strict=True))
    for o, got in zip(less.spec.outputs, outputs(less, values), strict=True):
        torch.testing.assert_close(got.float(), whole[o].float(), rtol=2**-6, atol=2**-8)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        less(*values)
        torch.cuda.synchronize()
    launched = [e for e in seen.events() or () if e.device_type == DeviceType.CUDA]
    assert len(launched) <= 1 + any(o in less.spec.outputs for o in ("s", "lse", "amax"))
