"""Programs of ATen subgraphs: their numbers beside the function's own, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.subgraph import Composition, compose_graph
from coda_agent.primitives.interpret import interpret

aten = torch.ops.aten


def traced(function: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*args).graph


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 0.3).to(dtype)


def run(composition: Composition, graph: fx.Graph, args: tuple[torch.Tensor, ...]) -> list[Any]:
    """The outputs in the order of the graph's, by the interpreter in float64."""
    values = dict(zip((n for n in graph.nodes if n.op == "placeholder"), args, strict=True))
    for node in graph.nodes:  # what is computed before the product
        if node.op == "get_attr":
            values[node] = getattr(graph.owning_module, node.target)
        elif node.op == "call_function":
            known = torch.fx.map_arg((node.args, node.kwargs), values.get)
            values[node] = node.target(*known[0], **known[1])

    def of(port: Any) -> torch.Tensor:
        x = port.canonical(*(values[node] for node in port.nodes))
        return x.double() if x.is_floating_point() else x

    program = composition.program
    operands = {name: of(port) for name, port in composition.operands.items()}
    results = interpret(
        program,
        of(composition.a),
        of(composition.b),
        operands,
        dtypes=dict.fromkeys(program.outputs, torch.float64),
        compute=torch.float64,
    )
    return [port.restored(results[port.name]) for port in composition.outputs.values()]


def relu(x, w, b):
    return F.relu(F.linear(x, w, b))


def residual(x, w, c, g):
    d = x @ w.T + c
    return d, d * g, d.float().pow(2).mean(-1)


def row_scaled(x, w, r):
    return (x @ w.T).float() * r[:, None]


def scaled(x, w, s):
    return torch.tanh(x @ w.T / s) * s


def swiglu(x, w):
    y = F.linear(x, w)
    gate, up = y.chunk(2, -1)
    return y, F.silu(gate) * up


def rotated_heads(x, w, cos, sin):
    q = F.linear(x, w).view(x.shape[0], x.shape[1], -1, 64).transpose(1, 2)
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin


def rotated_by_sample(x, w, cos, sin):
    return rotated_heads(x, w, cos[:, None], sin[:, None])


def head_norm(x, w, g):
    q = F.linear(x, w).view(x.shape[0], -1, 128).float()
    return q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * g


def log_sum_exp(x, w, y):
    z = (x @ w.T).float()
    m = z.amax(-1, keepdim=True)
    return z, (z - m).exp().sum(-1, keepdim=True).log() + m, z.gather(1, y[:, None])[:, 0]


def gelu_gradient(d, w, x):
    return aten.gelu_backward(d @ w, x), aten.silu_backward(d @ w, x)


def swiglu_gradient(d, w, y):
    d, (gate, up) = d @ w, y.chunk(2, -1)
    s = torch.sigmoid(gate.float())
    return d * up * s * (1 + gate * (1 - s)), d * gate * s


def gated(x, w, gate, residual, b):
    return residual + gate[:, None] * F.linear(x, w, b)


def normed_before(x, w, g):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.relu((h * g).to(x.dtype) @ w.T)


def columns_summed(x, w, c):
    d = (x @ w.T) * c
    return d, d.sum(0)


def weight_gradient(d, x):
    return d.T @ x + 1


def two_gates(x, w, v):
    return F.silu(x @ w.T) * (x @ v.T)


def two_gates_stored(x, w, v):
    gate, up = F.linear(x, w), F.linear(x, v)
    return gate, up, F.silu(gate) * up


def query_key_value(x, q, k, v, cos, sin):
    return rotated_heads(x, q, cos, sin), rotated_heads(x, k, cos, sin), F.linear(x, v)


def biased_query_key(x, q, k, b, c):
    return F.linear(x, q, b), F.linear(x, k, c)


def packed_heads(x, w, b):
    heads = F.linear(x, w, b).view(x.shape[0], x.shape[1], 3, -1, 32)
    return heads.permute(2, 0, 3, 1, 4).unbind(0)


def packed_and_scaled(x, w, b):
    q, k, v = torch.addmm(b, x, w).split(w.shape[1] // 3, 1)
    return q, k, v * 2


def head_norm_transposed(x, w, g):
    q = F.linear(x, w).view(x.shape[0], x.shape[1], -1, 32).transpose(1, 2).float()
    return q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + g)


def summed(d, e, w, v, r):
    return (d @ w + e @ v) * r


ROWS, BATCH = tensor(24, 32), tensor(2, 12, 32)
WEIGHT, SQUARE = tensor(128, 32), tensor(32, 32)
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], str]] = {
    "relu": (relu, (ROWS, WEIGHT, tensor(128)), "Tile"),
    "batch": (relu, (BATCH, WEIGHT, tensor(128)), "Tile"),
    "all alike": (relu, (SQUARE, SQUARE.clone(), tensor(32)), "Tile"),
    "residual": (residual, (ROWS, WEIGHT, tensor(24, 128), tensor(128)), "Tile Tile RowMean"),
    "row scale": (row_scaled, (ROWS, WEIGHT, tensor(24, dtype=torch.float32)), "Tile"),
    "swiglu": (swiglu, (BATCH, WEIGHT), "Tile HalfTile"),
    "rotation": (rotated_heads, (BATCH, WEIGHT, tensor(12, 64), tensor(12, 64)), "Tile"),
    "rotation by sample": (rotated_by_sample, (BATCH, WEIGHT, tensor(2, 12, 64), tensor(2, 12, 64)), "Tile"),
    "scalar": (scaled, (ROWS, WEIGHT, torch.tensor(0.3)), "Tile"),
    "head norm": (head_norm, (ROWS, tensor(256, 32), tensor(128)), "Tile"),
    "log-sum-exp": (log_sum_exp, (ROWS, WEIGHT, torch.arange(24) * 5), "Tile RowLogSumExp RowGather"),
    "gelu gradient": (gelu_gradient, (ROWS, WEIGHT.T, tensor(24, 128)), "Tile Tile"),
    "swiglu gradient": (swiglu_gradient, (ROWS, WEIGHT.T, tensor(24, 256)), "Tile Tile"),
    "gated by sample": (gated, (BATCH, WEIGHT, tensor(2, 128), tensor(2, 12, 128), tensor(128)), "Tile"),
    "norm before": (normed_before, (ROWS, WEIGHT, tensor(32)), "Tile"),
    "column sum": (columns_summed, (ROWS, WEIGHT, tensor(24, 128)), "Tile ColSum"),
    "two gates": (two_gates, (ROWS, WEIGHT, tensor(128, 32) * 2), "HalfTile"),
    "query, key and value": (
        query_key_value,
        (BATCH, tensor(256, 32), WEIGHT, tensor(128, 32) * 2, tensor(12, 64), tensor(12, 64)),
        "Tile",
    ),
    "one key": (
        query_key_value,
        (BATCH, tensor(256, 32), tensor(64, 32), tensor(64, 32) * 2, tensor(2, 12, 64)[0],
         tensor(12, 64)),
        "Tile",
    ),
    "biased": (biased_query_key, (BATCH, WEIGHT, tensor(64, 32), tensor(128), tensor(64)), "Tile"),
    "packed heads": (packed_heads, (BATCH, tensor(192, 32), tensor(192)), "Tile"),
    "packed and scaled": (packed_and_scaled, (ROWS, tensor(32, 192), tensor(192)), "Tile"),
    "transposed norm": (head_norm_transposed, (BATCH, WEIGHT, tensor(32)), "Tile"),
    "sum": (summed, (ROWS, tensor(24, 48), WEIGHT.T, tensor(48, 128), tensor(128)), "Tile"),
    "weight gradient": (weight_gradient, (tensor(24, 64), ROWS), "Tile"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_composition_has_the_numbers_of_its_function(name):
    function, args, kinds = CASES[name]
    wide = tuple(x.double() if x.is_floating_point() else x for x in args)
    graph = traced(function, args)
    composition = compose_graph(graph)
    assert [kind.__name__ for kind in composition.program.outputs.values()] == kinds.split()
    expected = function(*wide)
    expected = expected if isinstance(expected, tuple | list) else (expected,)
    exact = traced(function, wide)
    again = compose_graph(exact)
    assert again.program.digest == composition.program.digest
    for got, value in zip(run(again, exact, wide), expected, strict=True):
        torch.testing.assert_close(got, value.double(), rtol=1e-5, atol=1e-6)


def test_sizes_are_those_of_the_call_and_roles_do_not_follow_from_them():
    composition = compose_graph(traced(relu, (SQUARE, SQUARE.clone(), tensor(32))))
    assert composition.extents == {"M": 32, "N": 32, "K": 32}
    assert [k.__name__ for k in composition.program.operands.values()] == ["RowVector"]
    other = compose_graph(traced(relu, (ROWS, WEIGHT, tensor(128))))
    assert other.program.digest == composition.program.digest


def test_a_sum_by_the_number_of_columns_is_a_mean():
    def mean(x, w):
        d = (x @ w.T).float()
        return d, (d * d).sum(-1) * (1 / 128)

    composition = compose_graph(traced(mean, (ROWS, WEIGHT)))
    assert [k.__name__ for k in composition.program.outputs.values()] == ["Tile", "RowMean"]


@pytest.mark.parametrize(
    ("function", "args", "node", "message"),
    [
        (lambda x, w, v: (x @ w.T).relu() @ v, (ROWS, WEIGHT, WEIGHT), "mm_1", "second GEMM"),
        (lambda x, w: (x @ w.T).softmax(-1), (ROWS, WEIGHT), "_softmax", "whole row"),
        (lambda x, w: (x @ w.T).cumsum(-1), (ROWS, WEIGHT), "cumsum", "whole row"),
        (lambda x, w: x + w, (ROWS, ROWS), None, "no product"),
        (lambda x: x @ x.T, (ROWS,), "mm", "alike"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_node(function, args, node, message):
    graph = traced(function, args)
    with pytest.raises(Refusal, match=message) as refusal:
        compose_graph(graph)
    assert getattr(refusal.value.node, "name", None) == node
    assert refusal.value.node is None or refusal.value.node.graph is graph


@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_that_is_taken_apart_is_read_where_it_is(turned: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        y = x @ (w if turned else w.T) + b
        return y[:, :64].sigmoid(), y[:, 64:].exp()

    args = tensor(48, 32), tensor(*((32, 192) if turned else (192, 32))), tensor(192)
    graph = traced(function, args)
    composition = compose_graph(graph)
    _, w, b = graph.find_nodes(op="placeholder")
    assert (composition.b.node, composition.b.parts) == (w, ())
    assert [(p.node, p.parts, p.steps) for p in composition.operands.values()] == [(b, (), ())]
    wide = [x.double() for x in args]
    for got, true in zip(run(composition, graph, args), function(*wide), strict=True):
        assert torch.allclose(got, true, rtol=1e-6, atol=1e-6)
