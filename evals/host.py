"""The suite of host times: what accepted kernels' calls cost the host.

At the smallest check shape the device is done before the next call. Beside the public function are
torch.mm of operands as large, and both under torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from coda_agent.evals.cases import Case, Contender, Outputs, Setup, Suite
from coda_agent.evals.kernels import load
from coda_agent.primitives.deferred import torch
from coda_agent.specs import load_spec

LIMIT = 0.05


_ABOUT = """What a call of an accepted kernel costs the host, in microseconds until it returns, at
its smallest check shape."""


def suite(root: Path) -> Suite:
    """List a workspace's accepted kernels, timed on the host."""
    contenders = "ours", "gemm", "compile", "compile, gemm"
    names = [load_spec(path).name for path in sorted(root.glob("generated/[!.]*/spec.md"))]
    cases = [Case(n, contenders, partial(_setup, root, n), ("host", "loop")) for n in names]
    return Suite("host", _ABOUT, cases, ("host",), 40)


def _setup(root: Path, name: str, device: str, shrink: int) -> Setup:
    from coda_agent.specs import as_declared, draw_inputs, run_reference

    kernel = load(root, name)
    spec = kernel.spec
    sizes = min(spec.check_shapes, key=lambda sizes: math.prod(sizes.values()))
    drawn = draw_inputs(spec, sizes, spec.default_types(), seed=0, device=device)
    m, n, k = (sizes[dim] for dim in spec.gemm_dims)
    left, right = (torch.zeros(r, k, dtype=torch.bfloat16, device=device) for r in (m, n))
    product, right = left.new_empty(m, n), right.t()

    def ours(compiled: bool) -> Contender:
        # Of its own, since a kernel may overwrite an input.
        own = {x: v.clone() if torch.is_tensor(v) else v for x, v in drawn.items()}
        given = as_declared(spec, own)
        args = [own[x] if x in kernel.packing else given[x] for x in spec.inputs]
        direct = kernel.packed if kernel.packing else kernel
        function = torch.compile(lambda: direct(*args), fullgraph=True) if compiled else direct

        @torch.no_grad()
        def call(_: int) -> object:
            return function() if compiled else function(*args)

        def outputs() -> Outputs:
            found = call(0)
            return dict(zip(spec.outputs, found if isinstance(found, tuple) else (found,)))  # noqa: B905

        return Contender(call, outputs)

    mm = torch.compile(torch.mm, fullgraph=True)
    makers: Mapping[str, Callable[[], Contender]] = {
        "ours": partial(ours, False),
        "gemm": lambda: Contender(lambda _: torch.mm(left, right, out=product), dict),
        "compile": partial(ours, True),
        "compile, gemm": lambda: Contender(lambda _: mm(left, right), dict),
    }
    return Setup(makers, dict(run_reference(spec, drawn, exact=True)), LIMIT)
