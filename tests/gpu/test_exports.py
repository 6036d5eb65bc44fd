"""Exports on a Hopper GPU: the bits of the kernel in place in the same tile, however they are called."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent import generated
from coda_agent.agent.export.objects import RUN, Wanted
from coda_agent.agent.export.repository import write
from coda_agent.agent.workspace import Kernel
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.dispatch import H200
from coda_agent.runtime.operators import Variant
from coda_agent.specs import draw_inputs

pytestmark = pytest.mark.gpu

GENERATED = Path(__file__).parents[2] / "generated"
# A gate alone, one behind a fold, and one that overwrites an input in one of its two variants.
NAMES = "gemm_swiglu", "gemm_residual_partial_rmsnorm", "gemm_residual_partial_rmsnorm_bwd"
CASES = [(name, *x.values()) for name in NAMES for x in getattr(generated, name).spec.bindings()]
SHAPES = (300, 272, 64), (1024, 2048, 1024)
DTYPE = "bfloat16"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("export") / "kernels"
    kernels = [Kernel(name, GENERATED / name) for name in NAMES]
    write(kernels, out, Wanted(H200.name, 1, (DTYPE,)))
    path = next(out.glob("build/*")) / "__init__.py"
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec and spec.loader
    module = sys.modules["exported"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(found: Any, values: Sequence[Any], updated: Sequence[int]) -> list[torch.Tensor]:
    """All that a call wrote: outputs that are new, then the inputs that it overwrote."""
    new = found if isinstance(found, tuple) else () if found is None else (found,)
    return [x for x in new if all(x is not v for v in values)] + [values[i] for i in updated]


def results(call: Callable[..., Any], given: Sequence[Any], updated: Sequence[int]) -> list[Any]:
    values = [x.clone() for x in given]
    return written(call(*values), values, updated)


def equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_bits_are_those_of_the_kernel_in_place(
    exported: Any, case: tuple[str, ...], shape: tuple[int, int, int]
) -> None:
    name, *chosen = case
    kernel, kernel_exported = getattr(generated, name), getattr(exported, name)
    spec, key = kernel.spec, tuple(chosen)
    binding = dict(zip(spec.parameters, key, strict=True))
    sizes = dict(zip("MNK", shape, strict=True))
    drawn = draw_inputs(spec, sizes, {"T": DTYPE}, seed=0, device="cuda", binding=binding)
    given: list[Any] = [*drawn.values()]
    updated = [[*spec.inputs].index(x) for x in spec.updated(binding).values()]

    one = kernel_exported.variants[key]
    form = one._forms[DTYPE]
    tile = one._choose(form, form["objects"][RUN]["number"], shape, None)
    config = TileConfig(**{x.name: tile[x.name] for x in fields(TileConfig)})
    function = replace(kernel.variants[key].function, choose=lambda *_: config)
    in_place = Variant.of(spec, binding, function)
    expected = results(lambda *values: in_place(values), given, updated)

    def call(*values: Any) -> Any:
        return kernel_exported(*values, **binding)

    for _ in range(2):  # the second call finds what the first resolved
        assert equal(results(call, given, updated), expected)
    torch.compiler.reset()
    assert equal(results(torch.compile(call, fullgraph=True), given, updated), expected)

    held, graph = [x.clone() for x in given], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which runs nothing
        captured = written(call(*held), held, updated)
    for x in captured[: len(captured) - len(updated)]:
        x.zero_()
    graph.replay()
    assert equal(captured, expected)
