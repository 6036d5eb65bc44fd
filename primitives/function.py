"""Programs as functions on tensors: checks, layouts, configuration, the fallback without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.graph import Shape
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.launch import allocate, launch
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import finalise
from coda_agent.primitives.resources import ColIndex, ColVector, HalfTile, RowVector, Scalar
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig, offered

if TYPE_CHECKING:
    import torch

Chooser = Callable[[int, int, int, str], TileConfig]


@dataclass(frozen=True)
class ProgramFunction:
    """A program bound to output dtypes and a way to choose its tiles.

    Attributes:
        program: The program.
        dtypes: Output name to dtype name; None means the dtype of A.
        choose: (M, N, K, dtype name of A) to the configuration to run.
    """

    program: Program
    dtypes: Mapping[str, str | None]
    choose: Chooser

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
            a: (…, M, K), bf16 or fp16, any strides.
            b: (N, K), the nn.Linear layout, same dtype.
            operands: By name: tiles (…, M, N), column vectors and indices (…, M), row vectors (N,),
                numbers.
            block_size: None returns final reductions. An integer pins the reduction block and
                returns raw partials from one launch: (…, M, ⌈N / block_size⌉), or
                (N, ⌈M / block_size⌉) over rows.
            config: A tile configuration instead of the chosen one.

        Raises:
            LaunchError: wrong shape, dtype or device, or a block size no configuration has.
        """
        m, n, k, lead = self._check(a, b, operands)
        if config is None:
            config = self._configuration(m, n, k, a, block_size)
        a2 = a.reshape(m, k)
        flat = {o: self._flatten(o, operands[o], m, n) for o in self.program.operands}
        dtypes = self._dtypes(a)
        if supported(a.device):
            results = self._run(a2, b, flat, dtypes, config, raw=block_size is not None)
        else:
            _say_interpreted(str(a.device))
            results = interpret(
                self.program,
                a2,
                b,
                flat,
                dtypes=dtypes,
                block=config.tile_n,
                row_block=config.tile_m,
                raw=block_size is not None,
            )
        if len(lead) == 1:
            return results
        per_column = {o for o, kind in self.program.reductions.items() if kind.over_rows}
        return {
            o: t if o in per_column else t.reshape(*lead, *t.shape[1:]) for o, t in results.items()
        }

    def _run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Mapping[str, Any],
        dtypes: Mapping[str, torch.dtype],
        config: TileConfig,
        *,
        raw: bool,
    ) -> dict[str, torch.Tensor]:
        m, n = a.shape[0], b.shape[0]
        outputs = allocate(self.program, m, n, dtypes, config, a.device)
        ready = {o: tma_ready(v) if hasattr(v, "stride") else v for o, v in operands.items()}
        launch(
            self.program,
            tma_ready(a, either_major=True),
            tma_ready(b, either_major=True),
            ready,
            outputs,
            config,
        )
        return finalised(self.program, outputs, m, n, config, raw=raw)

    def _configuration(
        self, m: int, n: int, k: int, a: torch.Tensor, block_size: int | None
    ) -> TileConfig:
        config = self.choose(m, n, k, str(a.dtype).removeprefix("torch."))
        if block_size is None or block_size in self._blocks(config):
            return config
        blocks = {
            block: c for c in reversed(offered(self.program.paired)) for block in self._blocks(c)
        }
        if block_size not in blocks:
            raise LaunchError(
                f"{self.program.name}: no tile has block_size {block_size}, expected one of "
                f"{', '.join(map(str, sorted(blocks)))}"
            )
        return blocks[block_size]

    def _blocks(self, config: TileConfig) -> set[int]:
        """The reduction block a configuration gives; none where rows and columns are both reduced
        over, by different extents."""
        extents = {
            config.tile_m if kind.over_rows else config.tile_n
            for kind in self.program.reductions.values()
        }
        return {config.tile_n} if not extents else extents if len(extents) == 1 else set()

    def _dtypes(self, a: torch.Tensor) -> dict[str, torch.dtype]:
        import torch

        return {
            o: a.dtype if (name := self.dtypes.get(o)) is None else getattr(torch, name)
            for o in self.program.outputs
        }

    def _check(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any]
    ) -> tuple[int, int, int, tuple[int, ...]]:
        import torch

        name = self.program.name
        for label, t in (("A", a), ("B", b)):
            if not isinstance(t, torch.Tensor) or t.dtype not in (torch.bfloat16, torch.float16):
                got = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
                raise LaunchError(
                    f"{name}: {label} is {got}, expected a bfloat16 or float16 tensor"
                )
        if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[-1] or a.dtype != b.dtype:
            raise LaunchError(
                f"{name}: A is {tuple(a.shape)} {a.dtype} and B {tuple(b.shape)} {b.dtype}, "
                "expected (…, M, K) and (N, K) of one dtype"
            )
        lead, (n, k) = tuple(a.shape[:-1]), b.shape
        m = a.numel() // k if k else 0
        step = 16 if any(kind is HalfTile for kind in self.program.outputs.values()) else 8
        if 0 in (m, n, k) or n % step or k % 8:
            raise LaunchError(
                f"{name}: M, N, K = {m}, {n}, {k}, "
                f"expected positive, N a multiple of {step} and K of 8",
                hint="TMA moves rows in units of 16 bytes; pad the weight",
            )
        unknown = sorted(set(operands) - set(self.program.operands))
        if unknown:
            raise LaunchError(f"{name}: no operand is named {unknown[0]!r}")
        missing = [o for o in self.program.operands if operands.get(o) is None]
        if missing:
            raise LaunchError(f"{name}: operand {missing[0]!r} is missing")
        for o, kind in self.program.operands.items():
            value = operands[o]
            if kind is Scalar:
                continue
            expected = {ColVector: lead, ColIndex: lead, RowVector: (n,)}.get(kind, (*lead, n))
            if tuple(getattr(value, "shape", ())) != expected:
                got = tuple(getattr(value, "shape", ())) if hasattr(value, "shape") else value
                raise LaunchError(f"{name}: operand {o!r} has shape {got}, expected {expected}")
            if kind is ColIndex and value.dtype not in (torch.int32, torch.int64):
                raise LaunchError(
                    f"{name}: operand {o!r} is {value.dtype}, expected int32 or int64 indices"
                )
            if value.device != a.device:
                raise LaunchError(f"{name}: operand {o!r} is on {value.device}, A on {a.device}")
        return m, n, k, lead

    def _flatten(self, o: str, value: Any, m: int, n: int) -> Any:
        kind = self.program.operands[o]
        if kind in (Scalar, RowVector):
            return value
        if kind is ColIndex and value.is_cuda:
            # The kernel compares 32 bits, and does not know where the last tile's columns end.
            value = value.where((value >= 0) & (value < n), -1).int()
        return value.reshape(m) if kind in (ColVector, ColIndex) else value.reshape(m, n)


def finalised(
    program: Program,
    outputs: Mapping[str, torch.Tensor],
    m: int,
    n: int,
    config: TileConfig,
    *,
    raw: bool = False,
) -> dict[str, torch.Tensor]:
    """What a kernel wrote as the caller wants it: partials of a reduction over rows turned to
    (N, blocks), and unless `raw` every reduction folded to its final values."""
    results = dict(outputs)
    for o, kind in program.reductions.items():
        found = outputs[o].mT if kind.over_rows else outputs[o]
        half = program.graph.nodes[program.graph.outputs[o]].shape is Shape.HALF
        folded, block = (m, config.tile_m) if kind.over_rows else (n, config.tile_n)
        if half:
            folded, block = folded // 2, block // 2
        results[o] = found if raw else finalise(found, kind, folded, block)
    return results


def default_config(m: int, n: int, k: int, dtype: str) -> TileConfig:
    """The configuration of an untuned call."""
    return DEFAULT_CONFIGS["sm_90a"]


def tma_ready(t: torch.Tensor, *, either_major: bool = False) -> torch.Tensor:
    """`t` (1-D or 2-D), or a contiguous copy where its strides or its address do not suit the
    kernel's loads.

    Args:
        t: The tensor.
        either_major: Whether the unit stride may be the first one (GEMM operands) or must be the
            last (epilogue operands).
    """
    step = 16 // t.element_size()
    strides = t.stride()
    suits = strides[-1] == 1 and all(s % step == 0 and s > 0 for s in strides[:-1])
    if either_major and not suits:
        suits = strides[0] == 1 and strides[1] % step == 0 and strides[1] > 0
    if suits and t.data_ptr() % 16 == 0:
        return t
    dense = t.contiguous()
    return dense.clone() if dense.data_ptr() == t.data_ptr() else dense


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
        stacklevel=4,
    )
