"""Programs as functions on tensors: checks, configuration, the fallback without a GPU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import Scalar
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig, offered
from coda_agent.runtime.call_cache import CallPlan, Calls
from coda_agent.runtime.launch import allocate
from coda_agent.runtime.plan import Wanted, resolve
from coda_agent.runtime.tensor_checks import TensorChecks, dtype_name

exact: ContextVar[bool] = ContextVar("exact", default=False)
"""Whether calls take float32 alone, and PyTorch interprets them: for proofs of formulas."""

Chooser = Callable[[int, int, int, str, int | None], TileConfig | None]
UNASKED = (None, None)
"""The option of calls without a block size and a tile configuration."""


@dataclass(frozen=True, eq=False)
class ProgramFunction:
    """A program with element types and a way to choose its tiles.

    Attributes:
        dtypes: Output name to dtype name; None or none means the dtype of A, float32 if gathered.
        choose: (M, N, K, dtype name of A, reduction block or None) to the configuration to run;
            None where none is known for that block.
        refused: Labels of tiles that no block size may select.
        columns: Index operands that name a column in each row; of others one outside selects 0.
        kept: Whether what an `AddTile` is added to must not change: it is copied.
        partials: Whether a call without `block_size` gives raw partials too, of the tile that is
            chosen. Sizes are no symbols then.
    """

    program: Program
    dtypes: Mapping[str, str | None]
    choose: Chooser
    types: tuple[str, ...] = ("bfloat16", "float16")
    refused: frozenset[str] = frozenset()
    columns: tuple[str, ...] = ()
    kept: bool = False
    partials: bool = False

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
            m, n, k, lead = self._checked(a, b, operands)
            if m == 0 or a.is_meta:
                return self.fake(a, b, operands, block_size=block_size)
            if max(m, n, k) >> 31:
                raise self._checks.error(f"M, N, K = {m}, {n}, {k}, expected each below 2³¹")
            config = config or self._configuration(m, n, k, a, block_size)
            raw = block_size is not None or self.partials
            if not supported(a.device):
                return self._interpret(a, b, operands, config, lead, raw=raw)
            wanted = Wanted(self._checks.dtypes_for(a.dtype), raw, self.kept)
            call = resolve(self.program, a, b, operands, config, wanted)
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
        """Make a call's results without data, of sizes that may be symbols.

        Reductions are those over no rows. It raises as a call.
        """
        m, n, k, lead = self._checked(a, b, operands)
        tile = DEFAULT_CONFIGS["sm_90a"] if block_size is None else self._tile(block_size)
        if self.partials:
            tile = self._configuration(m, n, k, a, block_size)
        results = allocate(self.program, m, n, self._checks.dtypes_for(a.dtype), tile, a.device)
        for o, kind in self.program.reductions.items():
            if block_size is None and not self.partials:
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
            self._checks.columns(o, operands[o], len(b))
        m = math.prod(lead)
        results = interpret(
            self.program,
            a.reshape(m, -1),
            b,
            {o: kind.flat(operands[o], m) for o, kind in self.operands.items()},
            dtypes=self._checks.dtypes_for(a.dtype),
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
        """Give `results` A's leading dimensions, but for reductions over rows."""
        if len(lead) == 1:
            return results
        kept = {*self._over_rows, self.program.accumulated}
        return {o: t if o in kept else t.reshape(*lead, *t.shape[1:]) for o, t in results.items()}

    @cached_property
    def calls(self) -> Calls[CallPlan]:
        """The calls resolved so far, by A, B and the operands."""
        kinds = [*enumerate(self.operands.values(), 2)]
        return Calls(0, 1, [i for i, kind in kinds if kind is Scalar], 2 + len(kinds))

    @cached_property
    def operands(self) -> dict[str, type[Resource]]:
        """Kinds of the operands, and at last of what is added to."""
        return self._checks.operands

    @cached_property
    def _checks(self) -> TensorChecks:
        return TensorChecks(self.program, self.dtypes)

    def _checked(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any]
    ) -> tuple[int, int, int, tuple[int, ...]]:
        return self._checks.sizes(a, b, operands, ("float32",) if exact.get() else self.types)

    @cached_property
    def _over_rows(self) -> frozenset[str]:
        return frozenset(o for o, kind in self.program.reductions.items() if kind.over_rows)

    def _configuration(
        self, m: int, n: int, k: int, a: torch.Tensor, block_size: int | None
    ) -> TileConfig:
        config = self.choose(m, n, k, dtype_name(a.dtype), block_size)
        if config is None:
            return DEFAULT_CONFIGS["sm_90a"] if block_size is None else self._tile(block_size)
        return config

    def _tile(self, block_size: int) -> TileConfig:
        """Find the first configuration on offer with this reduction block."""
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


def reduction_block(program: Program, config: TileConfig) -> int | None:
    """Find the block of raw partials that one launch gives.

    None where rows and columns are both reduced over, by different extents, where partials of K are
    summed first, or where the product is a launch of its own.
    """
    kinds = program.reductions.values()
    extents = {kind.block(config) for kind in kinds} or {config.tile_n}
    one_launch = config.split_k == 1 and config.fused
    return extents.pop() if len(extents) == 1 and one_launch else None


def untuned(m: int, n: int, k: int, dtype: str, block: int | None) -> None:
    """Choose no tile, of a program nobody has measured."""


@lru_cache(maxsize=16)
def supported(device: torch.device) -> bool:
    """Tell whether kernels run on `device`, a Hopper GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=16)
def _say_interpreted(device: str) -> None:
    warnings.warn(
        f"coda-agent: no Hopper GPU behind tensors on {device}; kernels are interpreted by PyTorch "
        "(correct, not fast)",
        stacklevel=8,  # the line that calls a kernel
    )
