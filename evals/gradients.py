"""The suite of gradients: accepted kernels, forward and backward, beside their references."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.evals.cases import Call, Case, Contender, Setup, Suite, differentiated
from coda_agent.primitives.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

SIZE, LIMIT = 4096, 0.05
_CONSTANT = ("cs",)  # cosines and sines: nobody learns them
KERNELS: Sequence[tuple[str, Mapping[str, str]]] = (
    *(
        ("gemm_bias_act", {"activation": act, "bias_per": per})
        for act in ("gelu_tanh", "relu", "silu")
        for per in ("column", "row")
    ),
    ("gemm_residual_partial_rmsnorm_bwd", {"update": "out_of_place"}),
    *(
        (name, {})
        for name in (
            "gemm_partial_cross_entropy", "gemm_partial_swiglu_bwd",
            "gemm_residual_partial_rmsnorm", "gemm_rmsnorm", "gemm_rmsnorm_partial_cross_entropy",
            "gemm_rmsnorm_rope", "gemm_rmsnorm_swiglu", "gemm_rope", "gemm_swiglu", "gemm_symlog",
        )
    ),
)  # fmt: skip
"""Every accepted kernel of 16-bit operands, in each of its forms that overwrite nothing."""


_ABOUT = """Each accepted kernel of 16-bit operands at 4096³, forward and backward together,
with gradients of every tensor but tables and indices. Beside it runs the reference of its spec."""


def suite(_: Path) -> Suite:
    """List accepted kernels with gradients."""
    found = {" ".join((kernel, *static.values())): (kernel, static) for kernel, static in KERNELS}
    contenders = "ours", "eager", "compile"
    cases = [Case(name, contenders, partial(_setup, *which)) for name, which in found.items()]
    return Suite("gradients", _ABOUT, cases)


def _setup(name: str, static: Mapping[str, str], device: str, shrink: int) -> Setup:
    from coda_agent import generated
    from coda_agent.specs import draw_inputs, run_reference
    from coda_agent.specs.reference import reference_callable

    kernel = getattr(generated, name)
    spec, sizes = kernel.spec, dict.fromkeys("MNK", SIZE // shrink)
    values: dict[str, Any] = draw_inputs(
        spec, sizes, spec.default_types(), seed=1, device=device, binding=static
    )
    learned = {n: x.requires_grad_() for n, x in values.items()
               if getattr(x, "is_floating_point", bool)() and n not in _CONSTANT}  # fmt: skip
    wide = {n: x.detach().double().requires_grad_() for n, x in learned.items()}
    rest = {n: x for n, x in values.items() if n not in learned}
    reference = reference_callable(spec, static, baseline=True)

    def ours(**inputs: Any) -> Sequence[Tensor]:
        found = kernel(**inputs, **static)
        return found if isinstance(found, tuple) else (found,)

    def plain(**inputs: Any) -> Sequence[Tensor]:
        found = reference(**inputs)
        return [found[o] for o in spec.outputs]

    def exact(**inputs: Any) -> Sequence[Tensor]:
        return [*run_reference(spec, inputs, binding=static, exact=True).values()]

    def gradients(way: Callable[..., Any], t: Mapping[str, Tensor]) -> Call:
        whole = differentiated(
            lambda t: way(**{n: t.get(n, rest.get(n)) for n in values}), t, "both"
        )
        return lambda i: {n: x for n, x in whole(i).items() if n in learned}

    makers = {
        "ours": lambda: Contender(gradients(ours, learned)),
        "eager": lambda: Contender(gradients(plain, learned)),
        "compile": lambda: Contender(gradients(torch.compile(plain, dynamic=False), learned)),
    }
    return Setup(makers, gradients(exact, wide)(0), LIMIT)
