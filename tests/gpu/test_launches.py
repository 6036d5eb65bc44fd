"""What one warm call runs on a Hopper GPU, as CUPTI sees it: the declared launches, nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from coda_agent import generated
from coda_agent.agent.execution import executor
from coda_agent.agent.judge.clocks import DeviceClock
from coda_agent.agent.judge.job import CompileJob
from coda_agent.primitives import (
    ColIndex,
    ColSum,
    Program,
    RowGather,
    RowMax,
    RowMean,
    Tile,
    epilogue,
    gather,
)
from coda_agent.primitives.inspect import launches
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.function import ProgramFunction, untuned
from coda_agent.runtime.kernel import Kernel
from coda_agent.specs import draw_inputs

pytestmark = pytest.mark.gpu

BLOCK = 128
SPLIT = TileConfig(128, 128, 1, 1, True, split_k=2)


@epilogue(Z=Tile, t=RowGather)
def gathering(acc, y: ColIndex):
    return {"Z": acc, "t": gather(acc, y)}


@epilogue(D=Tile, s=RowMean, top=RowMax, g=ColSum)
def reducing(acc):
    return {"D": acc, "s": acc * acc, "top": acc, "g": acc}


def given(kernel: Kernel, binding: dict[str, str]) -> dict[str, Any]:
    """Inputs at a check shape whose M is ragged, scalars as numbers."""
    spec = kernel.spec
    types = spec.default_types()
    return draw_inputs(spec, spec.check_shapes[1], types, seed=0, device="cuda", binding=binding)


def tile(kernel: Kernel, block: int | None) -> TileConfig:
    """The one that a call with `given` runs in."""
    spec = kernel.spec
    m, n, k = (spec.check_shapes[1][dim] for dim in spec.gemm_dims)
    element = spec.dtype_of(spec.gemm[0], spec.default_types())
    return kernel.tiles.choose(m, n, k, element, block) or DEFAULT_CONFIGS["sm_90a"]


def variants(kernel: Kernel) -> Iterator[tuple[dict[str, str], Program]]:
    for binding in kernel.spec.bindings():
        yield binding, kernel.programs[kernel.spec.variant(binding)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """On all cores; without it, each call compiles for itself."""
    use_cache()
    jobs = {}
    for kernel in (getattr(generated, name) for name in dir(generated)):
        element = next(iter(kernel.spec.types.values()), ("bfloat16",))[0]
        for _, program in variants(kernel):
            for config in {tile(kernel, block) for block in (None, BLOCK)}:
                key = program.digest, config
                jobs[key] = CompileJob.of(program, config, "sm_90a", kernel.spec, element)
    executor().map(list(jobs.values()), lambda *_: None)


@pytest.fixture(scope="module")
def gpu() -> DeviceClock:
    return DeviceClock()


def ran(gpu: DeviceClock, call: Callable[[], Any]) -> list[str]:
    """Names of the kernels, fills and copies of a call, in order, once it is compiled."""
    call()
    torch.cuda.synchronize()
    spans = gpu.trace(call)
    return [span.name for span in sorted(spans, key=lambda span: span.start_us)]


@pytest.mark.parametrize("name", dir(generated))
def test_a_public_function_runs_what_it_declares(gpu: DeviceClock, name: str) -> None:
    kernel = getattr(generated, name)
    for binding, program in variants(kernel):
        inputs = given(kernel, binding)
        for block in (None, BLOCK):
            found = ran(gpu, lambda: kernel(**inputs, **binding, block_size=block))  # noqa: B023
            where = f"{name} {binding}, block_size={block}: {found}"
            raw = block is not None
            config = tile(kernel, block)
            shape = inputs[kernel.spec.gemm[0]].shape[0], inputs[kernel.spec.gemm[1]].shape[0]
            declared = launches(program, config, shape, raw=raw)
            # cuBLAS may sum parts of K in a kernel of its own.
            assert declared <= len(found) <= declared + (not config.fused), where
            assert len(found) == 1 or not raw, where
            folds = [x for x in found if x == "_fold"]
            assert len(folds) == declared - 1 - (not config.fused), where


def integers(seed: int, k: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of small integers, whose product is exact in any order."""
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = (77, k), (272, k)
    a, b = (torch.randint(-2, 3, s, generator=g, device="cuda") for s in shapes)
    return a.bfloat16(), b.bfloat16()


def test_reductions_are_folded_in_one_launch(gpu: DeviceClock) -> None:
    run = ProgramFunction(reducing, {"D": "float32"}, untuned)
    for seed in range(2):
        a, b = integers(seed)
        found = ran(gpu, lambda: run(a, b, {}))  # noqa: B023
        assert len(found) == launches(reducing) == 2 and found[1] == "_fold", found
        got, exact = run(a, b, {}), a.double() @ b.double().T
        assert torch.equal(got["top"].double(), exact.amax(1))
        assert torch.equal(got["g"].double(), exact.sum(0))
        torch.testing.assert_close(got["s"].double(), (exact * exact).mean(1), rtol=1e-5, atol=0)


def test_parts_of_k_meet_at_flags_that_the_last_one_clears(gpu: DeviceClock) -> None:
    run = ProgramFunction(gathering, {"Z": "float32"}, untuned)
    y = torch.zeros(77, dtype=torch.int64, device="cuda")
    for k in (504, 512):
        a, b = integers(0, k)
        found = ran(gpu, lambda: run(a, b, {"y": y}, config=SPLIT))  # noqa: B023
        assert len(found) == launches(gathering) == 1, found
    for seed in range(50):
        a, b = integers(seed)
        assert torch.equal(run(a, b, {"y": y}, config=SPLIT)["Z"], a.float() @ b.float().T)


def test_parts_of_k_on_several_streams_and_in_a_graph() -> None:
    run = ProgramFunction(gathering, {"Z": "float32"}, untuned)
    y = torch.zeros(77, dtype=torch.int64, device="cuda")
    cases = [integers(seed) for seed in range(2)]
    want = [a.float() @ b.float().T for a, b in cases]
    run(*cases[0], {"y": y}, config=SPLIT)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run(*cases[1], {"y": y}, config=SPLIT)["Z"]
    streams = [torch.cuda.Stream() for _ in cases]
    found: list[tuple[int, torch.Tensor]] = []
    for _ in range(50):
        graph.replay()
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((i, run(*cases[i], {"y": y}, config=SPLIT)["Z"]))
    torch.cuda.synchronize()
    assert all(torch.equal(z, want[i]) for i, z in found) and torch.equal(kept, want[1])


@pytest.mark.parametrize("name", dir(generated))
def test_a_call_allocates_its_outputs_partials_and_one_workspace(name: str) -> None:
    kernel = getattr(generated, name)
    for binding, program in variants(kernel):
        inputs = given(kernel, binding)
        kernel(**inputs, **binding)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kernel(**inputs, **binding)
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        # The float32 product of an unfused form is one; cuBLASLt may take another.
        workspaces = 1 + (not tile(kernel, None).fused)
        assert made <= len(program.outputs) + len(program.reductions) + workspaces, binding


def test_a_number_beside_scalars_in_memory_is_filled_in(gpu: DeviceClock) -> None:
    kernel = generated.gemm_bias_act
    inputs = given(kernel, kernel.spec.bindings()[0])
    numbers = len(ran(gpu, lambda: kernel(**inputs)))
    inputs["alpha"] = one = torch.ones((), device="cuda")
    for beta, fills in ((one, 0), (0.5, 1)):
        inputs["beta"] = beta
        assert len(found := ran(gpu, lambda: kernel(**inputs))) == numbers + fills, found


def test_an_operand_that_cannot_be_loaded_as_it_is_is_copied(gpu: DeviceClock) -> None:
    kernel = generated.gemm_rmsnorm
    inputs = given(kernel, {})
    ready = len(ran(gpu, lambda: kernel(**inputs)))
    inputs["A"] = torch.stack([inputs["A"]] * 2, -1)[..., 0]
    assert len(found := ran(gpu, lambda: kernel(**inputs))) == ready + 1, found
