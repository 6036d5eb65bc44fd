"""What the errors of a GPU's arithmetic do to a reference.

The reference runs in float64, and each result is moved by what the same operation may err on a GPU.
How far an output then moves says how much a right kernel may differ there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from coda_agent.agent.judge.compare import FLUSHED, SAFETY
from coda_agent.agent.judge.records import Inputs
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.operation import OPS
from coda_agent.primitives.rounding import rounded
from coda_agent.specs import Spec, run_reference
from coda_agent.specs.reference import storage

# What one operation may err, as a share of its result. `compare.allowance` takes `SAFETY` times it.
_OPERATION = 2.0**-24  # in float32
_APPROXIMATION = 2.0**-22  # by an approximation of the special-function unit
# Float64's own roundings of its least numbers.
_LEAST = 2.0**-1072
_PRODUCT = 2.0**-25  # one product of a GEMM whose operands have 16 bits
_PRODUCT_8 = 2.0**-16  # the same for 8 bits, of which tensor cores keep about 14 bits of a sum
# MUFU.TANH errs by up to 2^-11 of its range, not of its result. So does what is composed of it.
_RANGE = 2.0**-15
# Functions of torch that are no operation of the vocabulary, and what their error scales with.
_COMPOSED = (
    dict.fromkeys(("gelu_backward", "mish"), "argument")
    | dict.fromkeys(
        (
            "log_sigmoid", "logaddexp", "logaddexp2", "logit", "sinc", "softmax", "special_ndtr",
            "tanhshrink",
        ),
        "range",
    )
    | dict.fromkeys(
        (
            "celu", "elu", "exp2", "expm1", "float_power", "glu", "hypot", "log10", "log1p", "log2",
            "logsumexp", "pow", "reciprocal", "selu", "silu", "softsign", "special_expit", "xlogy",
            "__pow__", "__rpow__", "true_divide", "__truediv__", "__rtruediv__", "__rdiv__",
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
    """List `Op.error` by the name of a function of torch."""
    return _COMPOSED | {x: op.error for op in OPS.values() for x in (op.name, *op.aten)}


def approximations_shaken(function: object, args: Sequence[Any], result: Any) -> Any:
    """Move what a GPU approximates, visibly, as a reference's `touch`."""
    approximated = errors().get(getattr(function, "__name__", ""))
    return result * 1.001 + 0.001 if approximated else result


# The runs of one case ask for few seeds, and drawing took a sixth of `disturbed`.
@lru_cache(maxsize=32)
def _pool(seed: int, device: torch.device) -> torch.Tensor:
    """Draw numbers from -1.5 to 1.5 that are never near 0."""
    pool = torch.empty(_POOL, dtype=torch.float64, device=device)
    pool.uniform_(-1.0, 1.0, generator=torch.Generator(device).manual_seed(seed))
    return pool + pool.sign() / 2


class Way(NamedTuple):
    """How operations are disturbed.

    Attributes:
        finer: A factor on all errors; float64's own are 2⁻²⁹ of float32's.
        sign: A factor on what approximations err of their range; -1 turns its direction, and 0
            leaves it out.
        grid: Results are rounded to float32 less so many bits, too: it hits 0 or a whole number
            where one lies near, which noise alone never does.
    """

    finer: float = 1.0
    sign: float = 1.0
    grid: int | None = None


def disturbed(
    spec: Spec, inputs: Inputs, binding: Mapping[str, str], seed: int, way: Way
) -> dict[str, torch.Tensor]:
    """Run the exact reference, each result off by what float32 may err.

    The GEMM's error is put on the elements of A, scaled by √K. So it reaches each sum as a share of
    about ‖a‖ ‖b‖.

    Args:
        seed: What the noise follows from.
        way: How.
    """
    a = inputs[spec.gemm[0]]
    product = _PRODUCT if a.element_size() > 1 else _PRODUCT_8
    root = product * math.sqrt(a.shape[1])
    noise = _Noise(seed, a.device, way, root)
    wide = a.double()
    noisy = wide + (wide * (way.finer * root * noise.like(wide))).where(wide.isfinite(), 0.0)
    return run_reference(
        spec, {**inputs, spec.gemm[0]: noisy}, binding=binding, exact=True, touch=noise.touch
    )


class _Noise:
    """What moves the results of a reference's operations.

    Args:
        seed: What the noise follows from.
        way: How.
        root: What a sum of a GEMM may err, as a share of its size.
    """

    def __init__(self, seed: int, device: torch.device, way: Way, root: float) -> None:
        self._chance, self._pool = random.Random(seed), _pool(seed, device)
        (self._finer, self._sign, self._grid), self._root = way, root
        self._up = seed % 2 != 0

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many random numbers as a tensor has, in its shape."""
        count = x.numel()
        long = self._pool if count <= _POOL else self._pool.repeat(-(-count // _POOL) + 1)
        start = self._chance.randrange(min(_POOL, len(long) - count + 1))
        return long[start : start + count].view(x.shape)

    def touch(self, function: object, args: Sequence[Any], result: Any) -> Any:
        """Move a result of a function, as `run_reference` asks it."""
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        if function is rounded:
            return self._rounded(*args)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if tensors and storage(tensors[0]) == storage(result):
            return result  # a view
        off = self._error(getattr(function, "__name__", ""), tensors, result)
        moved = result + off.where(result.isfinite(), 0.0)  # an infinity is not moved
        return moved if self._grid is None else _on_grid(moved, 1 << self._grid)

    def _rounded(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Round what is moved near a tie: half of the runs up."""
        size = value.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True).sqrt()
        near = _OPERATION * value.abs() + self._root * size
        way = self._sign if self._up else -self._sign
        return rounded(value + way * self._finer * SAFETY * near, dtype)

    def _error(
        self, name: str, tensors: Sequence[torch.Tensor], result: torch.Tensor
    ) -> torch.Tensor:
        """Draw what a function of torch errs, by name."""
        finer, error = self._finer, errors().get(name)
        unit = _APPROXIMATION if error == "result" else _OPERATION
        share = self.like(result)
        off = result * (finer * unit * share)
        # Float32 flushes what is less to 0, where a sign jumps; float64's least have few digits.
        if self._grid is None:
            least = FLUSHED if finer >= 1.0 else _LEAST
            off += (least * share).where(result != 0, 0.0)
        if name in _OF_ONE:
            off += finer * unit * share
        if error in ("range", "argument"):
            # All elements get the same error: an approximation errs alike for like arguments.
            weight = self._chance.uniform(0.75, 1.25) * self._chance.choice((-1, 1))
            # Float64 errs less by its approximations. But the slope of a GELU takes many times of
            # that: with less, 4 of 243 draws refused a right sum of tails.
            exact = error == "range" and finer < 1.0
            weight *= self._sign * finer * (_OPERATION if exact else _RANGE)
            # The slope errs as well, for references that differentiate: |x| has one, and so has a
            # term whose value is 0.
            argument = tensors[0] if tensors[0].shape == result.shape else result
            size, finite = argument.abs(), argument.nan_to_num()
            off += weight * (1 + (finite - finite.detach()) if error == "range" else size)
        return off


def _on_grid(x: torch.Tensor, step: int) -> torch.Tensor:
    """Round to multiples of `step` units in float32's last place."""
    kept = x.detach()
    bits = kept.where(~(kept.abs() < FLUSHED), 0.0).float().view(torch.int32)
    near = ((bits + step // 2) & -step).view(torch.float32).to(x.dtype)
    # Bits have no derivative, which some references ask for.
    return x + (near - kept).where(kept.isfinite(), 0.0) if x.requires_grad else near
