"""ATen's operations in our vocabulary, by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from coda_agent.agent.authors.composer.builder import Builder
from coda_agent.agent.authors.composer.expression import Expr
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.operation import OPS

VIEWS = frozenset(
    """
    alias cat chunk clone constant_pad_nd copy detach diagonal expand expand_as flatten flip
    getitem index lift_fresh lift_fresh_copy narrow numpy_T permute repeat reshape
    _reshape_alias roll select select_scatter slice slice_scatter split split_with_sizes
    squeeze stack swapaxes t transpose unbind unflatten unfold _unsafe_view unsqueeze view
    view_as
    """.split()  # noqa: SIM905
)
FACTORIES = {
    "fill": None,
    "full": None,
    "full_like": None,
    "new_full": None,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
    "empty_like": math.nan,
    "new_empty": math.nan,
}
GEMMS = ("mm", "bmm", "addmm")
# What autograd makes of a view: its gradient among zeros.
SCATTERS = {"slice_backward": "slice_scatter", "select_backward": "select_scatter"}
# By what is left: each row's value, or each column's.
REDUCTIONS = {
    "M": {
        "sum": "row_sum",
        "mean": "row_mean",
        "amax": "row_max",
        "max": "row_max",
        "logsumexp": "row_logsumexp",
    },
    "N": {"sum": "col_sum", "amax": "col_max", "max": "col_max"},
}

ACROSS = frozenset(
    """
    argmax argmin cumprod cumsum _log_softmax native_layer_norm _softmax sort std topk var
    var_mean
    """.split()  # noqa: SIM905
)
WHOLE_ROW = "needs a whole row before its result is known, but a kernel sees one tile of it"

_Meaning = Callable[..., Expr]


def elementwise(b: Builder) -> dict[str, _Meaning]:
    """Meaning of ATen's (and Python's) elementwise operations, by name."""
    c, f = b.const, b.apply
    one = c(1.0)

    def gelu_of(approximate: str) -> str:
        return "gelu_tanh" if approximate == "tanh" else "gelu_erf"

    def unclamped(y: Expr) -> Expr:
        return y.args[0] if y.op == "maximum" and y.args[1] is c(0.0) else y

    def leaky(x: Expr, slope: Expr | None = None) -> Expr:
        slope = slope or c(0.01)
        if slope.op != "const" or not 0 <= slope.value <= 1:
            raise ProgramError("the slope must be a constant between 0 and 1")
        return f("maximum", x, b.mul(x, slope))

    def softplus(x: Expr, beta: Expr = one, threshold: Expr | None = None) -> Expr:
        if beta is not one or (threshold and threshold.value != 20.0):
            raise ProgramError("only beta = 1 and threshold = 20 are available")
        return f("softplus", x)

    def where(condition: Expr, x: Expr, y: Expr) -> Expr:
        if condition.op in ("gt", "ge", "lt", "le"):
            p, q = condition.args
            if condition.op in ("lt", "le"):
                p, q, x, y = p, q, y, x
            if (p, q) == (x, y):
                return f("maximum", x, y)
            if (p, q) == (y, x):
                return f("minimum", x, y)
            if p is x and q is c(0.0) and y.op == "mul" and p in y.args:
                return leaky(p, y.args[1] if y.args[0] is p else y.args[0])
        raise ProgramError("only a maximum, a minimum or a leaky ReLU can be chosen this way")

    def hard(x: Expr) -> Expr:
        return b.mul(b.clamp(b.add(x, c(3.0)), c(0.0), c(6.0)), c(1 / 6))

    table: dict[str, _Meaning] = {
        name: functools.partial(f, op.name) for op in OPS.values() for name in op.aten
    }
    table |= {
        "add": lambda x, y, alpha=one: b.add(x, b.mul(y, alpha)),
        "sub": lambda x, y, alpha=one: b.sub(x, b.mul(y, alpha)),
        "rsub": lambda x, y, alpha=one: b.sub(y, b.mul(x, alpha)),
        "mul": b.mul,
        "div": b.div,
        "truediv": b.div,
        "pow": b.power,
        "neg": b.neg,
        "square": lambda x: b.mul(x, x),
        "reciprocal": lambda x: b.div(one, x),
        "rsqrt": lambda x: b.div(one, f("sqrt", x)),
        "addcmul": lambda x, y, z, value=one: b.add(x, b.mul(b.mul(y, z), value)),
        "addcdiv": lambda x, y, z, value=one: b.add(x, b.mul(b.div(y, z), value)),
        "lerp": lambda x, y, w: b.add(x, b.mul(w, b.sub(y, x))),
        "clamp": lambda x, min=None, max=None: b.clamp(x, min, max),
        "hardtanh": lambda x, lo=None, hi=None: b.clamp(x, lo or c(-1.0), hi or one),
        "relu": lambda x: f("maximum", x, c(0.0)),
        "leaky_relu": leaky,
        "gelu": lambda x, approximate="none": f(gelu_of(approximate), x),
        "silu": lambda x: b.mul(x, f("sigmoid", x)),
        "mish": lambda x: b.mul(x, f("tanh", f("softplus", x))),
        "softplus": softplus,
        "log_sigmoid_forward": lambda x: b.neg(f("softplus", b.neg(x))),
        "log1p": lambda x: f("log", b.add(x, one)),
        "gelu_backward": lambda d, x, approximate="none": b.mul(
            d, f(f"d_{gelu_of(approximate)}", x)
        ),
        "sigmoid_backward": lambda d, y: b.mul(d, b.mul(y, b.sub(one, y))),
        "threshold_backward": lambda d, y, _: b.mul(d, f("d_relu", unclamped(y))),
        "tanh_backward": lambda d, y: b.mul(d, b.sub(one, b.mul(y, y))),
        "hardsigmoid": hard,
        "hardswish": lambda x: b.mul(x, hard(x)),
        "where": where,
    }
    table |= {op: lambda x, y, op=op: f(op, x, y) for op in ("gt", "ge", "lt", "le")}
    return table
