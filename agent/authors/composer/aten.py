"""ATen's operations in our vocabulary, by name."""

import math
from collections.abc import Callable
from functools import partial

from coda_agent.agent.authors.composer.expression import Expr, apply, const, lift
from coda_agent.primitives.operation import OPS

# What only moves elements.
VIEWS = frozenset(
    """
    alias cat clone constant_pad_nd copy detach diagonal expand flip getitem index lift_fresh
    lift_fresh_copy permute repeat _reshape_alias roll select select_scatter slice slice_scatter
    split split_with_sizes squeeze stack t transpose unbind unfold _unsafe_view unsqueeze view
    """.split()  # noqa: SIM905
)
ACROSS = ("argmax", "argmin", "cumprod", "cumsum", "_log_softmax", "_softmax", "sort", "topk")
WHOLE_ROW = "needs a whole row before its result is known, but a kernel sees one tile of it"
ROW_STATISTICS = (
    "return the tensor and what it takes of each row (amax, sum, mean, logsumexp; of a variance the"
    " means of x and x * x), and apply that in the next kernel"
)
SPELLED = "write it with elementary operations; `level: extend` asks an author for one of its own"


def _clamp(x: Expr, low: Expr | float | None = None, high: Expr | float | None = None) -> Expr:
    x = x if low is None else apply("maximum", x, low)
    return x if high is None else apply("minimum", x, high)


def _gelu(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu_erf"


def _unclamped(y: Expr) -> Expr:
    return y.args[0] if y.op == "maximum" and y.args[1].is_number(0.0) else y


def _leaky(x: Expr, slope: Expr | float = 0.01) -> Expr:
    slope = lift(slope)
    if slope.op == "const" and 0 <= slope.value <= 1:
        return apply("maximum", x, x * slope)
    return apply("where", apply("greater", x, 0.0), x, x * slope)


def _softplus(x: Expr, beta: Expr | float = 1.0, threshold: Expr | float = 20.0) -> Expr:
    x, beta, threshold = x * beta, lift(beta), lift(threshold)
    found = apply("softplus", x)
    if not threshold.is_number(20.0):
        found = apply("where", apply("greater", x, threshold), x, found)
    return found / beta


def _where(condition: Expr, x: Expr, y: Expr) -> Expr:
    if condition.op in ("greater", "greater_equal"):
        p, q = condition.args
        if (p, q) == (x, y):
            return apply("maximum", x, y)
        if (p, q) == (y, x):
            return apply("minimum", x, y)
        # What PyTorch's graphs have of a softplus, which is its argument above 20.
        if q.is_number(20.0) and (y.op, y.args, p) == ("softplus", (x,), x):
            return y
        # p > 0 ? p : p · slope, from either side
        for zero, above, below in ((q, x, y), (p, y, x)):
            if zero.is_number(0.0) and above in (p, q) and below.op == "mul":
                if below.args[0] == above and below.args[1].op == "const":
                    return _leaky(above, below.args[1])
    if condition.op == "const":
        return x if condition.value else y
    if condition.op == "add" and _is_condition(condition):  # not c
        return _where(condition.args[0].args[0], y, x)
    if x == y:
        return x
    return apply("where", condition, x, y)


def truth(x: Expr | float) -> Expr:
    """1 where a value is not 0, else 0."""
    x = lift(x)
    if x.op == "const":
        return const(float(x.value != 0))
    return x if _is_condition(x) else _not(apply("equal", x, 0.0))


def _is_condition(x: Expr) -> bool:
    if x.op in ("mul", "maximum"):
        return all(map(_is_condition, x.args))
    if x.op == "add":
        first, one, *_ = x.args
        return one.is_number(1.0) and first.op == "neg" and _is_condition(first.args[0])
    return x.op in ("greater", "greater_equal", "equal")


def _not(x: Expr | float) -> Expr:
    return 1.0 - truth(x)


def _larger(x: Expr, y: Expr, back: bool = False) -> Expr:
    """torch.fmax: the other of a NaN."""
    first = apply("greater_equal", *((y, x) if back else (x, y)))
    return apply("where", first, x, apply("where", apply("equal", y, y), y, x))


def _remainder(x: Expr, y: Expr | float) -> Expr:
    left = apply("fmod", x, y)
    return apply("where", apply("greater", 0.0, left * y), left + y, left)


def _divided(x: Expr, y: Expr | float, rounding_mode: str | None = None) -> Expr:
    if rounding_mode is None:
        return x / y
    # What fmod leaves is a multiple, so that the rounded quotient is right.
    left = apply("fmod", x, y)
    quotient = apply("round_even", (x - left) / y)
    return quotient if rounding_mode == "trunc" else quotient - apply("greater", 0.0, left * y)


def _rounded(x: Expr, decimals: Expr | float = 0.0) -> Expr:
    unit = 10.0 ** lift(decimals).value
    return apply("round_even", x * unit) / unit


def _hypotenuse(x: Expr, y: Expr) -> Expr:
    """√(x² + y²) without overflow; infinite where a side is."""
    sides = [apply("absolute", side) for side in (x, y)]
    longer = apply("maximum", *sides)
    small = apply("greater", 2.0**60, longer)
    plain = apply("where", apply("greater", longer, 2.0**-50), small, 0.0)
    unit = apply("where", apply("greater", longer, 0.0), longer, 1.0)
    unit = apply("where", apply("greater", plain, 0.0), 1.0, unit)
    a, b = (side / unit for side in sides)
    found = unit * apply("sqrt", a * a + b * b)
    for side in sides:  # beside a NaN, too (IEEE 754-2019, 9.2.1)
        found = apply("where", apply("equal", side, _INFINITE), _INFINITE, found)
    return found


def _times_log(x: Expr, y: Expr, log: str = "log") -> Expr:
    """x · log(y), and 0 where x is, but for a NaN."""
    nothing = apply("where", apply("equal", y, y), 0.0, y)
    return apply("where", apply("equal", x, 0.0), nothing, x * apply(log, y))


def _sign(x: Expr) -> Expr:
    return apply("greater", x, 0.0) - apply("greater", 0.0, x)


def _turned(op: str, x: Expr) -> Expr:
    return apply(op, apply("wrapped", x))


def meaning(name: str) -> Callable[..., Expr] | None:
    """Find an elementwise operation of ATen or Python, or None."""
    known = next((op.name for op in OPS.values() if name in op.aten), "")
    return _ELEMENTWISE.get(name) or (partial(apply, known) if known else None)


_INFINITE = const(math.inf)
# Where it is not one of the vocabulary, or more than its name says.
_ELEMENTWISE: dict[str, Callable[..., Expr]] = {
    "gt": partial(apply, "greater"),
    "ge": partial(apply, "greater_equal"),
    "lt": lambda x, y: apply("greater", y, x),
    "le": lambda x, y: apply("greater_equal", y, x),
    "eq": partial(apply, "equal"),
    "ne": lambda x, y: 1.0 - apply("equal", x, y),
    "signbit": lambda x: apply("greater", 0.0, apply("copysign", 1.0, x)),
    "sign": _sign,
    "angle": lambda x: apply("where", apply("greater", 0.0, x), math.pi, x * 0.0),
    "logical_not": _not,
    "logical_and": lambda x, y: truth(x) * truth(y),
    "logical_or": lambda x, y: apply("maximum", truth(x), truth(y)),
    "logical_xor": lambda x, y: 1.0 - apply("equal", truth(x), truth(y)),
    "ceil": lambda x: -apply("floor", -x),
    "round": _rounded,
    "remainder": _remainder,
    "ldexp": lambda x, y: x * apply("exp2", y),
    "xlogy": _times_log,
    "special_xlog1py": partial(_times_log, log="log1p"),
    "floordiv": lambda x, y: _divided(x, y, "floor"),
    "fmax": _larger,
    "fmin": partial(_larger, back=True),
    "sin": partial(_turned, "sin"),
    "cos": partial(_turned, "cos"),
    "log10": lambda x: apply("log2", x) * math.log10(2.0),
    "hypot": _hypotenuse,
    "positive": lambda x: x,
    "add": lambda x, y, alpha=1.0: x + y * alpha,
    "sub": lambda x, y, alpha=1.0: x - y * alpha,
    "mul": lambda x, y: x * y,
    "div": _divided,
    "truediv": lambda x, y: x / y,
    "pow": lambda x, y: lift(x) ** lift(y),
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / apply("sqrt", x),
    "lerp": lambda x, y, w: x + w * (y - x),
    "clamp": lambda x, min=None, max=None: _clamp(x, min, max),
    "relu": lambda x: apply("maximum", x, 0.0),
    "rrelu_with_noise": lambda x, _, low=0.125, high=1 / 3, *rest: _leaky(x, (low + high) * 0.5),
    "gelu": lambda x, approximate="none": apply(_gelu(approximate), x),
    "softplus": _softplus,
    "log_sigmoid_forward": lambda x: -apply("softplus", -x),
    "log1p": lambda x: apply("softplus", x.args[0]) if x.op == "exp" else apply("log1p", x),
    "threshold_backward": lambda d, y, _: d * apply("d_relu", _unclamped(y)),
    "where": _where,
}
