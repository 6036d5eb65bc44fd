"""What the errors of a GPU's arithmetic do to a reference: each of its operations is disturbed.

The reference runs in float64, and each result is moved by what the same operation may err on a GPU.
How far an output then moves says how much a right kernel may differ there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.compare import SAFETY
from coda_agent.agent.judge.records import Inputs
from coda_agent.primitives.operation import OPS
from coda_agent.primitives.rounding import rounded

if TYPE_CHECKING:
    import torch

    from coda_agent.specs import Spec

# What one operation may err, as a share of its result. `compare.allowance` takes `SAFETY` times it.
_OPERATION = 2.0**-24  # in float32
_APPROXIMATION = 2.0**-22  # by an approximation of the special-function unit
_PRODUCT = 2.0**-25  # one product of a GEMM whose operands have 16 bits
_PRODUCT_8 = 2.0**-16  # the same for 8 bits, of which tensor cores keep about 14 bits of a sum
_FLUSHED = 2.0**-126
# MUFU.TANH errs by up to 2^-11 of its range, not of its result. So does what is composed of it.
_RANGE = 2.0**-15
# Functions of torch that are no operation of the vocabulary, and what their error scales with.
_COMPOSED = (
    dict.fromkeys(("gelu_backward", "glu", "mish", "silu"), "argument")
    | dict.fromkeys(
        (
            "log_sigmoid", "logaddexp", "logaddexp2", "logit", "sinc", "softmax", "special_expit",
            "special_ndtr", "tanhshrink",
        ),
        "range",
    )
    | dict.fromkeys(
        (
            "celu", "elu", "exp2", "expm1", "float_power", "hypot", "log10", "log1p", "log2",
            "logsumexp", "pow", "reciprocal", "selu", "softsign", "xlogy", "__pow__", "__rpow__",
            "true_divide", "__truediv__", "__rtruediv__", "__rdiv__",
        ),
        "result",
    )
)  # fmt: skip
# Logarithms of sums, the largest term of which is 1: rounding the sum errs as a share of 1, however
# small the result.
_OF_ONE = ("log_softmax", "logsumexp")
# Noise is cut out of so many random numbers; drawing one for each element of a tensor takes longer.
_POOL = 1 << 16


@lru_cache(maxsize=1)
def errors() -> dict[str, str]:
    """`Op.error` by the name of a function of torch."""
    return _COMPOSED | {x: op.error for op in OPS.values() for x in (op.name, *op.aten)}


def approximations_shaken(function: object, args: Sequence[Any], result: Any) -> Any:
    """`run_reference`'s `touch` that moves what a GPU approximates, visibly, and nothing else."""
    approximated = errors().get(getattr(function, "__name__", ""))
    return result * 1.001 + 0.001 if approximated else result


@lru_cache(maxsize=32)
def _pool(seed: int, device: torch.device) -> torch.Tensor:
    """Random numbers of a seed, from -1.5 to 1.5 and never near 0. The runs of one case ask for few
    seeds, and drawing took a sixth of `disturbed`."""
    import torch

    pool = torch.empty(_POOL, dtype=torch.float64, device=device)
    pool.uniform_(-1.0, 1.0, generator=torch.Generator(device).manual_seed(seed))
    return pool + pool.sign() / 2


def disturbed(
    spec: Spec,
    inputs: Inputs,
    binding: Mapping[str, str],
    seed: int,
    *,
    finer: float = 1.0,
    sign: float = 1.0,
    grid: int | None = None,
) -> dict[str, torch.Tensor]:
    """The exact reference with the result of each operation off by what float32 may err.

    The GEMM's error is put on the elements of A, scaled by √K. So it reaches each sum as a share of
    about ‖a‖ ‖b‖.

    Args:
        spec: The spec.
        inputs: Its inputs.
        binding: The static parameters.
        seed: What the noise follows from.
        finer: A factor on all errors; float64's own are 2⁻²⁹ of float32's.
        sign: A factor on what approximations err of their range; -1 turns its direction, and 0
            leaves it out.
        grid: Results are rounded to float32 less so many bits, too: it hits 0 or a whole number
            where one lies near, which noise alone never does.
    """
    import torch

    from coda_agent.specs import run_reference
    from coda_agent.specs.reference import storage

    chance = random.Random(seed)
    a = inputs[spec.gemm[0]]
    pool = _pool(seed, a.device)

    def noise(like: torch.Tensor) -> torch.Tensor:
        count = like.numel()
        long = pool if count <= _POOL else pool.repeat(-(-count // _POOL) + 1)
        start = chance.randrange(min(_POOL, len(long) - count + 1))
        return long[start : start + count].view(like.shape)

    def touch(function: object, args: Sequence[Any], result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if function is rounded:
            # What lies near a tie may fall to either side: half of the runs take it up, half down.
            value, dtype = args
            size = value.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True).sqrt()
            near = _OPERATION * value.abs() + root * size
            way = sign if seed % 2 else -sign
            return rounded(value + way * finer * SAFETY * near, dtype)
        if tensors and storage(tensors[0]) == storage(result):
            return result  # a view
        error = errors().get(getattr(function, "__name__", ""))
        unit = _APPROXIMATION if error == "result" else _OPERATION
        share = noise(result)
        off = result * (finer * unit * share)
        if finer >= 1.0 and grid is None:  # float32 flushes what is less to 0, where a sign jumps
            off += (_FLUSHED * share).where(result != 0, 0.0)
        if getattr(function, "__name__", "") in _OF_ONE:
            off += finer * unit * share
        if error in ("range", "argument"):
            # All elements get the same error: an approximation errs alike for like arguments.
            weight = chance.uniform(0.75, 1.25) * chance.choice((-1, 1)) * sign * finer * _RANGE
            # The slope errs as well, for references that differentiate: |x| has one, and so has a
            # term whose value is 0.
            argument = tensors[0] if tensors[0].shape == result.shape else result
            if getattr(function, "__name__", "") == "glu":
                argument = tensors[0].chunk(2, args[1] if len(args) > 1 else -1)[0]
            size, finite = argument.abs(), argument.nan_to_num()
            off += weight * (1 + (finite - finite.detach()) if error == "range" else size)
        moved = result + off.where(result.isfinite(), 0.0)  # an infinity is not moved
        if grid is None:
            return moved
        kept = moved.detach()
        bits = kept.where(~(kept.abs() < _FLUSHED), 0.0).float().view(torch.int32)
        step = 1 << grid
        near = ((bits + step // 2) & -step).view(torch.float32).to(moved.dtype)
        # Bits have no derivative, which some references ask for.
        return moved + (near - kept).where(kept.isfinite(), 0.0) if moved.requires_grad else near

    product = _PRODUCT if a.element_size() > 1 else _PRODUCT_8
    wide = a.double()
    root = product * math.sqrt(a.shape[1])
    noisy = wide + (wide * (finer * root * noise(wide))).where(wide.isfinite(), 0.0)
    return run_reference(
        spec, {**inputs, spec.gemm[0]: noisy}, binding=binding, exact=True, touch=touch
    )
