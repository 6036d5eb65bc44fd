"""From a spec's reference to an ATen graph.

- Traced on fake tensors: nothing is computed, and a branch on a value is an error, not a guess.
- Every dim, N/2 and 2N have extents of their own, so a shape says which dims it is over.
- Scalars enter as symbolic floats, so alpha and beta stay operands whatever their draw.
- In-place writes are functionalised away; each node carries the spec's line it comes from.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx.traceback as notes
from torch import fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from coda_agent.agent.authors.composer.problem import STORED, Problem, Slot
from coda_agent.primitives import ColIndex, ColVector, RowVector, Scalar, Tile, WideTile
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.tables import Table
from coda_agent.specs import Spec, canonical_reference
from coda_agent.specs.layout import extent
from coda_agent.specs.recording import alone, quiet
from coda_agent.specs.reference import narrow

# What PyTorch itself has in terms of simpler operations, with no sign of it in a program.
_DECOMPOSED = (
    *("addmm", "baddbmm", "addcmul", "addcdiv", "rsub", "linalg_vector_norm", "norm"),
    *("hardtanh", "hardsigmoid", "hardswish", "mish", "elu", "celu", "selu", "logit"),
    *("hardshrink", "softshrink", "threshold", "_prelu_kernel", "glu", "masked_fill", "frac"),
    *("sinc", "deg2rad", "rad2deg", "special_entr", "heaviside"),
    *("logaddexp", "logaddexp2", "nan_to_num", "isfinite", "isneginf", "isposinf"),
    *("native_batch_norm", "_native_batch_norm_legit_no_training"),
    *("huber_loss", "smooth_l1_loss", "mse_loss", "soft_margin_loss"),
    "binary_cross_entropy_with_logits",
    *("fill", "new_full", "zeros_like", "new_zeros", "ones_like", "new_ones"),
    *("empty_like", "new_empty", "slice_backward", "select_backward"),
    *("native_layer_norm", "native_group_norm"),
    *("leaky_relu", "silu", "isnan", "isinf", "sgn", "floor_divide"),
    *("silu_backward", "mish_backward", "elu_backward", "leaky_relu_backward", "hardtanh_backward"),
    *("hardswish_backward", "hardsigmoid_backward", "softplus_backward", "log_sigmoid_backward"),
    *("gelu_backward", "sigmoid_backward", "tanh_backward"),
)
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def distinct_sizes(spec: Spec, *, named: bool = False) -> dict[str, int]:
    """Choose extents of dims that differ, with half and twice the columns.

    With `named`, each is a multiple of what its sizes in the spec have in common, or the only one:
    a reference may hold a head's width, or a whole size, as a number.
    """
    rows, columns, _ = spec.gemm_dims
    shapes = (*spec.check_shapes, *spec.bench_shapes)
    sizes: dict[str, int] = {}
    taken: set[int] = {1, 2}
    ordered = sorted(spec.dims.items(), key=lambda item: item[1].only is None)
    for name, dim in ordered:
        own = {shape[name] for shape in shapes}
        if (named and len(own) == 1) or dim.only:
            sizes[name] = dim.only or own.pop()
            taken |= {sizes[name], sizes[name] // 2, sizes[name] * 2} if dim.only else set()
            continue
        least = math.gcd(*own) if named else dim.multiple_of
        step = least * (2 if name == columns and least % 2 else 1)
        if name == rows and spec.layout and len(spec.layout.rows) > 1:
            step *= 4  # a leading dim that is not 1 shows what is done to it
        for prime in itertools.chain(_PRIMES, itertools.count(53, 2)):
            extents = {prime * step}
            if name == columns:
                extents |= {prime * step // 2, prime * step * 2}
            if not extents & taken:
                break
        else:
            raise AssertionError("there are infinitely many odd numbers")
        sizes[name] = prime * step
        taken |= extents
    return sizes


def capture(spec: Spec, binding: Mapping[str, str]) -> Problem:
    """Trace the reference of `spec` with its parameters bound to `binding`.

    Raises:
        ProgramError: The reference cannot be traced: it branches on values or raises.
        SpecError: The reference block itself is broken.
    """
    try:
        return _captured(spec, binding, distinct_sizes(spec))
    except ProgramError as error:
        try:
            return _captured(spec, binding, distinct_sizes(spec, named=True))
        except ProgramError:
            raise error from None


def _captured(spec: Spec, binding: Mapping[str, str], sizes: dict[str, int]) -> Problem:
    reference = canonical_reference(spec, binding)
    types = spec.default_types()
    shapes = {name: spec.shape_of(name, sizes, binding) for name in spec.inputs}
    line = spec.reference_line

    def traced(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        inputs = dict(zip(shapes, tensors, strict=True))
        bound = {k: v if shapes[k] else v.item() for k, v in inputs.items()}
        with ExitStack() as modes:
            modes.enter_context(_lines(str(spec.path)))
            modes.enter_context(notes.preserve_node_meta())
            return reference(**bound)

    fake = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True))
    try:
        with quiet(), alone(), fake:
            tensors = [
                torch.empty(shape, dtype=getattr(torch, spec.dtype_of(name, types)))
                for name, shape in shapes.items()
            ]
            pure = torch.func.functionalize(traced, remove="mutations")
            module = make_fx(pure, decompositions(), _allow_non_fake_inputs=True)(*tensors)
    except Exception as error:  # The reference is foreign code: anything may come out of it.
        frame = error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == str(spec.path):
                line = frame.tb_lineno
            frame = frame.tb_next
        where = f"{spec.path}:{line}: `{spec.text.splitlines()[line - 1].strip()}`: "
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "data-dependent" in reason or "DataDependent" in type(error).__name__:
            fault = "control flow, or a Python number, depends on a value of an input"
            hint = "use torch.where, or give the number as an argument with a default"
        else:
            known = spec.layout.sizes(sizes) if spec.layout else sizes
            at = ", ".join(f"{x} = {known[x]}" for x in spec.declared.dims if x in known)
            fault = f"the reference raises at sizes that the spec allows ({at}): {reason}"
            hint = "say as `multiple_of` of a dim what the reference takes, or mend the reference"
            square = spec.declared.inputs.get(b := spec.declared.gemm[1])
            if square and len({*square.shape.cases[""]}) == 1:
                hint = f"{b} is read as [N, K]; where it is [K, N], name its two dims apart"
        raise ProgramError(where + fault, hint=hint) from None
    module.graph.eliminate_dead_code()
    return _problem(spec, binding, sizes, module)


@functools.lru_cache(maxsize=1)
def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """What PyTorch has in terms of simpler operations, by operator."""
    simpler: Any = get_decompositions([getattr(torch.ops.aten, name) for name in _DECOMPOSED])
    # Of a tensor only the shape enters, such as of the sum that `torch.func.grad` differentiates.
    simpler[torch.ops.aten.full_like.default] = lambda like, value, *, dtype=None, **_: torch.full(
        like.shape, value, dtype=dtype or like.dtype
    )
    return simpler


def _problem(
    spec: Spec, binding: Mapping[str, str], sizes: dict[str, int], module: fx.GraphModule
) -> Problem:
    """A traced reference as the rewriter takes it."""
    m, n, k = spec.gemm_dims
    own = spec.layout.sizes(sizes) if spec.layout else {}
    lead = spec.layout.rows if spec.layout else ()
    inner = spec.layout.inner if spec.layout else ()

    def place(node: fx.Node) -> str:
        line = node.meta.get("custom", {}).get("line")
        if line is None:
            return f"{spec.path}:{spec.reference_line}: "
        return f"{spec.path}:{line}: `{spec.text.splitlines()[line - 1].strip()}`: "

    return Problem(
        name=spec.variant(binding),
        module=module,
        extents={"M": sizes[m], "N": sizes[n], "K": sizes[k]},
        gemm=(spec.gemm[0], spec.gemm[1]),
        inputs={x: _input(spec, binding, sizes, x) for x in spec.inputs},
        outputs={x: _output(spec, binding, sizes, x) for x in spec.outputs},
        narrow=functools.partial(narrow, spec),
        place=place,
        source=f"{spec.path}: ",
        dims=(m, n, k),
        sides=(_listed(spec.declared.gemm[0]), _listed(spec.declared.gemm[1])),
        lead=tuple(extent(x, own) for x in lead),
        inner=tuple(extent(x, own) for x in inner) if len(inner) > 1 else (),
        halves=bool(spec.layout and spec.layout.halves),
        fixed=spec.dims[n].only is not None,
        updated=spec.updated(binding),
    )


def _listed(side: str) -> str:
    return side.replace(" ", ", ")


def _input(spec: Spec, binding: Mapping[str, str], sizes: dict[str, int], name: str) -> Slot:
    """An input of a spec as what enters the graph."""
    m, n, _ = spec.gemm_dims
    symbolic, shape = spec.symbolic_shape(name, binding), spec.shape_of(name, sizes, binding)
    dtype, whole = spec.inputs[name].dtype, spec.inputs[name].dtype.startswith("int")
    kinds = (ColIndex,) if whole else (Scalar, ColVector, RowVector, Tile, WideTile)
    named: dict[tuple[int | str, ...], type[Resource]] = {x.named(m, n): x for x in kinds}
    kind = named.get(symbolic)
    if name in spec.gemm or kind is not None:
        return Slot(shape, None if name in spec.gemm else kind)
    if len(symbolic) == 2 and not whole:
        return Slot(shape, Table)
    return Slot(
        shape,
        None,
        reason=f"input {name!r} is {dtype} [{', '.join(map(str, symbolic))}]; an epilogue takes"
        f" floating [], [{m}], [{n}], [{m}, {n}], [{m}, 2*{n}] and integer [{m}]",
    )


def _output(spec: Spec, binding: Mapping[str, str], sizes: dict[str, int], name: str) -> Slot:
    """An output of a spec as what leaves the graph."""
    m, n, _ = spec.gemm_dims
    symbolic = spec.symbolic_shape(name, binding)
    stored = (*STORED, ColVector, RowVector)
    named: dict[tuple[int | str, ...], type[Resource]] = {x.named(m, n): x for x in stored}
    return Slot(
        spec.shape_of(name, sizes, binding),
        named.get(symbolic),
        words=f"[{', '.join(map(str, symbolic))}]",
        dtype=spec.dtype_of(name, spec.default_types()),
        joined=name not in spec.declared.outputs,
    )


def _lines(path: str) -> TorchFunctionMode:
    """A mode that notes lines of `path`, and unfolds guards on scalars."""

    def call(func: Any, args: Any, kwargs: dict[str, Any]) -> object:
        scalars = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.SymFloat)]
        if scalars and func in (torch.addmm, torch.Tensor.addmm):
            # Its meta function asks whether beta is zero, which no symbolic float can answer.
            c, a, b = args
            return kwargs.get("beta", 1) * c + kwargs.get("alpha", 1) * torch.mm(a, b)
        if scalars and func in (torch.tensor, torch.as_tensor):
            return torch.full((), args[0])
        return func(*args, **kwargs)

    class Lines(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
        ) -> object:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != path:
                frame = frame.f_back
            if frame is None:
                return call(func, args, kwargs or {})
            with noted("line", frame.f_lineno):
                return call(func, args, kwargs or {})

    return Lines()


@contextmanager
def noted(key: str, value: object) -> Iterator[None]:
    """Note something at nodes that are recorded meanwhile."""
    meta = notes.get_current_meta()  # torch 2.9 has no `annotate`
    before = meta.get("custom", {})
    meta["custom"] = {**before, key: value}
    try:
        yield
    finally:
        meta["custom"] = before
