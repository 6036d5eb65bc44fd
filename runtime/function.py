"""Programs as functions on tensors: checks, layouts, configuration, the fallback without a GPU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import HalfTile, Scalar, steps
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig, offered
from coda_agent.runtime.call_cache import CallPlan, Calls
from coda_agent.runtime.launch import allocate
from coda_agent.runtime.plan import resolve

if TYPE_CHECKING:
    import torch

exact: ContextVar[bool] = ContextVar("exact", default=False)
"""Whether calls take float32 alone, and PyTorch interprets them: for proofs of formulas."""

Chooser = Callable[[int, int, int, str, int | None], TileConfig | None]


@dataclass(frozen=True, eq=False)
class ProgramFunction:
    """A program bound to element types and a way to choose its tiles.

    Attributes:
        program: The program.
        dtypes: Output name to dtype name; None or none means the dtype of A, float32 if gathered.
        choose: (M, N, K, dtype name of A, reduction block or None) to the configuration to run;
            None where none is known for that block.
        types: Names of the dtypes that A may have.
        refused: Labels of tiles that no block size may select.
        columns: Index operands that name a column in each row; of others one outside selects 0.
        kept: Whether what an `AddTile` is added to must not change: it is copied.
    """

    program: Program
    dtypes: Mapping[str, str | None]
    choose: Chooser
    types: tuple[str, ...] = ("bfloat16", "float16")
    refused: frozenset[str] = frozenset()
    columns: tuple[str, ...] = ()
    kept: bool = False

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Mapping[str, Any],
        *,
        block_size: int | None = None,
        config: TileConfig | None = None,
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs of the program on a bᵀ.

        Args:
            a: (…, M, K), any strides; this and every other tensor is copied first where TMA cannot
                load it as it is. No rows give empty results, and final reductions over rows their
                identity.
            b: (N, K), the nn.Linear layout, same dtype.
            operands: By name: tiles (…, M, N) or (…, M, 2N), column vectors and indices (…, M), row
                vectors (N,); scalars as numbers, or as float32 tensors of one element, which the
                kernel reads. By its output's name what an `AddTile` is added to.
            block_size: None returns final reductions. An integer pins the reduction block and
                returns raw partials from one launch: (…, M, ⌈N / block_size⌉), or
                (N, ⌈M / block_size⌉) over rows, column by column in memory.
            config: A tile configuration instead of the chosen one.

        Raises:
            LaunchError: wrong shape, dtype or device, or a block size no configuration has.
        """
        values = (a, b, *map(operands.get, self.operands))
        option, call = (block_size, config), None
        if len(operands) == len(self.operands):
            call = self.calls.find(values, option) or self.calls.recall(values, option)
        if call is None:
            m, n, k, lead = self._check(a, b, operands)
            if m == 0 or a.is_meta:
                return self.fake(a, b, operands, block_size=block_size)
            if max(m, n, k) >> 31:
                raise self._error(f"M, N, K = {m}, {n}, {k}, expected each below 2³¹")
            config = config or self._configuration(m, n, k, a, block_size)
            raw = block_size is not None
            if not supported(a.device):
                return self._interpret(a, b, operands, config, lead, raw=raw)
            dtypes = self._dtypes(a.dtype)
            call = resolve(self.program, a, b, operands, dtypes, config, raw=raw, kept=self.kept)
            self.calls.keep(values, option, call)
        return dict(zip(self.program.outputs, call(values), strict=True))

    def fake(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Mapping[str, Any],
        *,
        block_size: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """What a call returns, in shapes, dtypes and strides alone: for tensors without data, whose
        sizes may be symbols. Reductions are those over no rows.

        Raises:
            LaunchError: as a call.
        """
        m, n, _, lead = self._check(a, b, operands)
        tile = DEFAULT_CONFIGS["sm_90a"] if block_size is None else self._tile(block_size)
        results = allocate(self.program, m, n, self._dtypes(a.dtype), tile, a.device)
        for o, kind in self.program.reductions.items():
            if block_size is None:
                results[o] = results[o].new_full(kind.extents(m, n), kind.identity())
            elif kind.over_rows:
                results[o] = results[o].mT
        held = {o: operands[o] for o in results if o == self.program.accumulated}
        if self.kept:
            held = {o: t.new_empty(t.shape) for o, t in held.items()}
        return self._batched(results | held, lead)

    def _interpret(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Mapping[str, Any],
        config: TileConfig,
        lead: tuple[int, ...],
        *,
        raw: bool,
    ) -> dict[str, torch.Tensor]:
        if not exact.get():
            _say_interpreted(str(a.device))
        for o in self.columns:
            self._check_columns(o, operands[o], len(b))
        m = math.prod(lead)
        results = interpret(
            self.program,
            a.reshape(m, -1),
            b,
            {o: kind.flat(operands[o], m) for o, kind in self.operands.items()},
            dtypes=self._dtypes(a.dtype),
            block=config.tile_n,
            row_block=config.tile_m,
            raw=raw,
        )
        # In memory as the kernel's own partials.
        results |= {o: results[o].mT.contiguous().mT for o in self._over_rows if raw}
        if o := self.program.accumulated:
            if self.kept:
                results[o] = results[o].reshape(operands[o].shape)
            else:
                results[o] = operands[o].copy_(results[o].reshape(operands[o].shape))
        return self._batched(results, lead)

    def _batched(
        self, results: dict[str, torch.Tensor], lead: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """`results` with the leading dimensions of A, but for reductions over rows."""
        if len(lead) == 1:
            return results
        kept = {*self._over_rows, self.program.accumulated}
        return {o: t if o in kept else t.reshape(*lead, *t.shape[1:]) for o, t in results.items()}

    @cached_property
    def calls(self) -> Calls[CallPlan]:
        """The calls resolved so far; their inputs are A, B and the operands."""
        kinds = [*enumerate(self.operands.values(), 2)]
        return Calls(0, 1, [i for i, kind in kinds if kind is Scalar], 2 + len(kinds))

    @cached_property
    def operands(self) -> dict[str, type[Resource]]:
        """Kinds of the operands, and at last of what is added to."""
        added = {o: kind for o, kind in self.program.outputs.items() if kind.accumulates}
        return {**self.program.operands, **added}

    @cached_property
    def _over_rows(self) -> frozenset[str]:
        return frozenset(o for o, kind in self.program.reductions.items() if kind.over_rows)

    def _configuration(
        self, m: int, n: int, k: int, a: torch.Tensor, block_size: int | None
    ) -> TileConfig:
        config = self.choose(m, n, k, _name(a.dtype), block_size)
        if config is None:
            return DEFAULT_CONFIGS["sm_90a"] if block_size is None else self._tile(block_size)
        return config

    def _tile(self, block_size: int) -> TileConfig:
        """The first configuration on offer with this reduction block."""
        if block_size not in self._tiles:
            raise LaunchError(
                f"{self.program.name}: no tile has block_size {block_size}, expected one of "
                f"{', '.join(map(str, sorted(self._tiles)))}"
            )
        return self._tiles[block_size]

    @cached_property
    def _tiles(self) -> dict[int, TileConfig]:
        usable = [c for c in offered(self.program) if c.label not in self.refused]
        blocks = ((reduction_block(self.program, c), c) for c in reversed(usable))
        return {block: c for block, c in blocks if block is not None}

    @lru_cache(maxsize=64)  # noqa: B019 (there are as many functions as kernels)
    def _dtypes(self, element: torch.dtype) -> dict[str, torch.dtype]:
        import torch

        names = {o: "float32" for o, k in self.program.outputs.items() if k.element_bytes == 4}
        names |= {o: name for o, name in self.dtypes.items() if name is not None}
        return {
            o: getattr(torch, names[o]) if o in names else element for o in self.program.outputs
        }

    @lru_cache(maxsize=64)  # noqa: B019
    def _steps(self, element: torch.dtype) -> tuple[int, int]:
        """What N and K must be multiples of."""
        sizes = (d.itemsize for d in self._dtypes(element).values())
        half = HalfTile in self.program.outputs.values()
        return steps(element.itemsize, sizes, half=half, group=self.program.group)

    def _check(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any]
    ) -> tuple[int, int, int, tuple[int, ...]]:
        """(M, N, K) and the leading dimensions; asks nothing of M, which may be a symbol."""
        types = ("float32",) if exact.get() else self.types
        for label, t in (("A", a), ("B", b)):
            got = getattr(t, "dtype", type(t).__name__)
            if _name(got) not in types:
                raise self._error(f"{label} is {got}, expected a {' or '.join(types)} tensor")
        if a.dtype != b.dtype:
            raise self._error(f"A is {a.dtype} and B {b.dtype}, expected one dtype")
        if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[-1]:
            shapes, hint = f"A is {tuple(a.shape)} and B {tuple(b.shape)}", ""
            if a.ndim < 2 or b.ndim != 2:
                raise self._error(f"{shapes}, expected (…, M, K) and (N, K)")
            if b.shape[0] == a.shape[-1]:
                hint = "B is transposed: give B.mT"
            raise self._error(f"{shapes}, expected one K, the last dimension of both", hint=hint)
        if b.device != a.device:
            raise self._error(f"B is on {b.device}, A on {a.device}")
        lead, (n, k) = tuple(a.shape[:-1]), b.shape
        n_step, k_step = self._steps(a.dtype)
        if n == 0 or k == 0 or n % n_step or k % k_step:
            raise self._error(
                f"N, K = {n}, {k}, expected positive, N a multiple of {n_step} and K of {k_step}",
                hint="TMA moves rows in units of 16 bytes; pad the weight",
            )
        if len(operands) > len(self.operands):
            unknown = sorted(set(operands) - set(self.operands))
            raise self._error(f"no operand is named {unknown[0]!r}")
        for o, kind in self.operands.items():
            if fault := self._fault(o, kind, operands.get(o), a, lead, n):
                raise self._error(f"operand {o!r} {fault}")
        return math.prod(lead), n, k, lead

    def _fault(
        self, o: str, kind: type[Resource], value: Any, a: torch.Tensor, lead: Any, n: int
    ) -> str:
        """What is wrong with an operand; empty if nothing is."""
        if value is None:
            return "is missing"
        if fault := kind.fault(value, lead, n):
            return fault
        if o in self.program.outputs and value.dtype != (wanted := self._dtypes(a.dtype)[o]):
            return f"is {value.dtype}, expected {wanted}"
        if getattr(value, "device", a.device) != a.device:
            return f"is on {value.device}, A on {a.device}"
        return ""

    def _check_columns(self, o: str, index: torch.Tensor, n: int) -> None:
        """Refuse indices of no column: a kernel takes 0 for them, as a check is three launches."""
        outside = index[(index < 0) | (index >= n)]
        if outside.numel():
            raise self._error(
                f"operand {o!r} holds {int(outside[0])}, expected columns from 0 to {n - 1}",
                hint="give 0 where a row does not count, and leave that row out of the loss",
            )

    def _error(self, message: str, *, hint: str = "") -> LaunchError:
        return LaunchError(f"{self.program.name}: {message}", hint=hint)


def reduction_block(program: Program, config: TileConfig) -> int | None:
    """The block of raw partials a configuration gives in one launch; None where rows and columns
    are both reduced over, by different extents, where partials of K are summed first, or where the
    product is a launch of its own."""
    kinds = program.reductions.values()
    extents = {kind.block(config) for kind in kinds} or {config.tile_n}
    one_launch = config.split_k == 1 and config.fused
    return extents.pop() if len(extents) == 1 and one_launch else None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def untuned(m: int, n: int, k: int, dtype: str, block: int | None) -> None:
    """The chooser of a program nobody has measured."""


@lru_cache(maxsize=16)
def supported(device: torch.device) -> bool:
    """Whether kernels run on `device`: a Hopper GPU with the DSL installed."""
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=16)
def _say_interpreted(device: str) -> None:
    warnings.warn(
        f"coda-agent: no Hopper GPU behind tensors on {device}; kernels are interpreted by PyTorch "
        "(correct, not fast)",
        stacklevel=7,  # the line that calls a kernel
    )
