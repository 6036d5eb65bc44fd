"""Contenders of a kernel: a bare cuBLAS product, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product

from coda_agent.agent.judge.records import Inputs
from coda_agent.primitives.deferred import torch
from coda_agent.specs import Spec, as_declared, draw_inputs, reference_callable


def prepare(spec: Spec, elements: Sequence[str]) -> None:
    """Compile what the default program is timed against, for this process."""
    binding = spec.bindings()[0]
    call = compiled_reference(spec, binding)
    with recompiling():
        for element, sizes in product(elements, spec.bench_shapes):
            types = dict.fromkeys(spec.types, element)
            inputs = draw_inputs(spec, sizes, types, seed=0, device="cuda", binding=binding)
            call(**given_by_user(spec, inputs, binding))


def compiled_reference(spec: Spec, binding: Mapping[str, str]) -> Callable[..., object]:
    """Give what a user would run, under torch.compile."""
    return torch.compile(reference_callable(spec, binding, baseline=True), dynamic=False)


def given_by_user(spec: Spec, inputs: Inputs, binding: Mapping[str, str]) -> Inputs:
    """Lay inputs out as a user has them, in their own memory."""
    if spec.layout is None:
        return inputs
    return {
        x: value if isinstance(value, (int, float)) else value.contiguous()
        for x, value in as_declared(spec, inputs, binding).items()
    }


def recompiling() -> AbstractContextManager[None]:
    """Let torch.compile compile as often as needed."""
    from torch._dynamo import config

    # Else it compiles a function eight times in a process, and then runs it without a word.
    return config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True)


def bare_gemm(
    a: torch.Tensor, b: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Make cuBLAS's product of operands like `a` (M, K), `b` (N, K).

    It goes into one buffer where torch's binding takes one. FP8 operands give bfloat16, with unit
    scales and fast accumulation.
    """
    if a.element_size() > 1:
        product = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
        return lambda x, y: torch.mm(x, y.t(), out=product)
    one = torch.ones((), device=a.device)
    return lambda x, y: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x, y.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
