"""A program as two launches: cuBLAS's float32 product, and the graph's kernel.

With few rows the weights stream once and a CTA's tile is mostly padding; there cuBLAS's kernels for
thin products, which no fused form has, may win back what the second launch costs. On an H200, 16
rows of six kernels of Llama-3 8B took 1.03 to 1.11 times as long as cuBLAS's own 16-bit product.
The product stays in float32, so an output is rounded as often as by a fused kernel. It takes a
workspace of 4·M·N bytes from torch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.objects import fingerprint
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import Scalar
from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    from coda_agent.runtime.launch import Arguments

_COMPILED: dict[str, Any] = {}


def forget() -> None:
    """Drop every compiled kernel that this process holds."""
    _COMPILED.clear()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply (M, K) by (N, K)ᵀ in float32; rows are 16-byte multiples."""
    if a.element_size() > 1:
        return torch.mm(a, b.mT, out_dtype=torch.float32)
    n = b.shape[0]
    if pad := -n % 16:  # cuBLAS takes FP8 columns by sixteen
        whole = b.view(torch.uint8)
        b = torch.cat([whole, whole.new_zeros(pad, b.shape[1])]).view(b.dtype)
    one = _one(a.device)
    found = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b.mT, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
    )
    return found[:, :n]


@lru_cache(maxsize=16)
def _one(device: torch.device) -> torch.Tensor:
    """Make the scale of FP8 operands, which any stream may read."""
    one = torch.ones((), dtype=torch.float32, device=device)
    if one.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return one


def resolve(given: Arguments) -> Callable[..., None]:
    """Compile the elementwise kernel for such tensors; what runs both launches."""
    program, a, _, operands, outputs, config, _ = given
    types = [getattr(operands[o], "dtype", "number") for o in program.operands]
    call = prepare(
        program, [torch.float32, *types, *(outputs[o].dtype for o in program.outputs)], config
    )
    if a.element_size() == 1:
        _one(a.device)  # now, since a CUDA graph may capture the launches
    # Scalars in memory are vectors there.
    makes = [
        (i, methodcaller("reshape", 1) if hasattr(operands[o], "data_ptr") else float)
        for i, (o, kind) in enumerate(program.operands.items())
        if kind is Scalar
    ]
    count = len(program.operands)

    def enqueue(inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        a, b, *values = inputs
        for i, make in makes:
            values[i] = make(values[i])
        call((product(a, b), *values[:count], *outputs))

    return enqueue


def prepare(program: Program, types: Sequence[Any], config: TileConfig) -> Callable[..., None]:
    """Compile the kernel of one tuple: the product's tile, operands, outputs.

    Args:
        types: Their torch dtypes in its order; "number" of a scalar that is one, where one in
            memory is (1,).

    Raises:
        CompileError: the configuration is no block of the kernel, or the DSL refuses the program.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    columns = config.tile_n
    if config.tile_m not in range(1, 33) or columns % 256 or columns > 8192:
        raise CompileError(
            f"{program.name} does not compile as {config.label}: a block has 1 to 32 rows and a "
            "multiple of 256 columns, up to 8192"
        )
    arch = str(CuTeDSL._get_dsl().envar.arch)
    shown = ",".join(map(str, types))
    sources = fingerprint("primitives", "runtime")
    key = f"{program.digest} {sources} {config.label} {shown} {arch}"
    if key not in _COMPILED:
        from quack.cache.jit import jit_cache

        def unfused(_: str) -> Any:
            from coda_agent.runtime.elementwise import compile_elementwise

            return compile_elementwise(program, config, types)

        compiled = jit_cache(unfused)(key)
        # Just compiled, the function is a wrapper that parses keywords; from the cache it is bare.
        _COMPILED[key] = getattr(compiled, "_tvm_ffi_function", None) or compiled
    return _COMPILED[key]
