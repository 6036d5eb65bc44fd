"""Runs of a spec's PyTorch reference: in its own types, and exactly."""

from __future__ import annotations

import ast
import functools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.rounding import rounded
from coda_agent.specs.format import Spec, evaluate
from coda_agent.specs.names import functions_in

if TYPE_CHECKING:
    Values = Mapping[str, torch.Tensor | float]

Touch = Callable[[Callable[..., Any], tuple[Any, ...], Any], object]


def storage(tensor: torch.Tensor) -> int:
    """Find the address of a tensor's memory, which views share.

    Within `torch.func` a tensor wraps the one that has the memory.
    """
    from torch.func import debug_unwrap

    return debug_unwrap(tensor).untyped_storage().data_ptr()


def draw_inputs(
    spec: Spec,
    sizes: Mapping[str, int],
    types: Mapping[str, str],
    *,
    seed: int,
    device: str | torch.device = "cpu",
    binding: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor | float]:
    """Draw every input as the spec says: in float32, then cast.

    Returns:
        Tensors of the canonical shapes and dtypes, contiguous or the transposes of contiguous ones,
        as a user has them; scalars (shape []) as floats.

    Raises:
        SpecError: Sizes, types or binding that the spec does not allow.
    """
    generator = torch.Generator(device).manual_seed(seed)
    known = spec.layout.sizes(sizes) | dict(sizes) if spec.layout else sizes
    inputs: dict[str, torch.Tensor | float] = {}
    turned = [x for side, x in zip("AB", spec.gemm, strict=True) if side in spec.turned]
    for name, tensor in spec.inputs.items():
        shape = spec.shape_of(name, sizes, binding)
        values = torch.empty(shape, dtype=torch.float32, device=device)
        args = [evaluate(arg, known) for arg in tensor.draw.args]
        match tensor.draw.kind:
            case "normal":
                values.normal_(0.0, args[0], generator=generator)
            case "uniform":
                values.uniform_(args[0], args[1], generator=generator)
            case "integers":
                # Through int64: float32 would round indices beyond 2**24.
                lo, hi = map(math.floor, args)
                values = values.long().random_(lo, hi, generator=generator)
            case "constant":
                values.fill_(args[0])
        cast = values.to(getattr(torch, spec.dtype_of(name, types)))
        if name in turned and not shape[0] * cast.element_size() % 16:  # else TMA takes none such
            cast = cast.mT.contiguous().mT
        inputs[name] = cast if cast.ndim else float(cast)
    return inputs


def reference_callable(
    spec: Spec, binding: Mapping[str, str] | None = None, *, baseline: bool = False
) -> Callable[..., dict[str, torch.Tensor]]:
    """Bind the reference's parameters: `call(**inputs)`, fit for `torch.compile`.

    It takes and gives what the spec declares; `as_declared` makes that of canonical inputs. A
    tensor, or a tuple of them, that it returns is given the names of the spec's outputs.

    With `baseline`, the block's function of that name, where it defines one: what a user would run.

    Raises:
        SpecError: The reference block raises on definition, or the binding is unknown.
    """
    bound = spec.bind(binding)
    with _blaming(spec):
        defined = _define(*_code(spec))
        name = "baseline" if baseline and "baseline" in defined else "reference"
        function = defined[name]
    if not _names_outputs(spec.reference_source, name):
        function = functools.partial(_named, function, tuple(spec.declared.outputs))
    return functools.partial(function, **bound) if bound else function


def as_declared(
    spec: Spec, inputs: Values, binding: Mapping[str, str] | None = None, **options: Any
) -> dict[str, torch.Tensor | float]:
    """Make what the reference takes; `options` are those of `Layout.declared`."""
    if spec.layout is None:
        return dict(inputs)
    return spec.layout.declared(inputs, spec.bind(binding), **options)


def canonical_reference(
    spec: Spec, binding: Mapping[str, str]
) -> Callable[..., dict[str, torch.Tensor]]:
    """Make the reference a function of canonical inputs and outputs."""
    function = reference_callable(spec, binding)
    if (layout := spec.layout) is None:
        return function

    def call(**inputs: torch.Tensor | float) -> dict[str, torch.Tensor]:
        outputs = function(**as_declared(spec, inputs, binding))
        return layout.canonical(outputs, inputs, spec.bind(binding))

    return call


def _named(function: Callable[..., Any], names: tuple[str, ...], /, **inputs: object) -> Any:
    """Name what `function` returns, where it is as many tensors as `names`."""
    returned = function(**inputs)
    if returned is None or isinstance(returned, dict):
        return returned
    values = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else returned


@functools.lru_cache(maxsize=64)
def _names_outputs(source: str, name: str) -> bool:
    """Tell whether a function of the block returns a dict written there."""
    known, seen = functions_in(source), set[str]()
    while name in known and name not in seen:
        seen.add(name)
        match known[name].body[-1]:
            case ast.Return(value=ast.Dict()):
                return True
            case ast.Return(value=ast.Call(func=ast.Name(id=called))):
                name = called
            case _:
                return False
    return False


def _code(spec: Spec) -> tuple[str, str]:
    """Give the block and its file's name.

    Blank lines put it on its own lines of the Markdown file, for tracebacks.
    """
    return "\n" * (spec.reference_line - 1) + spec.reference_source, str(spec.path)


@functools.lru_cache(maxsize=64)
def _define(source: str, filename: str) -> dict[str, Any]:
    # No `__name__`: torch.compile would import that module to find the block's globals.
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def kept(spec: Spec) -> dict[str, str]:
    """Describe what the reference's block holds between calls, by name."""
    found = dict[str, str]()
    for name, value in _define(*_code(spec)).items():
        if isinstance(value, FunctionType):
            found[name] = repr((vars(value), value.__defaults__, value.__kwdefaults__))
        elif name != "__builtins__":
            found[name] = repr(value)
    return found


@contextmanager
def _blaming(spec: Spec) -> Iterator[None]:
    """Turn what spec code raises into a SpecError with its line."""
    try:
        yield
    except Exception as error:  # The reference is foreign code: anything may come out of it.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(spec.path)]
        reason = (str(error).splitlines() or ["no message"])[0]
        if not isinstance(error, SpecError):
            reason = f"reference raised {type(error).__name__}: {reason}"
        line = lines[-1] if lines else spec.reference_line
        raise SpecError(f"{spec.path}:{line}: {reason}") from error


def run_reference(
    spec: Spec,
    inputs: Values,
    *,
    binding: Mapping[str, str] | None = None,
    exact: bool = False,
    baseline: bool = False,
    wide: torch.dtype | None = None,
    touch: Touch | None = None,
) -> dict[str, torch.Tensor]:
    """Run the reference; in an `exact` run all is float64.

    What is cast to a `narrow` type and computed on is rounded to it in every run: there rounding is
    what the reference means.

    Args:
        exact: Whether nothing else is rounded to the spec's element types.
        baseline: Run what a user would run instead, where the spec has such a function.
        wide: Another type than float64 for an exact run.
        touch: In an exact run, called with every torch function, its arguments and its result;
            what it returns takes the result's place.

    Returns:
        Declared outputs in declared order; floating ones are float64 when `exact`.

    Raises:
        SpecError: The reference raises, returns other than its outputs, or left float64.
    """
    function = reference_callable(spec, binding, baseline=baseline)
    wide = wide or torch.float64
    with _blaming(spec):
        if exact:
            widened = dict(inputs)
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    widened[name] = value.to(wide)
            given = as_declared(spec, widened, binding, number=wide)
            with _widened(wide, functools.partial(narrow, spec), touch):
                outputs = function(**given)
        else:
            outputs = function(**as_declared(spec, inputs, binding))
    _check_outputs(spec, outputs, wide if exact else None)
    if layout := spec.layout:
        with _blaming(spec):
            return layout.canonical(outputs, inputs, spec.bind(binding))
    return {name: outputs[name] for name in spec.declared.outputs}


def _check_outputs(spec: Spec, outputs: Any, wide: torch.dtype | None) -> None:
    """Refuse other outputs than the declared, or floats not `wide`."""
    tensors = isinstance(outputs, dict) and {
        name for name, value in outputs.items() if isinstance(value, torch.Tensor)
    }
    names = list(spec.declared.outputs)
    if tensors != {*names} or len(outputs) != len(names):
        raise SpecError(
            f"{spec.path}: the reference returns {_described(outputs)}; expected the tensors"
            f" {', '.join(names)}, as a dict by name or in this order"
        )
    for name, value in outputs.items():
        if wide and value.is_floating_point() and value.dtype != wide:
            raise SpecError(
                f"{spec.path}: output {name!r} is {value.dtype} in the exact run;"
                " expected casts by .to(), .float() and the like only"
            )


def _described(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    if isinstance(value, dict):
        return f"a dict with {', '.join(f'{k}, a {type(v).__name__}' for k, v in value.items())}"
    return "None" if value is None else f"a {type(value).__name__}"


def narrow(spec: Spec, dtype: torch.dtype) -> bool:
    """Tell whether a cast to `dtype` that is computed on means rounding.

    It does to 8 bits, or to 16 in a type that the spec does not declare. To its own 16-bit types
    PyTorch's plain path rounds between any two operations, which is noise.
    """
    tensors = [t for s in (spec, spec.declared) for t in (*s.inputs.values(), *s.outputs.values())]
    declared = {name for t in tensors for name in spec.types.get(t.dtype, (t.dtype,))}
    known = str(dtype).removeprefix("torch.") in declared
    return dtype.is_floating_point and (dtype.itemsize == 1 or (dtype.itemsize == 2 and not known))


def cast_to(
    function: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> torch.dtype | None:
    """Find the type that a call casts its argument to."""
    tensor = torch.Tensor
    named = {tensor.float: torch.float32, tensor.half: torch.float16}
    named |= {tensor.bfloat16: torch.bfloat16, tensor.double: torch.float64}
    if function not in (tensor.to, tensor.type):
        return named.get(function)
    given = (v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.dtype))
    return next(given, None)


@contextmanager
def _widened(
    wide: torch.dtype, narrow: Callable[[torch.dtype], bool], touch: Touch | None
) -> Iterator[None]:
    """Make every floating cast, and every new floating tensor, `wide`.

    What was cast to a narrow type is rounded to it once it is cast on. Until then it is exact: the
    kernel that stores it rounds it, by itself.
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves

    tensor = torch.Tensor
    casts = (tensor.float, tensor.half, tensor.bfloat16, tensor.double)
    # By address, with the type; the tensors are kept, so that no address is used again.
    pending: dict[int, tuple[torch.dtype, torch.Tensor]] = {}

    def pend(result: object, dtype: torch.dtype) -> object:
        for leaf in tree_leaves(result):
            if isinstance(leaf, tensor) and leaf.is_floating_point():
                pending[storage(leaf)] = dtype, leaf
        return result

    class Widened(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> object:
            def widen(value: object) -> object:
                floating = isinstance(value, torch.dtype) and value.is_floating_point
                return wide if floating else value

            keywords = kwargs or {}
            extra = [*args[1:], *keywords.values()]
            dtypes = any(isinstance(value, torch.dtype) for value in extra)
            if (func is tensor.view and dtypes) or (func is tensor.type and extra and not dtypes):
                raise TypeError("Tensor.view(dtype) and Tensor.type(name): use .to(dtype) instead")
            target = cast_to(func, args, keywords)
            moved = [x for x in tree_leaves((args, keywords)) if isinstance(x, tensor)]
            held = next((pending[at][0] for x in moved if (at := storage(x)) in pending), None)
            if held and target and target is not held:
                value = rounded(args[0], held)
                result = touch(rounded, (args[0], held), value) if touch else value
                return pend(result, target) if narrow(target) else result
            if target and narrow(target) and args[0].is_floating_point():
                return pend(args[0].to(wide).clone(), target)
            if func in casts:
                result = args[0].to(wide, **keywords)
            elif held and not target:
                return pend(func(*args, **keywords), held)
            else:
                args, keywords = tuple(map(widen, args)), {k: widen(v) for k, v in keywords.items()}
                result = _by_default(func, args, keywords, wide)
            return touch(func, (*args, *keywords.values()), result) if touch else result

    with Widened():
        yield


def _by_default(
    func: Any, args: Iterable[object], kwargs: Mapping[str, object], wide: torch.dtype
) -> object:
    """Call as if `wide` were the default floating type.

    Torch has one for all threads: that of new tensors, and of what integers and numbers make
    together.
    """
    from torch.utils._pytree import tree_leaves

    result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return result
    if result.dtype == wide or "dtype" in kwargs:
        return result
    if not any(isinstance(x, torch.Tensor) for x in tree_leaves((args, kwargs))):
        return func(*args, **kwargs, dtype=wide)

    def exact(value: object) -> object:
        if isinstance(value, float):
            return torch.tensor(value, dtype=wide)
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return value if value.dtype == torch.bool else value.to(wide)
        return value

    return func(*map(exact, args), **kwargs).to(wide)
