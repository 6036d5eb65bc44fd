"""ATen's operations in our vocabulary, by name."""

from collections.abc import Callable
from functools import partial

from coda_agent.agent.authors.composer.expression import Expr, apply, lift
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.operation import OPS

# What only moves elements.
VIEWS = frozenset(
    """
    alias cat clone constant_pad_nd copy detach diagonal expand flip getitem index lift_fresh
    lift_fresh_copy permute repeat _reshape_alias roll select select_scatter slice slice_scatter
    split split_with_sizes squeeze stack t transpose unbind unfold _unsafe_view unsqueeze view
    """.split()  # noqa: SIM905
)
ACROSS = frozenset(
    """
    argmax argmin cumprod cumsum _log_softmax native_layer_norm _softmax sort std topk var
    var_mean
    """.split()  # noqa: SIM905
)
WHOLE_ROW = "needs a whole row before its result is known, but a kernel sees one tile of it"


def _clamp(x: Expr, low: Expr | float | None = None, high: Expr | float | None = None) -> Expr:
    x = x if low is None else apply("maximum", x, low)
    return x if high is None else apply("minimum", x, high)


def _gelu(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu_erf"


def _unclamped(y: Expr) -> Expr:
    return y.args[0] if y.op == "maximum" and y.args[1].is_number(0.0) else y


def _leaky(x: Expr, slope: Expr | float = 0.01) -> Expr:
    slope = lift(slope)
    if slope.op != "const" or not 0 <= slope.value <= 1:
        raise ProgramError("the slope must be a constant between 0 and 1")
    return apply("maximum", x, x * slope)


def _softplus(x: Expr, beta: Expr | None = None, threshold: Expr | None = None) -> Expr:
    if (beta and not beta.is_number(1.0)) or (threshold and not threshold.is_number(20.0)):
        raise ProgramError("only beta = 1 and threshold = 20 are available")
    return apply("softplus", x)


def _where(condition: Expr, x: Expr, y: Expr) -> Expr:
    if condition.op in ("gt", "ge", "lt", "le"):
        p, q = condition.args
        if condition.op in ("lt", "le"):
            x, y = y, x
        if (p, q) == (x, y):
            return apply("maximum", x, y)
        if (p, q) == (y, x):
            return apply("minimum", x, y)
        if p == x and q.is_number(0.0) and y.op == "mul" and p in y.args:
            return _leaky(p, y.args[1] if y.args[0] == p else y.args[0])
    raise ProgramError("only a maximum, a minimum or a leaky ReLU can be chosen this way")


def meaning(name: str) -> Callable[..., Expr] | None:
    """What an elementwise operation of ATen, or of Python, is; None where no program has it."""
    known = next((op.name for op in OPS.values() if name in op.aten), "")
    return _ELEMENTWISE.get(name) or (partial(apply, known) if known else None)


# Where it is not one of the vocabulary, or more than its name says.
_ELEMENTWISE: dict[str, Callable[..., Expr]] = {
    **{name: partial(apply, name) for name in ("gt", "ge", "lt", "le")},
    "add": lambda x, y, alpha=1.0: x + y * alpha,
    "sub": lambda x, y, alpha=1.0: x - y * alpha,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "truediv": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / apply("sqrt", x),
    "lerp": lambda x, y, w: x + w * (y - x),
    "clamp": lambda x, min=None, max=None: _clamp(x, min, max),
    "relu": lambda x: apply("maximum", x, 0.0),
    "leaky_relu": _leaky,
    "gelu": lambda x, approximate="none": apply(_gelu(approximate), x),
    "silu": lambda x: x * apply("sigmoid", x),
    "softplus": _softplus,
    "log_sigmoid_forward": lambda x: -apply("softplus", -x),
    "log1p": lambda x: apply("log", x + 1.0),
    "gelu_backward": lambda d, x, approximate="none": d * apply(f"d_{_gelu(approximate)}", x),
    "sigmoid_backward": lambda d, y: d * (y * (1.0 - y)),
    "threshold_backward": lambda d, y, _: d * apply("d_relu", _unclamped(y)),
    "tanh_backward": lambda d, y: d * (1.0 - y * y),
    "where": _where,
}
