"""Which way runs a graph: timed on a GPU, and kept."""

import math
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import compile_fx, config

from coda_agent.agent.execution import pool as pools
from coda_agent.agent.judge import timing, tuner
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.samples import Samples
from coda_agent.fuse import backend, build, choice, fuse, joint, kernels, verify
from coda_agent.fuse import timing as ways
from coda_agent.fuse.around import around
from coda_agent.fuse.kernels import chosen
from coda_agent.fuse.record import recorded
from coda_agent.fuse.rules import prepare
from coda_agent.primitives.errors import CompileError, MachineError
from coda_agent.primitives.tiles import UNFUSED, TileConfig
from coda_agent.runtime import program_operator, tile_choice
from coda_agent.runtime.tile_choice import TileChoice
from tests.fuse.test_regions import D, H, drawn

CAT = torch.ops.aten.cat.default


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The name of a GPU, and an empty cache of verdicts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")


def test_whether_a_kernel_pays_is_timed_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, a_gpu: None
) -> None:
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, tensors: graph)
    us, timed = {"torch.compile": 3.0, "the kernel": 2.0}, []

    def times(runs: Any) -> tuple[str, dict[str, float]]:
        results = {name: run()[0] for name, run in runs.items()}
        timed.append(results)
        assert torch.allclose(*results.values(), atol=3e-2, rtol=2e-2)
        return min(us, key=us.__getitem__), us

    def lost(rows: int) -> str:
        args = [drawn(rows, H), drawn(D, H)]
        graph = recorded(lambda x, w: F.silu(F.linear(x, w)), args).graph
        known, kernels = chosen(graph)
        (region,) = known.regions
        found = choice.timed(around(known, region), kernels[region], torch.device("cpu"))
        assert isinstance(found, str) or found.times == "in us torch.compile 3.0, the kernel 2.0"
        return found if isinstance(found, str) else ""

    monkeypatch.setattr(choice, "fastest", times)
    assert lost(24) == lost(24) == "" and len(timed) == 1
    us["torch.compile"] = 1.5
    assert lost(24) == "" and len(timed) == 1
    assert lost(40) == "gains nothing: in us torch.compile 1.5, the kernel 2.0"


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def test_frozen_weights_are_packed_before_a_kernel_is_timed(
    monkeypatch: pytest.MonkeyPatch, a_gpu: None
) -> None:
    graphs: list[torch.fx.GraphModule] = []
    given = lambda graph, tensors: graphs.append(graph) or graph
    monkeypatch.setattr(compile_fx, "compile_fx", given)

    def times(runs: Any) -> tuple[str, dict[str, float]]:
        own, got = (run()[0] for run in runs.values())
        assert torch.allclose(own, got, atol=3e-2, rtol=2e-2)
        return "the kernel", dict.fromkeys(runs, 1.0)

    monkeypatch.setattr(choice, "fastest", times)

    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:  # no rows of weights are dense
        return F.silu(x @ gate) * (x @ up)

    graph = recorded(gated, [drawn(24, H), drawn(H, D), drawn(H, D)]).graph
    known, kernels = chosen(graph)
    (region,) = known.regions
    for constants, packs in (((), 1), (graph.find_nodes(op="placeholder")[1:], 0)):
        place = around(known, region, constants)
        choice.timed(place, kernels[region], torch.device("cpu"))
        assert len(graphs[-1].graph.find_nodes(op="call_function", target=CAT)) == packs
    assert len(graphs) == 4  # and kept apart


def test_weights_that_inductor_freezes_are_the_same_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (torch.nn.Parameter(drawn(D, H)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return gated(x, self.gate, self.up)

    frozen: list[int] = []
    cut = joint.chosen
    given = lambda graph: frozen.append(len(joint._constants(graph))) or cut(graph)
    monkeypatch.setattr(joint, "chosen", given)
    model, x = Gated(), drawn(24, H)
    for freezing, grad in ((False, False), (True, False), (True, True)):
        torch._dynamo.reset()
        with config.patch(freezing=freezing), torch.set_grad_enabled(grad):
            got = torch.compile(model, backend=backend.coda)(x)
        assert torch.allclose(got, model(x), atol=3e-2, rtol=2e-2)
    assert frozen[0] == frozen[2] == 0 and frozen[1] >= 2


def test_a_kernel_is_timed_with_what_reads_its_results() -> None:
    def turned(x: Tensor, w: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, w).tanh()
        wide = y.flip(-1).float() + s
        mean = y.float().mul(s).sum(-1, keepdim=True)
        return torch.cat((wide, y.float()), -1), mean, F.linear(wide.bfloat16(), v)

    args = [drawn(24, H), drawn(D, H), drawn(24, D), drawn(H, D)]
    known, kernels = chosen(recorded(turned, args).graph)
    region = known.regions[0]
    place = around(known, region)
    called = [getattr(n.target, "__name__", "") for n in place.part.nodes]
    assert {"cat.default", "sum.dim_IntList", "tanh.default"} <= {*called}
    assert called.count("mm.default") == 1 and "flip.default" not in called
    given = verify.drawn(place.part, region, torch.device("cpu"))
    results = torch.fx.GraphModule({}, place.part)(*given)
    for got, own in zip(place.by_kernel(kernels[region].text)(*given), results, strict=True):
        assert torch.allclose(got.float(), own.float(), atol=6e-2, rtol=2e-2)


def test_a_kernel_is_timed_beside_a_product_whose_rows_have_their_factor() -> None:
    """The factor was carried past the product; a norm's kernel would have it in front of it."""

    def normed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.linear(x, w).float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return F.silu(F.linear(y.bfloat16(), v))

    graph = recorded(normed, [drawn(24, H), drawn(D, H), drawn(H, D)]).graph
    assert any("is carried past" in note for note in prepare(graph))
    known, kernels = chosen(graph)
    region = known.regions[-1]
    place = around(known, region)
    given = verify.drawn(place.part, region, torch.device("cpu"))
    named = dict(zip([n.name for n in place.part.find_nodes(op="placeholder")], given, strict=True))
    (rows,) = (x for x in named.values() if isinstance(x, Tensor) and x.shape == (24, 1))
    a, v = (x for x in named.values() if isinstance(x, Tensor) and x.dtype is torch.bfloat16)
    a, v = (a, v) if len(a) == 24 else (v, a)
    product = a @ (v if len(v) == D else v.mT)
    (plain,) = torch.fx.GraphModule({}, place.plain)(*given)
    (ours,) = place.by_kernel(kernels[region].text)(*given)
    assert torch.allclose(plain, F.silu(product), atol=2e-2, rtol=2e-2)
    scaled = F.silu(product.float() * rows.float())
    assert torch.allclose(ours.float(), scaled, atol=3e-2, rtol=2e-2)
    assert not torch.allclose(plain.float(), scaled, atol=3e-2, rtol=2e-2)
    assert place.described != replace(place, plain=place.part).described


def test_results_of_a_graph_are_timed_as_they_are_laid_out() -> None:
    """Slices of what one kernel gives are copied; what is read in the graph is not."""

    def both(x: Tensor, gate: Tensor, up: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        a, b = F.linear(x, gate).tanh(), F.linear(x, up)
        return a, F.linear(b.cos(), v)

    args = [drawn(24, H), drawn(D, H), drawn(D, H, seed=1), drawn(H, D)]
    known, kernels = chosen(recorded(both, args).graph)
    region = next(x for x in known.regions if len(x.products) == 2)
    place = around(known, region)
    given = verify.drawn(place.part, region, torch.device("cpu"))
    found = place.by_kernel(kernels[region].text)(*given)
    nodes: Any = place.part.output_node().args[0]
    results = dict(zip(nodes, found, strict=True))
    laid = {n.name: results[x].is_contiguous() for n, x in place.places.items() if x in results}
    assert laid == {"tanh": True, "cos": False}


def test_a_kernel_takes_the_fastest_of_its_likely_tiles(
    monkeypatch: pytest.MonkeyPatch, a_gpu: None
) -> None:
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, tensors: graph)
    args = [drawn(24, H), drawn(D, H)]
    known, kernels = chosen(recorded(lambda x, w: torch.tanh(F.linear(x, w)), args).graph)
    (region,) = known.regions
    tiles = [TileConfig(128, 192), TileConfig(64, 256, pingpong=True)]
    asked = []

    def likely(_: Any, shape: Any, dtype: str) -> list[TileConfig]:
        asked.append((shape, dtype))
        return [tiles[0], TileConfig(128, 128), tiles[1]]

    def ranked(runs: Any, rounds: int, clock: Any) -> list[tuple[TileConfig, float]]:
        assert [*runs] == tiles
        assert all(run(0)[region.local.outputs[x].name].shape == (24, D) for run in runs.values()
                   for x in region.local.outputs)  # fmt: skip
        return [(tiles[1], 1.0), (tiles[0], 2.0)]

    monkeypatch.setattr(TileChoice, "ranked", likely)
    monkeypatch.setattr(tuner, "ranked", ranked)
    monkeypatch.setattr(choice, "fastest", lambda runs: ("the kernel", dict.fromkeys(runs, 1.0)))
    found = choice.timed(around(known, region), kernels[region], torch.device("cpu"))
    assert not isinstance(found, str) and asked == [((24, D, H), "bfloat16")]
    function = program_operator.function_of(found.text)
    assert function.choose(24, D, H, "bfloat16", None) == tiles[1]
    assert function.choose(48, D, H, "bfloat16", None) is None  # no GPU, no prior
    assert torch.ops.coda_agent.kernel(*args, [], program=found.text)[0].shape == (24, D)


@pytest.mark.parametrize("grad", [False, True])
def test_a_kernel_is_timed_inside_the_compilation_that_asks(
    grad: bool, monkeypatch: pytest.MonkeyPatch, a_gpu: None
) -> None:
    whole = compile_fx.compile_fx  # without a C++ compiler

    def given(
        graph: Any, tensors: Any, inner_compile: Any = backend._called, *rest: Any, **by: Any
    ):
        return whole(graph, tensors, inner_compile, *rest, **by)

    monkeypatch.setattr(compile_fx, "compile_fx", given)
    timed = []

    def times(runs: Any) -> tuple[str, dict[str, float]]:
        timed.append([run() for run in runs.values()])
        return "the kernel", dict.fromkeys(runs, 1.0)

    monkeypatch.setattr(choice, "fastest", times)
    monkeypatch.setattr(joint, "_JUDGED", {})
    judged = joint._judged
    both = lambda *of: choice.timed(*of) and judged(*of)
    monkeypatch.setattr(joint, "_judged", both)

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up)), down) + x

    args = [drawn(24, H), drawn(2 * H, H), drawn(H, 2 * H)]
    found = [[x.clone().requires_grad_(grad) for x in args] for _ in range(2)]
    own, got = mlp(*found[0]), torch.compile(mlp, backend=backend.coda)(*found[1])
    assert torch.allclose(got, own, atol=3e-2, rtol=2e-2)
    assert len(timed) >= 2 and all(len(one) == len(other) for one, other in timed)
    if grad:
        own.sum().backward()
        got.sum().backward()
        for x, y in zip(*found, strict=True):
            assert x.grad is not None and y.grad is not None
            assert float((y.grad - x.grad).norm() / x.grad.norm()) < 2e-2


@pytest.mark.parametrize(
    ("gpu", "loop", "best"),
    [
        ((2.0, 3.0), (9.0, 1.0), "plan"),  # what the GPU takes decides
        ((3.0, 2.0), (1.0, 9.0), "compile"),
        ((2.0, 2.001), (3.0, 2.0), "compile"),  # alike there: a loop does
        ((2.001, 2.0), (2.0, 2.0), "plan"),  # and there
        ((2.0, 2.1), (3.0, 2.0), "plan"),  # not seen to be slower, but it seems so
        ((None, 2.0), (2.0, 3.0), "plan"),  # a host too busy for the judge's clocks
    ],
)
def test_the_fastest_is_that_of_the_gpu_and_else_of_a_loop(
    gpu: tuple[Any, Any], loop: tuple[float, float], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"plan": lambda: None, "compile": lambda: None}
    wide = tuple(1 + 0.01 * i for i in range(-5, 6))  # so intervals of some per cent overlap
    given = [
        Samples(tuple(us * x for x in wide)) if us else Samples((), fault="late") for us in gpu
    ]
    times = lambda calls, rounds: dict(zip(calls, given, strict=True))
    monkeypatch.setattr(timing, "interleave", times)
    monkeypatch.setattr(ways, "times_of", lambda calls: [Samples((us,) * 11) for us in loop])
    kept = gpu if gpu[0] else loop
    assert ways.fastest(runs) == (best, dict(zip(runs, kept, strict=True)))


def rotated(x: Tensor, w: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w).unflatten(-1, (-1, 16))  # of Python, where Dynamo breaks a graph
    one, two = y.chunk(2, -1)
    return torch.cat((-two, one), -1) * cos[:, None], torch.sum(y, [0, 1])


def test_inductor_is_given_one_graph_of_atens_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []
    given = lambda graph, tensors: graphs.append(graph) or graph
    monkeypatch.setattr(compile_fx, "compile_fx", given)
    args = [drawn(24, H), drawn(D, H), drawn(24, 16)]
    run = ways.Inductor(rotated)
    for _ in range(2):
        for got, own in zip(run(*args), rotated(*args), strict=True):
            assert torch.equal(got, own)
    (graph,) = graphs
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert all(isinstance(x, torch._ops.OpOverload) or x is operator.getitem for x in called)


def test_tiles_of_fewer_registers_are_tried_and_none_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = 4096, 4096, 1024
    args = [drawn(4096, 1024), drawn(4096, 1024)]
    known, kernels = chosen(recorded(lambda x, w: torch.tanh(F.linear(x, w)), args).graph)
    (region,) = known.regions
    kernel = kernels[region]
    monkeypatch.setattr(tile_choice, "_gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(build, "_FAILED", set())
    likely = TileChoice("", region.local.program).ranked(shape, "bfloat16")
    before = build.tiles_of(kernel, shape)
    assert before[0] == likely[0] and len(before) == 2
    assert all(x.dynamic for x in build.tiles_of(kernel, (1 << 15, 1 << 15, 1024)))
    shares = [x.tile_m * x.tile_n // 128 for x in before]
    assert shares[0] > 128 >= shares[1] and before[1].pingpong
    compiled, ahead = list[TileConfig](), list[int]()

    class Pool:
        def map(self, jobs: list[CompileJob], _: Any) -> list[Any]:
            compiled.extend(job.config for job in jobs)
            return [CompileError("no") if job.config == before[0] else job for job in jobs]

    pool: Any = Pool()
    build.build(pool, [(region, kernel)], torch.device("cpu"), lambda: ahead.append(1))
    assert ahead == [1] and compiled == before and before[0] not in build.tiles_of(kernel, shape)


def test_the_other_tile_is_smaller_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known, kernels = chosen(
        recorded(lambda x, w: torch.tanh(F.linear(x, w)), [drawn(24, H), drawn(D, H)]).graph
    )
    (region,) = known.regions
    square, wide = TileConfig(128, 128, pingpong=True), TileConfig(64, 256, pingpong=True)
    narrow, stream = TileConfig(128, 64, pingpong=True), TileConfig(64, 32, split_k=4)
    for likely, tried in (
        ([square, wide, narrow], [square, narrow]),
        ([TileConfig(128, 192), square, narrow], [TileConfig(128, 192), square]),
        ([stream, UNFUSED[0], square], [stream, UNFUSED[0]]),
        ([square], [square]),
        ([], []),
    ):
        monkeypatch.setattr(TileChoice, "ranked", lambda *_, found=likely: found)
        assert build.tiles_of(kernels[region], (24, D, H)) == tried


def test_no_pool_compiles_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    with build.compilers() as pool:
        assert pool is not None and pool.size == 1

    def refused() -> Any:
        raise MachineError("the cache cannot be written")

    monkeypatch.setattr(pools, "writable_cache", refused)
    with build.compilers() as pool:
        assert pool is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_folds_partials_where_sizes_are_fixed(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes of a norm whose squares are summed by the product before it, and of a loss."""
    folds = []

    def judged(place: Any, kernel: Any, _: torch.device) -> Any:
        extents = place.region.composition.extents
        shape = int(extents["M"]), int(extents["N"]), int(extents["K"])
        text = choice._written(place.region, kernel.text, shape, [TileConfig(128, 128)])
        folds.extend(combine for combine, _ in program_operator.folds_of(text).values())
        return replace(kernel, text=text)

    monkeypatch.setattr(joint, "_judged", judged)

    def norm(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.linear(x, w) + x
        return F.rms_norm(y, (D,), eps=1e-5) @ v.T

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), labels)

    square, labels = (drawn(D, D, seed=s) for s in (1, 2)), torch.arange(160) % 320
    for f, args, combined in (
        (norm, (drawn(160, D) * 14, *square), {"add"}),
        (loss, (drawn(160, D) * 14, drawn(320, D, seed=3) * 14, labels), {"logsumexp"}),
    ):
        folds.clear()
        results = []
        for run, kind in ((fuse(f, dynamic=dynamic), Tensor.bfloat16), (f, Tensor.double)):
            given = [
                kind(x).requires_grad_() if x.is_floating_point() else x
                for x in map(Tensor.clone, args)
            ]
            out = run(*given)
            out.backward(torch.ones_like(out) / out.numel())
            grads = [x.grad for x in given if x.grad is not None]
            results.append([out.detach(), *grads])
        for found, exact in zip(*results, strict=True):
            assert (found.double() - exact).norm() < 2e-2 * exact.norm()
        assert (combined <= {*folds}) != dynamic and not (dynamic and folds)


def test_partials_of_rows_without_a_finite_number_fold_as_pytorch_does() -> None:
    x = torch.tensor([[1e4, -1e4], [-3e38, -3.2e38], [-math.inf] * 2, [math.inf, 0.0], [0.5, 0.25]])
    found = kernels._folded(x, "logsumexp", 1.0)
    assert torch.allclose(found, x.double().logsumexp(-1).float(), rtol=1e-6)
    assert kernels._folded(x, "max", 1.0).tolist() == x.amax(-1).tolist()
    assert kernels._folded(x[4:], "add", 0.5).tolist() == [0.375]
