"""Output stores that quack lacks; only the lowering imports this.

- quack's paired mode hands a program two adjacent accumulator lanes and takes back half-width
  outputs; full width it knows only for the GEMM's own store D. Reductions, though, collect both
  lanes at full width. So `PairStore` poses as a reduction to collect its values, and as a tile
  store to write them.
- Its half-width store permutes 8-bit values for SM90 too, but declares them for SM100 only.
- Its maximum passes NaN over, where PyTorch's gives NaN. Its sums take in what lies past the edge.
- Its target select writes float32 only, trusts the index, and leaves rows unwritten.
- It compiles kernels whose epilogue leaves room for one stage of the mainloop; they deadlock.
- It puts K in parts only where the GEMM's own store D exists, though only host code reads D.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Numeric, Uint32, cute
from cutlass.cutlass_dsl import select_
from quack.cute_dsl_utils import get_device_capacity
from quack.epilogue import frontend
from quack.epilogue.ops import ColVecReduce, ColVecSelect, EpiContext, RowVecReduce, TileStore
from quack.gemm_runtime import host
from quack.rounding import RoundingMode

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.group_store import Coord, Given, State
from coda_agent.primitives.groups import spans
from coda_agent.primitives.kinds import Lowering
from coda_agent.primitives.wide import wide_access


class HalfStore(TileStore):
    """A half-width TMA store of 16-bit or e4m3 values, one a pair."""

    def __init__(self, name: str) -> None:
        super().__init__(name, gated=True)

    def to_params(self, gemm: Any, args: object) -> dict[str, object]:
        """Do quack's set-up without its assertion on the element width."""
        unchecked = copy.copy(self)
        unchecked.gated = gemm.arch != 90
        return TileStore.to_params(unchecked, gemm, args)


class _Inside:
    """A row's index as 32 bits, -1 where outside [0, n).

    quack compares its low 32 bits, and does not know where the last tile's columns end. `thread` is
    the one that asks.
    """

    def __init__(self, index: Any, n: Int32, thread: Int32) -> None:
        self.index, self.n, self.thread = index, n, thread

    def __getitem__(self, row: int | Int32) -> Int32:
        found = self.index[row]
        inside = (found >= 0) & (found < self.n)
        return Int32(select_(inside, found, type(found)(-1)))


class RowSelect(ColVecSelect):
    """quack's target select, into any float vector, at any index.

    Every row is written once, so the vector needs no launch that fills it: by the thread that holds
    its target or, where its index is no column, with 0 from the first tile of the row.
    """

    def begin(self, gemm: object, param: object, smem_tensor: object, ctx: EpiContext) -> State:
        index, *state = super().begin(gemm, param, smem_tensor, ctx)
        return (_Inside(index, ctx.varlen_manager.len_n(), ctx.tidx), *state)

    def begin_loop(self, gemm: object, state: State, epi_coord: Coord) -> State:
        # Once a tile, where the staged indices are there, and a barrier is still to come before the
        # next tile's overwrite them.
        if tuple(epi_coord) == (0, 0):
            index, _, _, out, rows, column, *_ = state
            self._fill_outside(gemm, index, out, rows, column)
        return super().begin_loop(gemm, state, epi_coord)

    @cute.jit
    def _fill_outside(self, gemm, index, out, rows, column):
        if column == 0:
            threads = gemm.num_epi_warps * cute.arch.WARP_SIZE
            for row in cutlass.range(  # pyright: ignore[reportPrivateImportUsage]
                index.thread, rows, threads, unroll=1
            ):
                if index[row] < 0:
                    out[row] = Float32(0.0).to(out.element_type)

    def host_validate(self, value: object, **context: object) -> None:
        """Check nothing: `allocate` made the vector."""

    @cute.jit
    def _select_packed16(self, frag_g, gVec, si, row, idx1, offs, n_aliased):
        # One register that every row indexes: quack selects into it, but for -inf, which it takes
        # for "not here".
        found = cute.make_rmem_tensor(cute.make_layout(cute.size(gVec), stride=0), Float32)
        found[0] = Float32(-math.inf)
        ColVecSelect._select_packed16(self, frag_g, found, si, row, idx1, offs, n_aliased)
        if _among(offs, idx1 - 1):
            gVec[row] = found[0].to(gVec.element_type)


def _among(numbers: list[int], x: Int32) -> Boolean:
    """Tell whether an Int32 is one of `numbers`, by bit tests."""
    found = Boolean(False)
    for start in range(0, max(numbers) + 1, 32):
        bits = sum(1 << (i - start) for i in numbers if start <= i < start + 32)
        at = x - start
        near = (at >= 0) & (at < 32)
        found |= near & Boolean((Uint32(bits) >> Uint32(select_(near, at, Int32(0)))) & Uint32(1))
    return found


class Address(Given):
    """An address that the host's part of a kernel reads, and nothing else."""

    def host_arg_key(self, value: object) -> Any:
        return "address"

    def host_fake_arg(self, key: object, fctx: object) -> Any:
        return Int64(0)

    def arg_spec_type(self, const: bool = False) -> Any:
        return Int64


def _spread(even: Any, odd: Int64) -> cute.Tensor:
    """B, (N, K, 1), of the addresses of its even and its odd rows, which are dense.

    `even` has B's shape, and none of its strides.
    """
    rows, columns, batch = even.shape
    # TMA's strides are multiples of 16 bytes.
    width = even.element_type.width // 8
    apart = cute.assume((odd - even.iterator.toint()) // width, divby=16 // width)
    row = cute.assume(Int64(columns), divby=16 // width)
    layout = cute.make_layout(((2, rows // 2), columns, batch), stride=((apart, row), 1, 0))
    return cute.make_tensor(even.iterator, layout)


class MaxReduce(ColVecReduce):
    """quack's maximum over the columns of each row, but that NaN stays NaN."""

    def __init__(self, name: str) -> None:
        super().__init__(name, combine="max")

    def _merge(self, vals: Sequence[Float32], others: Sequence[Float32]) -> tuple[Float32]:
        return (cute.arch.fmax(vals[0], others[0], nan=True),)

    def fn_sink_flush(self, gemm: Any, state: Any, frag: cute.Tensor, scale: Any = None) -> None:
        if self._mask_oob_active():
            state, coords, limit = state
            self._mask_oob(frag, coords, limit, gemm.cta_tile_shape_mnk[:2])
        for i in range(cute.size(state)):
            state[i] = cute.arch.fmax(state[i], frag[i], nan=True)


class MinReduce(MaxReduce):
    """The minimum, as the maximum of the negated values."""

    def fn_sink_flush(self, gemm: Any, state: Any, frag: cute.Tensor, scale: Any = None) -> None:
        frag.store(-frag.load())
        super().fn_sink_flush(gemm, state, frag, scale)

    def _finalize(self, vals: list[Float32]) -> Numeric:
        return -vals[0]


class _Masked:
    """Sets elements past the edge to 0 before they are folded.

    Past the edge the accumulator and TMA-loaded tiles read 0, but vectors read whatever shared
    memory held, so a value that is not 0 there (a bias, σ(0) = ½) would leak into the last block.
    quack 0.6.5 masks maxima only.
    """

    def _mask_oob_active(self) -> bool:
        return True

    @cute.jit
    def _mask_oob(self: Any, frag, coords, limit, tile_shape_mn):
        axis = self._reduce_dim()
        stride = (1, 0) if axis == 0 else (0, 1)
        places = cute.composition(cute.make_layout(tile_shape_mn, stride=stride), coords.layout)
        inside = limit - coords[0][axis]
        for i in cutlass.range(  # pyright: ignore[reportPrivateImportUsage]
            cute.size(frag), unroll_full=True
        ):
            place = cute.crd2idx(i, places)
            frag[i] = frag[i] if place < inside else 0.0


class MaskedRowSum(_Masked, ColVecReduce):
    """quack's sum over the columns of each row, without columns past N."""


class MaskedColSum(_Masked, RowVecReduce):
    """quack's sum over the rows of each column, without rows past M."""


class PairStore(TileStore):
    """A full-width TMA store fed with both lanes of each pair."""

    fn_port = "sink"

    def fn_sink_flush(self, gemm: Any, state: Any, frag: cute.Tensor, scale: Any = None) -> None:
        """Keep the subtile's values in registers, for the trace's next store."""
        gemm.pair_fragments[self.name] = frag


class Mod(frontend.EpiMod):
    """An EpiMod whose kernels write their `PairStore`s, and never hang."""

    def __init__(self, replay: Lowering, *args: Any, **kwargs: Any) -> None:
        self._ours: dict[type, type] = {}
        self.replay = replay
        super().__init__(*args, **kwargs)

    def gemm(
        self, A: torch.Tensor, B: torch.Tensor, D: object, C: object = None, **options: Any
    ) -> host.GemmEpiPlan:
        """Make quack's plan, which knows no parts of K without D."""
        if D is not None or options["split_k"] == 1 or options["swap_ab"]:
            return super().gemm(A, B, D, C, **options)
        # Every operand's operation is pinned here, and `tensor_checks.py` checked the shapes.
        values = options["epi_args"]
        kinds = tuple(
            (o, "c" if o == "c" else frontend._pinned_visit_kind(self.ops[o]))
            for o in self.operand_names
        )
        forms = ((o, op.host_arg_form(values[o])) for o, op in self.ops.items())
        capacity = get_device_capacity(A.device)
        key = (
            kinds, capacity[0], self.mode == "acc_pair", False, (), RoundingMode.RN,
            tuple((o, form) for o, form in forms if form), False,
        )  # fmt: skip
        ours = ("epi_args", "swap_ab", "add_to_output", "_launch")
        return host.build_gemm_epi_plan(
            self._mint(*key), capacity, A, B, None, C,
            epi_values=values, gemm_cls_ref=self._class_ref(key),
            **{o: v for o, v in options.items() if o not in ours},
        )  # fmt: skip

    def _mint(self, *key: object) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        minted = super()._mint(*key)
        if minted not in self._ours:
            self._ours[minted] = _checked(_grouped(minted, self.replay), self.replay)
        return self._ours[minted]


def _grouped(minted: Any, replay: Lowering) -> Any:
    """Give a class the statistics of groups and values of places."""
    if not spans(replay.program.graph) and not replay.program.placed:
        return minted
    from coda_agent.primitives.group_fold import with_values

    return type(minted.__name__, (minted,), with_values(minted, replay))


def _checked(minted: Any, replay: Lowering) -> type:
    """Give a class its check of stages, pair stores, wide accesses.

    The driver pairs the returned fragments with the class's store operations in order: outputs come
    first, then reductions.
    """
    wide = minted.arch == 90 and minted._epi_mod_packed_cd
    base = wide_access(minted) if wide else minted

    def epi_visit_subtile(self: Any, *args: object) -> tuple[object, ...]:
        self.pair_fragments = {}
        stored = base.epi_visit_subtile(self, *args)
        return (*stored, *self.pair_fragments.values())

    def set_up(self: Any, *args: object) -> None:
        base._setup_attributes(self, *args)
        # Between here and the stores' atoms quack asserts that D exists where K is in parts.
        self.parts, self.split_k = self.split_k, 1

    def make_stores(self: Any, *args: object) -> object:
        self.split_k = self.parts
        return base.make_tma_epilogue_atoms_and_tensors(self, *args)

    def compute_stages(self: Any, *args: Any, **kwargs: Any) -> tuple[int, int, int]:
        stages = base._compute_stages(*args, **kwargs)
        if wide:
            stages = _deeper(base, stages, *args)
        # With one stage the loads wait for the products and the products for the loads: quack
        # compiles it, and it hangs (seen on an H200).
        if self.arch == 90 and stages[0] < 2:
            raise NotImplementedError(
                "its loads and stores leave shared memory for one stage of the GEMM, not two"
            )
        return stages

    methods = {"epi_visit_subtile": epi_visit_subtile, "_compute_stages": compute_stages}
    if minted.arch == 90:
        methods |= {
            "_setup_attributes": set_up,
            "make_tma_epilogue_atoms_and_tensors": make_stores,
        }
    if odd := replay.program.spread:

        def rotate(self: Any, *args: Any, **options: Any) -> tuple[Any, ...]:
            a, even, d, c, rest = base.rotate_batch_last(self, *args, **options)
            return a, _spread(even, getattr(args[-1], replay.names[odd])), d, c, rest

        methods["rotate_batch_last"] = rotate
    ours = type(minted.__name__, (base,), methods)
    return ours


def _deeper(
    kernel: Any, stages: tuple[int, int, int], tile: Sequence[int], epi_tile: Sequence[int],
    a: type[Numeric], b: type[Numeric], d: type[Numeric] | None, c: type[Numeric] | None,
    arguments: object, capacity: int, occupancy: int, warps: object,
) -> tuple[int, int, int]:  # fmt: skip
    """Add a stage to the mainloop where stores and loads still fit.

    One stage of stores and two of loads are the least.

    quack takes two of stores and four of loads before it counts the mainloop's. On an H200 the
    sixth stage of a 128 x 128 tile took `gemm_partial_swiglu_bwd` at 4096 from 212 to 204 us.
    """
    mainloop, stores, loads = stages
    own = kernel.epi_smem_bytes(arguments, tile, epi_tile, warps)
    bits = epi_tile[0] * epi_tile[1] // 8
    store = own.d_stage + (bits * d.width if d else 0)
    load = own.c_stage + (bits * c.width if c else 0)
    operands = (tile[0] * a.width + tile[1] * b.width) * tile[2] // 8
    # 2 KiB for barriers and alignment, as quack reserves.
    left = capacity // occupancy - 2048 - own.unstaged - (mainloop + 1) * operands
    fitting = [
        (min(s, 2) + min(n, 4), n, s)
        for s in range(1, stores + 1)
        for n in (range(2, loads + 1) if loads else (0,))
        if s * store + n * load <= left
    ]
    if not fitting:
        return stages
    _, loads, stores = max(fitting)
    return mainloop + 1, stores, loads
