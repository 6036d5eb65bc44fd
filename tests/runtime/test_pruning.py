"""Accepted kernels without some of their outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coda_agent import generated
from coda_agent.primitives.errors import LaunchError
from coda_agent.runtime.kernel import Kernel
from coda_agent.specs import draw_inputs

LESS = {
    "gemm_rmsnorm_rope": [("D",)],
    "gemm_rope": [("D",)],
    "gemm_swiglu": [("D",)],
    "gemm_rmsnorm_swiglu": [("D",)],
    "gemm_residual_partial_rmsnorm": [("s",), ("D",), ("D", "s")],
    "gemm_rmsnorm_partial_cross_entropy": [("Z",), ("Z", "lse")],
    "gemm_partial_swiglu_bwd": [("z",), ("O",)],
    "gemm_fp8_rmsnorm_rope": [("D",)],
    "gemm_fp8_rmsnorm_swiglu": [("D",)],
    "gemm_fp8_swiglu_quantised": [("amax",)],
}


def drawn(kernel: Kernel, seed: int = 0) -> list[Any]:
    spec = kernel.spec
    sizes, types = spec.check_shapes[1], spec.default_types()
    return [*draw_inputs(spec, sizes, types, seed=seed).values()]


@pytest.mark.parametrize("name", LESS)
def test_the_others_are_what_they_were(name: str) -> None:
    kernel = getattr(generated, name)
    values = drawn(kernel)
    whole = dict(zip(kernel.spec.outputs, kernel(*values), strict=True))
    for dropped in LESS[name]:
        less = kernel.without(*dropped)
        assert less is kernel.without(*reversed(dropped)) and less.__name__ == name
        left = [o for o in whole if o not in dropped]
        assert [*less.spec.outputs] == left
        found = less(*values)
        found = dict(zip(left, found if len(left) > 1 else (found,), strict=True))
        for o, got in found.items():
            assert torch.equal(got.float(), whole[o].float()), o
        assert [*less.spec.declared.outputs] == left
        assert all(o not in p.outputs for p in less.programs.values() for o in dropped)


@pytest.mark.parametrize("name", ["gemm_rmsnorm_rope", "gemm_rmsnorm_swiglu"])
def test_gradients_are_those_of_the_whole(name: str) -> None:
    kernel, found = getattr(generated, name), list[Any]()
    for function, output in ((kernel, 1), (kernel.without("D"), None)):
        inputs = [x.clone().requires_grad_() for x in drawn(kernel)]
        out = function(*inputs) if output is None else function(*inputs)[output]
        slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found.append([out, *torch.autograd.grad((out * slopes).sum(), inputs)])
    for mine, theirs in zip(*found, strict=True):
        # What the backward pass reads of the forward one is rounded once more where it is stored.
        error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 4e-3


def test_torch_compiles_it() -> None:
    kernel = generated.gemm_rmsnorm_rope.without("D")
    values = drawn(kernel)
    plain: Any = kernel(*values)
    compiled: Any = torch.compile(lambda *x: kernel(*x) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*values), plain * 2)


def test_tiles_are_chosen_by_what_was_measured_of_the_whole() -> None:
    whole = generated.gemm_rmsnorm_rope
    less, gpu = whole.without("D"), "NVIDIA H200"
    assert less.tiles.model(gpu, "bfloat16") is not None
    for shape in ((4096, 12288, 4096), (16, 6144, 4096), (777, 3072, 2048)):
        assert less.tiles.choose(*shape, "bfloat16", gpu=gpu) == whole.tiles.choose(
            *shape, "bfloat16", gpu=gpu
        )


def test_what_cannot_be_left_out_is_said() -> None:
    rope, swiglu = generated.gemm_rmsnorm_rope, generated.gemm_rmsnorm_swiglu
    assert rope.without() is rope
    for kernel, outputs, said in (
        (rope, ["E"], "gemm_rmsnorm_rope has no output 'E', expected D, O"),
        (rope, ["O"], "gemm_rmsnorm_rope without O reads less: .* 'cs' is never used"),
        (swiglu, ["D", "O"], "gemm_rmsnorm_swiglu without D and O reads less"),
    ):
        with pytest.raises(LaunchError, match=said):
            kernel.without(*outputs)
    backward = generated.gemm_residual_partial_rmsnorm_bwd
    with pytest.raises(LaunchError, match="O overwrites X, so it cannot be left out"):
        backward.without("O")
