"""The cases a program is judged on: inputs, their truth, and what an output may err.

- A spec's own draws at its check shapes, and structures: small integers, whose results have no
  rounding to hide behind; operands in which a misplaced or forgotten element stands alone; extreme
  scales; NaN and Inf; layouts a caller may pass.
- Bounds come from the reference alone, never from the candidate: the error of PyTorch's own path,
  and what disturbing the reference's arithmetic does to each element.
- Every draw follows from one seed.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.compare import (
    BASELINE_LIMIT,
    Errors,
    allowance,
    bound,
    measure,
    store_rounding,
    unit_of,
)
from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.operation import OPS

if TYPE_CHECKING:
    import torch

    from coda_agent.specs import Spec

    Inputs = dict[str, Any]
    Change = Callable[[Inputs, Spec, torch.Generator, float], Inputs]

# Disturbances of the reference's arithmetic, relative to a result: one fp32 operation, one product
# of a GEMM in 16 or in 8 bits (whose tensor cores keep about 14 bits of a sum), and one of a GPU's
# approximations. `allowance` multiplies them by 16.
_OPERATION, _PRODUCT, _PRODUCT_8, _APPROXIMATION = 2.0**-24, 2.0**-25, 2.0**-16, 2.0**-22
# MUFU.TANH, and what may be composed of it, errs by up to 2^-11 of its range, not of its result.
_RANGE = 2.0**-15
# What the error of torch's functions scales with that are no operation of the vocabulary.
_COMPOSED = {"softmax": "range", "silu": "argument", "mish": "argument"} | dict.fromkeys(
    (
        "exp2", "expm1", "log2", "log1p", "logsumexp", "reciprocal", "pow", "__pow__", "__rpow__",
        "true_divide", "__truediv__", "__rtruediv__", "__rdiv__",
    ),
    "result",
)  # fmt: skip
# What folding partials may err of a result that has no other rounding.
_FOLD = 2.0**-20
_POOL = 1 << 16
# With one, in 11 of 3000 draws of log(1 + |z|) with z up to 500 an element near 0, whose neighbours
# are not, was hardly disturbed, and then refused; with four in none.
_PROBES = 4


@dataclass(frozen=True)
class Structure:
    """How a case departs from the spec's own draws.

    Attributes:
        label: What the case shows.
        change: Changed inputs, from (all inputs, spec, generator, factor).
        sizes: Dims.
        factors: Magnitudes to try in this order, until all outputs are in the range of their type.
        everywhere: Whether every tile is checked, or the default one alone.
        exact: Whether outputs without rounding must match bit for bit, vectors to 2⁻²⁰.
        planted: Whether results are NaN or infinite somewhere.
        layout: "" contiguous; "padded" with a stride and an offset; "transposed": padded, and B
            with N as its unit stride.
        alias: Two inputs that are one tensor.
    """

    label: str
    change: Change
    sizes: Mapping[str, int]
    factors: tuple[float, ...] = (1.0,)
    everywhere: bool = False
    exact: bool = False
    planted: bool = False
    layout: str = ""
    alias: tuple[str, str] | None = None


@dataclass(frozen=True)
class Case:
    """One set of inputs with its truth and bounds.

    Attributes:
        inputs: By name.
        truth: Of each output that is checked, float64.
        bounds: Greatest errors.
        torch_errors: Errors of PyTorch's own path.
        allowed: What each element may err; empty where no probes were asked for.
        rounding: What storing each element may err; likewise.
        sizes: Dims.
        structure: None for the spec's own draws.
        exact: Outputs that must match bit for bit.
    """

    inputs: dict[str, Any]
    truth: dict[str, torch.Tensor]
    bounds: dict[str, Errors]
    torch_errors: dict[str, Errors]
    allowed: dict[str, torch.Tensor]
    rounding: dict[str, torch.Tensor]
    sizes: Mapping[str, int]
    structure: Structure | None = None
    exact: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.structure.label if self.structure else ""


def make_case(
    spec: Spec,
    binding: Mapping[str, str],
    sizes: Mapping[str, int],
    element: str,
    device: str,
    *,
    seed: int | None = None,
    probes: int = 0,
    structure: Structure | None = None,
    factor: float = 1.0,
) -> Case:
    """Draw inputs and compute truth and bounds.

    Bounds come from what a user would run: on a GPU the spec's baseline, where it has one that
    takes the shape.

    Args:
        spec: The spec.
        binding: The static parameters.
        sizes: Dims.
        element: Type of the spec's symbolic types.
        device: Where.
        seed: A fresh one by default.
        probes: Disturbed runs of the reference, for the bound of each element.
        structure: What to change in the inputs; outputs that it takes out of the range of their
            type are left out.
        factor: One of its factors.

    Raises:
        SpecError: the baseline computes something else.
    """
    import torch

    from coda_agent.specs import draw_inputs, run_reference

    seed = secrets.randbits(62) if seed is None else seed
    types = dict.fromkeys(spec.types, element)
    inputs = draw_inputs(spec, sizes, types, seed=seed, device=device, binding=binding)
    if structure:
        generator = torch.Generator(device).manual_seed(seed + 1)
        inputs |= structure.change(inputs, spec, generator, factor)
    truth = run_reference(spec, inputs, binding=binding, exact=True)
    try:
        plain = run_reference(spec, inputs, binding=binding, baseline=device == "cuda")
    except SpecError:
        # A baseline need not take every shape that is checked.
        plain = run_reference(spec, inputs, binding=binding)
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    if structure:
        truth = {o: t for o, t in truth.items() if _in_range(t, plain[o], dtypes[o], structure)}
        plain = {o: _settled(plain[o], t) for o, t in truth.items()}
    errors = {o: measure(plain[o], t) for o, t in truth.items()}
    bounds = {
        o: bound(e, spec.dtype_of(o, types), spec.tolerance.multiple) for o, e in errors.items()
    }
    for o, error in errors.items():
        if structure is None and spec.has_baseline and error.norm > BASELINE_LIMIT:
            raise SpecError(
                f"{spec.path}: the baseline's {o} is {error.norm:.2e} of its norm away from "
                "the reference"
            )
    held: dict[str, Any] = {o: inputs[i] for o, i in spec.updated(binding).items()}
    runs = [disturbed(spec, inputs, binding, seed + i) for i in range(probes)]
    allowed = {
        o: allowance(t, dtypes[o], [r[o] for r in runs], held.get(o))
        for o, t in truth.items()
        if probes
    }
    rounding = {o: store_rounding(truth[o], dtypes[o], held.get(o)) for o in allowed}
    exact = []
    for o in _representable(spec, inputs, binding, truth) if structure and structure.exact else ():
        if truth[o].ndim == 1:
            # A mean's partials are divided by the block, which need not be a power of two.
            half = 0.0 if dtypes[o] is torch.float32 else unit_of(dtypes[o])
            allowed[o] = truth[o].abs() * (half + _FOLD)
            continue
        exact.append(o)
        once = _stored(truth[o], dtypes[o])
        addend = truth[o] - held[o].double() if o in held else None
        # In place the addend may be rounded before the sum is: either result will do.
        twice = once if addend is None else _stored(addend, dtypes[o]) + held[o].double()
        truth[o], allowed[o] = once, (_stored(twice, dtypes[o]) - once).abs()
        rounding[o] = allowed[o]
    return Case(inputs, truth, bounds, errors, allowed, rounding, sizes, structure, tuple(exact))


def make_cases(
    spec: Spec, binding: Mapping[str, str], element: str, device: str, seed: int
) -> Iterator[Case]:
    """The spec's own draws at its check shapes, then every structure that it permits."""

    def seeded(i: int) -> int:
        return random.Random(f"{seed} {spec.variant(binding)} {element} {i}").getrandbits(62)

    for i, sizes in enumerate(spec.check_shapes):
        yield make_case(spec, binding, sizes, element, device, seed=seeded(i), probes=_PROBES)
    for i, structure in enumerate(structures(spec, binding, element), len(spec.check_shapes)):
        if structure.planted:
            # The spec's own draw but for what is planted: results kept for a few elements show.
            i = spec.check_shapes.index(structure.sizes)
        case = None
        for factor in structure.factors:
            case = make_case(
                spec, binding, structure.sizes, element, device,
                seed=seeded(i), probes=_PROBES, structure=structure, factor=factor,
            )  # fmt: skip
            if len(case.truth) == len(spec.outputs):
                break
        if case and case.truth:
            yield case


def _in_range(
    truth: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype, structure: Structure
) -> bool:
    """Whether an output is finite where PyTorch's is, and no value near overflow."""
    import torch

    finite = truth.isfinite()
    limit = torch.finfo(dtype).max * (1.0 if dtype.itemsize == 1 else 1.0 - 2.0**-6)
    if not structure.planted and not finite.all():
        return False
    return bool(
        (plain.double().isfinite() == finite).all()
        and (torch.where(finite, truth, 0.0).abs() <= limit).all()
    )


def _settled(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """`out` with the truth where both are NaN or infinite: which of them is a matter of order."""
    import torch

    out = out.double()
    return torch.where(out.isfinite() | truth.isfinite(), out, truth)


def _stored(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value`, which float32 represents, as the kernel stores it; e4m3 saturates."""
    import torch

    top = torch.finfo(dtype).max
    return (value.clamp(-top, top) if dtype.itemsize == 1 else value).float().to(dtype).double()


def _representable(
    spec: Spec, inputs: Inputs, binding: Mapping[str, str], truth: Mapping[str, torch.Tensor]
) -> list[str]:
    """Outputs that fp32 arithmetic gives without rounding: the truth is a float32 everywhere,
    PyTorch in float32 finds exactly it, and no function that a GPU approximates enters."""
    import torch

    from coda_agent.specs import run_reference

    single = run_reference(spec, inputs, binding=binding, exact=True, wide=torch.float32)
    shaken = run_reference(spec, inputs, binding=binding, exact=True, touch=_approximate)
    return [
        o
        for o, t in truth.items()
        if bool(((t.float() == t) & (single[o] == t) & (shaken[o] == t)).all())
    ]


@lru_cache(maxsize=1)
def errors() -> dict[str, str]:
    """`Op.error` by the name of a function of torch."""
    return _COMPOSED | {x: op.error for op in OPS.values() for x in (op.name, *op.aten)}


def _approximate(function: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Disturbs what a GPU approximates, and nothing else."""
    approximated = errors().get(getattr(function, "__name__", ""))
    return result * 1.001 + 0.001 if approximated else result


def disturbed(
    spec: Spec, inputs: Inputs, binding: Mapping[str, str], seed: int, *, finer: float = 1.0,
    sign: float = 1.0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The exact reference with every operation's result off by its error in fp32, at random, or by
    `finer` times as much; what an approximation errs of its range, with this sign.

    The GEMM's part is put on the elements of A, where it reaches the sum as ‖a‖ ‖b‖ / √K each.
    """
    import torch

    from coda_agent.specs import run_reference

    chance = random.Random(seed)
    a = inputs[spec.gemm[0]]
    pool = torch.empty(_POOL, dtype=torch.float64, device=a.device)
    pool.uniform_(-1.0, 1.0, generator=torch.Generator(a.device).manual_seed(seed))
    pool += pool.sign() / 2  # never near 0

    def noise(like: torch.Tensor) -> torch.Tensor:
        count = like.numel()
        long = pool if count <= _POOL else pool.repeat(-(-count // _POOL) + 1)
        start = chance.randrange(min(_POOL, len(long) - count + 1))
        return long[start : start + count].view(like.shape)

    def touch(function: Any, args: tuple[Any, ...], result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        storages = [x.untyped_storage().data_ptr() for x in args[:1] if isinstance(x, torch.Tensor)]
        if result.untyped_storage().data_ptr() in storages:
            return result  # a view
        error = errors().get(getattr(function, "__name__", ""))
        unit = _APPROXIMATION if error == "result" else _OPERATION
        off = result * (finer * unit * noise(result))
        if error in ("range", "argument"):
            # The same for all: an approximation errs alike for like arguments.
            weight = chance.uniform(0.75, 1.25) * chance.choice((-1, 1)) * sign * finer * _RANGE
            off += weight if error == "range" else weight * args[0].abs()
        return result + off

    product = _PRODUCT if a.element_size() > 1 else _PRODUCT_8
    wide = a.double()
    noisy = wide + wide * (finer * product * math.sqrt(a.shape[1]) * noise(wide))
    return run_reference(
        spec, {**inputs, spec.gemm[0]: noisy}, binding=binding, exact=True, touch=touch
    )


def _size(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.values())


def base_shape(spec: Spec) -> Mapping[str, int]:
    """The smallest check shape with more than a row and a few columns, or else the largest."""
    m, n, _ = spec.gemm_dims
    shapes = sorted(spec.check_shapes, key=_size)
    return next((s for s in shapes if s[m] > 1 and s[n] > 16), shapes[-1])


def structures(spec: Spec, binding: Mapping[str, str], element: str) -> list[Structure]:
    """What is checked beside the spec's own draws, for one element type.

    Shapes are the spec's own, but for the number of rows where M stands alone.
    """
    m, n, _ = spec.gemm_dims
    base = base_shape(spec)
    free = len(spec.dims) == 3
    step = spec.dims[m].multiple_of
    ragged = {**base, m: -(-129 // step) * step} if free else base
    shapes = sorted(spec.check_shapes, key=_size, reverse=True)
    even = next((s for s in shapes if s[n].bit_count() == 1 and s[m] > 1), base)
    wide = spec.dtype_of(spec.gemm[0], dict.fromkeys(spec.types, element)) != "float8_e4m3fn"
    fine, large, small = (8.0, 1e4, 1e-4) if wide else (2.0, 32.0, 2.0**-5)
    found = [
        Structure("integers", _integers, ragged, (fine,), everywhere=True, exact=True),
        Structure("coarse integers", _integers, even, (1.0,), everywhere=True, exact=True),
        Structure("NaN in A", _plant, base, (math.nan,), everywhere=True, planted=True),
        Structure("one huge value", _plant, base, (large, 64.0, 16.0)),
        Structure(f"A times {large:g} or less", _scaled, base, (large, large / 32, 4.0)),
        Structure(f"A times {small:g}", _scaled, base, (small,)),
    ]
    if wide:
        found.append(Structure("Inf in A", _plant, base, (math.inf,), True, planted=True))
    if element != next(iter(spec.types.values()), (element,))[0]:
        return found
    # What does not depend on the element type.
    found += [
        Structure("one-hot rows of A", _one_hot, base),
        Structure("B a permutation", _permutation, base),
        Structure("equal rows of A", _equal_rows, base),
        Structure("alternating signs", _alternating, base),
        Structure("rows of zeros", _zero_rows, base),
    ]
    if any(_plain(spec, name) for name in spec.inputs if name not in spec.gemm):
        found.append(Structure("NaN in the operands", _plant_operands, base, planted=True))
    # A transposed operand is compiled for on a GPU, so only once.
    layout = "transposed" if wide and binding == spec.bindings()[0] else "padded"
    found.append(Structure(f"{layout} operands", _as_drawn, base, layout=layout))
    a, b = spec.gemm
    alike = [(base, pair) for pair in _twins(spec, binding)]
    if free and base[n] % step == 0:
        alike.append(({**base, m: base[n]}, (a, b)))
    for sizes, (one, other) in alike:
        change = partial(_copied, one=one, other=other)
        label = f"{one} and {other} are one tensor"
        found.append(Structure(label, change, sizes, alias=(one, other)))
    return found


def _plain(spec: Spec, name: str) -> bool:
    """Whether an input is a tensor of floating numbers."""
    shapes = spec.inputs[name].shape.cases.values()
    return () not in shapes and not spec.inputs[name].dtype.startswith("int")


def _twins(spec: Spec, binding: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Inputs of one shape and type that are only read, two and two."""
    seen: dict[Any, str] = {}
    for name, tensor in spec.inputs.items():
        shape = spec.symbolic_shape(name, binding)
        if not shape or name in spec.updated(binding).values():
            continue
        if (face := (shape, tensor.dtype, tensor.draw.kind == "integers")) in seen:
            yield seen.pop(face), name
        else:
            seen[face] = name


def _as_drawn(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    return {}


def _copied(inputs: Inputs, *_: Any, one: str, other: str) -> Inputs:
    return {other: inputs[one].clone()}


def _integers(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    """Every input on a grid of a power of two: `factor` steps to the largest one below its root
    mean square for A and B, 2 for the rest."""
    import torch

    changed: Inputs = {}
    for name, value in inputs.items():
        wide = torch.as_tensor(value).double()
        if wide.any() and spec.inputs[name].draw.kind != "integers":
            top = 2.0 ** math.floor(math.log2(float(wide.square().mean().sqrt())))
            unit = top / (factor if name in spec.gemm else 2.0)
            grid = (wide / unit).round() * unit
            changed[name] = grid.to(value.dtype) if wide.ndim else float(grid)
    return changed


def _pick(extent: int, generator: torch.Generator, count: int = 1) -> torch.Tensor:
    import torch

    return torch.randperm(extent, generator=generator, device=generator.device)[:count]


def _with(x: torch.Tensor, rows: torch.Tensor, columns: Any, value: float) -> torch.Tensor:
    changed = x.double()  # a copy, since no input is; 8-bit floats have no indexed assignment
    changed[rows, columns] = value
    return changed.to(x.dtype)


def _plant(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a = inputs[name := spec.gemm[0]]
    rows, columns = (_pick(extent, generator) for extent in a.shape)
    return {name: _with(a, rows, columns, factor)}


def _plant_operands(
    inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float
) -> Inputs:
    """A NaN in every floating tensor beside A and B."""
    changed: Inputs = {}
    for name, value in inputs.items():
        if name not in spec.gemm and _plain(spec, name):
            flat = value.reshape(1, -1)
            at = _pick(flat.shape[1], generator)
            changed[name] = _with(flat, at * 0, at, math.nan).reshape(value.shape)
    return changed


def _one_hot(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    return {name: _selecting(inputs[name], generator) for name in spec.gemm[:1]}


def _permutation(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    return {name: _selecting(inputs[name], generator) for name in spec.gemm[1:]}


def _selecting(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rows with a single 1, each column's turn before any comes twice."""
    import torch

    rows, k = x.shape
    columns = torch.cat([_pick(k, generator, k) for _ in range(-(-rows // k))])[:rows]
    return _with(torch.zeros_like(x), torch.arange(rows, device=x.device), columns, 1.0)


def _equal_rows(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a = inputs[name := spec.gemm[0]]
    return {name: a[:1].expand(a.shape).contiguous()}


def _alternating(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a, b = (inputs[name].float().abs() for name in spec.gemm)
    a[:, 1::2] *= -1
    return {name: x.to(inputs[name].dtype) for name, x in zip(spec.gemm, (a, b), strict=True)}


def _zero_rows(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a = inputs[name := spec.gemm[0]]
    return {name: _with(a, _pick(a.shape[0], generator, a.shape[0] // 2), slice(None), 0.0)}


def _scaled(inputs: Inputs, spec: Spec, generator: torch.Generator, factor: float) -> Inputs:
    a = inputs[name := spec.gemm[0]]
    return {name: (a.float() * factor).to(a.dtype)}
