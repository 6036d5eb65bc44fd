"""Calls of kernels in code that Inductor writes in Python.

There PyTorch's dispatcher, and the check by which a call finds its launch, cost the host of an H200
some 40 % of what a kernel's call takes in a training step (Qwen3-MoE, by Python's profiler, at
c66450e9). The code has made the tensors itself, of sizes that it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coda_agent.runtime.program_operator import CallSite, kernel_operator

if TYPE_CHECKING:
    from torch._inductor.ir import FallbackKernel, IRNode


def call_past_dispatcher() -> None:
    """Let Inductor's Python call kernels by `CallSite`."""
    try:
        from torch._inductor.codegen import custom_extern_kernel_codegen as known
    except ImportError:  # before torch 2.11: calls stay the operator's
        return
    name = f"torch.ops.{kernel_operator().default}"
    known.CUSTOM_EXTERN_KERNEL_CODEGEN[name] = known.CustomCodegen(python=_write)


def _write(node: FallbackKernel, writeline: Callable[[Any], None]) -> None:
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    if V.graph.fx_wrapper:  # it writes a graph, not Python
        writeline(ExternKernelAllocLine(V.graph.wrapper_code, node))
        return
    tensors = node.codegen_args()
    made = f"{CallSite.__name__}({node.kwargs['program']!r}, {all(map(_fixed, node.inputs))})"
    site = f"kernel_of_{node.get_name()}"
    once = V.graph.wrapper_code.add_import_once
    once(f"from {CallSite.__module__} import {CallSite.__name__}")
    once(f"{site} = {made}")
    writeline(f"{node.get_name()} = {site}({', '.join(tensors)})")


def _fixed(x: IRNode) -> bool:
    """Whether a tensor has the same sizes and strides at each call."""
    import sympy

    return all(isinstance(n, int | sympy.Integer) for n in (*x.get_size(), *x.get_stride()))
