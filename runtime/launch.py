"""Compile and launch lowered programs on 2-D operands.

- `launch` resolves once; what it gives enqueues again and again, for a few us of host time.
- A launch's inputs are A, B and the operands in the program's order, its outputs in theirs.
- `block` of a raw reduction is the tile's width, so partial buffers depend on the configuration.
- Operands obey TMA: one unit stride, the other a multiple of 16 bytes, 16-byte aligned.
  `plan.py` arranges that for callers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.lower import kernel_names, lower
from coda_agent.primitives.memory import parts_meet, tile_counter
from coda_agent.primitives.objects import cached
from coda_agent.primitives.operation import Term
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import HalfTile, OddRows
from coda_agent.primitives.spread import exchanged
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime import unfused
from coda_agent.runtime.call_cache import launching

if TYPE_CHECKING:
    from quack.gemm_runtime.host import GemmEpiPlan


# FP8 products are summed by the tensor core alone, as cuBLAS's use_fast_accum does: quack's default
# on SM90, sums promoted to registers, spills and is 3 to 20 times slower (measured on an H200).
_FP8 = (("fp8_slow_accum", False),)

# Bytes from one row to the next that TMA counts. Memory of two allocators may lie farther apart.
_FARTHEST = 1 << 40

# Plans that quack keeps of a program, some kilobytes each.
_PLANS = 512


def allocate(
    program: Program,
    m: int,
    n: int,
    dtypes: Mapping[str, torch.dtype],
    config: TileConfig,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    """Make raw output buffers; the caller fills what is added to."""
    return {
        o: torch.empty(
            kind.buffer(m, n, config),
            dtype=torch.float32 if o in program.reductions else dtypes[o],
            device=device,
        )
        for o, kind in program.outputs.items()
    }


class Arguments(NamedTuple):
    """What is launched: one kernel, or two where the configuration is unfused.

    Attributes:
        a: (M, K).
        b: (N, K).
        operands: By name: tiles (M, N) or (M, 2N), vectors (M,) or (N,), numbers or one-element
            float32 tensors. An index outside [0, N) selects 0.
        outputs: Raw buffers, as of `allocate`.
        bound: The launch, if it is resolved.
    """

    program: Program
    a: torch.Tensor
    b: torch.Tensor
    operands: Mapping[str, Term]
    outputs: Mapping[str, torch.Tensor]
    config: TileConfig
    bound: Bound | None = None


@dataclass(frozen=True)
class Bound:
    """A launch with everything resolved but the tensors.

    Attributes:
        enqueue: Launches on the current stream of the tensors' device, which is the current one.
            Takes inputs and outputs.
    """

    program: Program
    config: TileConfig
    enqueue: Callable[[Sequence[object], Sequence[torch.Tensor]], None]

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Run on inputs like the bound ones; further ones are passed over."""
        instead = launcher.get()
        if instead is _launch:
            self.enqueue(inputs, outputs)
        else:
            operands = dict(zip(self.program.operands, inputs[2:], strict=False))
            named = dict(zip(self.program.outputs, outputs, strict=True))
            a, b = inputs[:2]
            instead(Arguments(self.program, a, b, operands, named, self.config, self))


def launch(given: Arguments, *, run: bool = True) -> Bound:
    """Run a program; `run=False` only compiles and binds, for meta tensors too.

    Raises:
        CompileError: the configuration cannot carry this program, or the DSL refuses it.
    """
    return launcher.get()(given, run=run)


def _launch(given: Arguments, *, run: bool = True) -> Bound:
    program, a, b, operands, outputs, config, bound = given
    if bound is None:
        resolve = _fused if config.fused else unfused.resolve
        if program.spread:
            resolve = partial(_in_order, odd=program.spread)
        bound = Bound(program, config, cached(partial(resolve, given)))
    if run:
        inputs = a, b, *(operands[o] for o in program.operands)
        bound.enqueue(inputs, [outputs[o] for o in program.outputs])
    return bound


launcher: ContextVar[Callable[..., Any]] = ContextVar("launcher", default=_launch)
"""What `launch` and `Bound` call, with the arguments of `launch`. A process that reports launches,
or lets some fail, sets one that calls the one before; `run=False` compiles ahead of what it does.
"""


def _fused(given: Arguments) -> Callable[..., None]:
    program, a, b, operands, _, config, _ = given
    plan = _plan(given)
    swap, parts = config.swap_ab, plan.split_k > 1
    a_at = len(program.outputs) + 1
    makes: list[tuple[int, Callable[[Any], Any]]] = [(a_at + 1, attrgetter("mT"))] if swap else []
    if program.spread:  # of B's shape; the kernel knows its strides
        shape = program.columns(b), b.shape[1]
        makes.append((a_at + 1, methodcaller("as_strided", shape, (0, 1))))
    for i, (o, kind) in enumerate(program.operands.items(), a_at + 2):
        if kind.vector:  # quack takes vectors with a batch dimension
            makes.append((i, methodcaller("unsqueeze", 0)))
        elif kind is OddRows:
            makes.append((i, methodcaller("data_ptr")))
        elif not kind.dims:
            in_memory = hasattr(operands[o], "data_ptr")
            makes.append((i, methodcaller("data_ptr") if in_memory else float))
    # Just compiled, quack's function is a wrapper that parses keywords; from the cache it is bare.
    call: Any = getattr(plan.compiled_fn, "_tvm_ffi_function", None) or plan.compiled_fn
    scheduler = _options(plan)
    if plan.scheduler_uses_semaphore:
        call = _counted(call)
    rows, columns = a.shape[0], program.columns(b)
    rows, columns = (columns, rows) if swap else (rows, columns)
    tile, cluster = (config.tile_m, config.tile_n), (config.cluster_m, config.cluster_n)
    meet = partial(parts_meet, rows, columns, tile, cluster) if parts else None
    return launching(call, _ordered(given, plan), makes, scheduler, meet)


def _in_order(given: Arguments, odd: str) -> Callable[..., None]:
    """Resolve a launch of B's rows in two tensors, of which either may have the lower address.

    TMA counts upwards. So the lower one gives the even rows, and where these are the odd ones the
    program exchanges each pair of columns first, which are registers of one thread.
    """
    program = given.program
    at = 2 + [*program.operands].index(odd)
    rising = _fused(given)

    @lru_cache(maxsize=1)
    def falling() -> Callable[..., None]:
        return cached(partial(_fused, given._replace(program=exchanged(program))))

    def launch(inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        even, other = inputs[1], inputs[at]
        apart = other.data_ptr() - even.data_ptr()
        if 0 < apart < _FARTHEST:
            return rising(inputs, outputs)
        given = [*inputs]
        if 0 < -apart < _FARTHEST and (falling.cache_info().currsize or not _captured()):
            given[1], given[at] = other, even
            return falling()(given, outputs)
        given[1], given[at] = torch.stack([even, other])
        return rising(given, outputs)

    return launch


def _captured() -> bool:
    """Tell whether a CUDA graph is being captured, while nothing can be compiled."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _options(plan: GemmEpiPlan) -> tuple[object, ...]:
    from quack.gemm_tvm_ffi_utils import make_scheduler_args

    options = make_scheduler_args(0, plan.max_swizzle_size, None)
    return options._replace(max_active_clusters=plan.max_active_clusters)


def _counted(call: Callable[..., object]) -> Callable[..., None]:
    """Give each launch of a kernel the counter of its tiles."""

    def launch(
        a: torch.Tensor,
        b: object,
        d: object,
        c: object,
        epilogue: object,
        scheduler: Any,
        *rest: None,
    ) -> None:
        counter = tile_counter(a.device)
        scheduler = scheduler._replace(tile_count_semaphore=counter.data_ptr())
        call(a, b, d, c, epilogue, scheduler, *rest)

    return launch


def order(given: Arguments) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find a fused kernel's arguments: as `call_cache.launching` has their order.

    They lie among None, the outputs, the inputs, and at last where parts of K meet: A, B, D and C,
    and those of its epilogue.
    """
    return _ordered(given, cached(partial(_plan, given)))


def _ordered(given: Arguments, plan: GemmEpiPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    program, swap = given.program, given.config.swap_ab
    a_at = len(program.outputs) + 1
    named = (*program.outputs, None, None, *program.operands)
    at = {name: 1 + named.index(o) for o, name in kernel_names(program).items()}
    at |= {"split_k_semaphore": -2, "split_k_workspace": -1} if plan.split_k > 1 else {}
    gemm = a_at + swap, a_at + (not swap), at.get("D", 0), at.get("c", 0)
    return gemm, tuple(at.get(name, 0) for name in plan.arg_template)


def _plan(given: Arguments) -> GemmEpiPlan:
    program, a, b, operands, outputs, config, _ = given
    values = _by_kernel_name(program, operands, outputs)
    d, c = values.pop("D", None), values.pop("c", None)
    module = lower(program, config.tile_n)
    if program.spread:  # quack compares shapes, and looks at nothing else
        b = b.new_empty(program.columns(b), b.shape[1], device="meta")
    if len(module._plan_cache) > _PLANS:
        module._plan_cache.clear()
    try:
        return module.gemm(
            a,
            b.mT if config.swap_ab else b,
            d,
            c,
            epi_args=values,
            tile_M=config.tile_m,
            tile_N=config.tile_n,
            cluster_M=config.cluster_m,
            cluster_N=config.cluster_n,
            pingpong=config.pingpong,
            max_swizzle_size=config.swizzle,
            persistent=config.persistent,
            is_dynamic_persistent=config.dynamic,
            **({"tile_count_semaphore": a.new_empty(1, device="meta")} if config.dynamic else {}),
            split_k=config.parts(a.shape[1]),
            swap_ab=config.swap_ab,
            b_kn=config.swap_ab,
            add_to_output=program.accumulated is not None,
            post_init_attrs=_FP8 if a.element_size() == 1 else (),
            _launch=False,
        )
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise CompileError(
            f"{program.name} does not compile as {config.label}: {_first_line(error)}"
        ) from error


def _by_kernel_name(
    program: Program, operands: Mapping[str, Term], outputs: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Name tensors and numbers as the kernel: "c", "D", then positions."""
    names, values = kernel_names(program), dict[str, Any]()
    for o, kind in program.operands.items():
        value: Any = operands[o] if hasattr(operands[o], "data_ptr") else float(operands[o])
        values[names[o]] = value[None] if kind.vector else value
    for o, kind in program.outputs.items():
        values[names[o]] = outputs[o]
        if kind is HalfTile and outputs[o].element_size() == 1 and "D" in names.values():
            # quack's narrow store follows the register layout of D's, and is wrong for 16-bit D
            # (seen on an H200).
            raise CompileError(
                f"{program.name}: an e4m3 HalfTile beside a full-width store is not supported",
                hint="store it in 16 bits, or leave the full-width output out",
            )
    return values


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
