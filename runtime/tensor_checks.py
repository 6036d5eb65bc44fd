"""What tensors a program takes: their shapes, element types and devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.operation import Term
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import HalfTile, OddRows, steps


@dataclass(frozen=True, eq=False)
class TensorChecks:
    """The checks of a program's tensors; `dtypes` are a `ProgramFunction`'s."""

    program: Program
    dtypes: Mapping[str, str | None]

    @cached_property
    def operands(self) -> dict[str, type[Resource]]:
        """Kinds of the operands, and at last of what is added to."""
        added = {o: kind for o, kind in self.program.outputs.items() if kind.accumulates}
        return {**self.program.operands, **added}

    @lru_cache(maxsize=64)  # noqa: B019 (there are as many functions as kernels)
    def dtypes_for(self, element: torch.dtype) -> dict[str, torch.dtype]:
        """Find the element type of each output, by that of A."""
        kinds = self.program.outputs.items()
        names: dict[str, str | None] = {o: "float32" for o, k in kinds if k.element_bytes == 4}
        names |= self.dtypes
        return {
            o: getattr(torch, name) if (name := names.get(o)) else element
            for o in self.program.outputs
        }

    @lru_cache(maxsize=64)  # noqa: B019
    def steps(self, element: torch.dtype) -> tuple[int, int]:
        """Find what N and K must be multiples of, by the element type of A."""
        sizes = (d.itemsize for d in self.dtypes_for(element).values())
        half = HalfTile in self.program.outputs.values()
        return steps(element.itemsize, sizes, half=half, group=self.program.group)

    def sizes(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Mapping[str, Term],
        types: tuple[str, ...],
    ) -> tuple[int, int, int, tuple[int, ...]]:
        """Find M, N, K and the leading dimensions; M may be symbolic.

        Raises:
            LaunchError: wrong shape, dtype or device.
        """
        for label, t in (("A", a), ("B", b)):
            got = getattr(t, "dtype", type(t).__name__)
            if dtype_name(got) not in types:
                raise self.error(f"{label} is {got}, expected a {' or '.join(types)} tensor")
        if a.dtype != b.dtype:
            raise self.error(f"A is {a.dtype} and B {b.dtype}, expected one dtype")
        if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[-1]:
            shapes, hint = f"A is {tuple(a.shape)} and B {tuple(b.shape)}", ""
            if a.ndim < 2 or b.ndim != 2:
                raise self.error(f"{shapes}, expected (…, M, K) and (N, K)")
            if b.shape[0] == a.shape[-1]:
                hint = "B is transposed: give B.mT"
            raise self.error(f"{shapes}, expected one K, the last dimension of both", hint=hint)
        if b.device != a.device:
            raise self.error(f"B is on {b.device}, A on {a.device}")
        lead, n, k = tuple(a.shape[:-1]), self.program.columns(b), b.shape[1]
        n_step, k_step = self.steps(a.dtype)
        if n == 0 or k == 0 or n % n_step or k % k_step:
            raise self.error(
                f"N, K = {n}, {k}, expected positive, N a multiple of {n_step} and K of {k_step}",
                hint="TMA moves rows in units of 16 bytes; pad the weight",
            )
        if len(operands) > len(self.operands):
            unknown = sorted(set(operands) - set(self.operands))
            raise self.error(f"no operand is named {unknown[0]!r}")
        for o, kind in self.operands.items():
            if fault := self._fault(o, kind, operands.get(o), a, lead, n):
                raise self.error(f"operand {o!r} {fault}")
        return math.prod(lead), n, k, lead

    def _fault(
        self, o: str, kind: type[Resource], value: Any, a: torch.Tensor, lead: tuple, n: int
    ) -> str:
        """Say what is wrong with an operand, if anything."""
        if value is None:
            return "is missing"
        if fault := kind.fault(value, lead, n):
            return fault
        if kind is OddRows and (value.dtype, value.shape[1]) != (a.dtype, a.shape[-1]):
            return f"is {value.dtype} of {value.shape[1]} columns, expected B's"
        if o in self.program.outputs and value.dtype != (wanted := self.dtypes_for(a.dtype)[o]):
            return f"is {value.dtype}, expected {wanted}"
        if getattr(value, "device", a.device) != a.device:
            return f"is on {value.device}, A on {a.device}"
        return ""

    def columns(self, o: str, index: torch.Tensor, n: int) -> None:
        """Refuse indices of no column, which a kernel takes for 0."""
        outside = index[(index < 0) | (index >= n)]
        if outside.numel():
            raise self.error(
                f"operand {o!r} holds {int(outside[0])}, expected columns from 0 to {n - 1}",
                hint="give 0 where a row does not count, and leave that row out of the loss",
            )

    def error(self, message: str, *, hint: str = "") -> LaunchError:
        return LaunchError(f"{self.program.name}: {message}", hint=hint)


def dtype_name(dtype: object) -> str:
    """Name a dtype as specs do."""
    return str(dtype).removeprefix("torch.")
