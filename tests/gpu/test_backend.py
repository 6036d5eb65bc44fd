"""The backend `coda` on a GPU."""

import warnings
from pathlib import Path

import pytest
import torch

from coda_agent.evals.float8 import e4m3, quantised, scaled_product
from coda_agent.fuse import fuse
from coda_agent.fuse.joint import Kernels
from coda_agent.fuse.kernels import _folded
from coda_agent.primitives import ColSum, RowLogSumExp, RowMax, RowSum, Tile, epilogue
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.program_operator import (
    folds_of,
    kernel_operator,
    program_text,
    with_tiles,
)

pytestmark = pytest.mark.gpu


def test_a_product_in_fp8_whose_result_is_fp8_is_timed_and_right() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1024, 512, device="cuda"), torch.randn(768, 512, device="cuda") / 16
    (a, rows), (b, columns) = quantised(x), quantised(w)

    def function(a: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = scaled_product(a, b, rows[:, None], columns[None])
        gate, up = y.chunk(2, dim=1)
        return e4m3(torch.nn.functional.silu(gate) * up)

    gate, up = (a.double() * rows[:, None] @ (b.double() * columns[:, None]).T).chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    own = (function(a, rows).double() - exact).norm()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="coda-agent")
        found = fuse(function, dynamic=False)(a, rows).double()
    assert (found - exact).norm() < 1.05 * own


@epilogue(O=Tile)
def added(acc, r: Tile):
    return {"O": acc + r}


def test_parts_of_k_meet_in_graphs_of_cuda() -> None:
    """Flags by which parts of K meet stay between calls, and are no part of a graph's memory."""
    torch.manual_seed(0)
    shape = 32, 256, 8192
    text = program_text(added, {"O": "bfloat16"}, "bfloat16", "")
    text = with_tiles(text, shape, TileConfig(128, 128, split_k=4))
    x, w, r = (torch.randn(*size, device="cuda", dtype=torch.bfloat16)
               for size in ((32, 8192), (256, 8192), (32, 256)))  # fmt: skip
    kernel = kernel_operator()
    called = torch.compile(lambda x: kernel(x, w, [r], program=text)[0] * 2, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            x.normal_()
            exact = 2 * (x.double() @ w.double().T + r.double())
            assert (called(x).double() - exact).norm() < 5e-3 * exact.norm()


def test_a_package_of_aotinductor_has_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(512, 8192), torch.nn.GELU("tanh"))
    layer, x = layer.cuda().bfloat16(), torch.randn(8192, 512, device="cuda").bfloat16()
    exact = layer.double()(x.double())
    with torch.no_grad():
        exported = torch.export.export(layer.bfloat16(), (x,))
        path = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(tmp_path / "layer.pt2"),
            inductor_configs={"joint_custom_post_pass": Kernels()},
        )
        run = torch._inductor.aoti_load_package(path)
        assert (run(x).double() - exact).norm() < 5e-3 * exact.norm()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            run(x)
    assert any("coda_agent" in event.name for event in found.events() or ())


@epilogue(D=Tile, s=RowSum, m=RowMax, lse=RowLogSumExp, g=ColSum)
def statistics(acc, r: Tile):
    d = acc + r
    return {"D": d, "s": d * d, "m": d, "lse": d, "g": d}


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_partials_are_folded_by_inductor_and_places_in_code_launch_once(mode: str | None) -> None:
    torch.manual_seed(0)
    shape = 1000, 1536, 512
    text = program_text(statistics, {"D": "bfloat16"} | dict.fromkeys("smg") | {"lse": None},
                        "bfloat16", "")  # fmt: skip
    text = with_tiles(text, shape, TileConfig(128, 128), partials=True)
    x, w, r = (torch.randn(*size, device="cuda", dtype=torch.bfloat16)
               for size in ((1000, 512), (1536, 512), (1000, 1536)))  # fmt: skip
    kernel, folds = kernel_operator(), folds_of(text)
    names = [*statistics.outputs]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        found = dict(zip(names, kernel(x, w / 16, [r], program=text), strict=True))
        return [_folded(found[o], *folds[o]) if o in folds else found[o] for o in names]

    called = torch.compile(function, mode=mode, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            x.normal_()
            y = x.double() @ (w / 16).double().T + r.double()
            exact = y, (y * y).sum(1), y.amax(1), y.logsumexp(1), y.sum(0)
            for found, truth in zip(called(x), exact, strict=True):
                assert (found.double() - truth).norm() < 5e-3 * truth.norm()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            called(x)
    ran = [event.name for event in seen.events() or ()]
    assert any("coda_agent" in name for name in ran) and "_fold" not in ran
