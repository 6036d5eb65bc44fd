"""What a program became, as far as an author can change it."""

import re
import textwrap

from coda_agent.agent import execution
from coda_agent.agent.explain import program_of
from coda_agent.agent.judge import compile_gate
from coda_agent.agent.judge.performance import inspected
from coda_agent.agent.judge.replaying import expression
from coda_agent.agent.workbench.feedback import resources
from coda_agent.primitives import inspect
from coda_agent.primitives.graph import Graph, Shape
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.specs import Spec

_BEGINS = {"cute": "wgmma.wait.group", "ptx": "wgmma.wait_group", "sass": "WARPGROUP.DEPBAR"}
_ENDS = {"cute": "bulk.commit.group", "ptx": "bulk.commit_group", "sass": "UTMACMDFLUSH"}
_NOISE = re.compile(r"/\*[0-9a-f]{4,}\*/|// (begin|end) inline asm|\s+$")
_WIDEST = 120


def epilogue(stage: str, text: str) -> str:
    """Cut out what follows the last wait, until one subtile is stored.

    The subtiles after it repeat that; a program that stores no tile has its whole end.
    """
    lines = text.splitlines()
    begin = max((i for i, line in enumerate(lines) if _BEGINS[stage] in line), default=0)
    ends = (i for i in range(begin, len(lines)) if _ENDS[stage] in lines[i])
    end = next(ends, len(lines) - 1)
    kept = filter(str.strip, (_short(line) for line in lines[begin : end + 1]))
    body = textwrap.dedent("\n".join(kept))
    head = f"lines {begin + 1} to {end + 1} of {len(lines)}: the epilogue, its first subtile"
    return f"{head}\n{body}"


def _short(line: str) -> str:
    line = re.sub(r"\bkernel_cutlass\w+", "kernel", _NOISE.sub("", line)).replace("\t", " ")
    return line if len(line) <= _WIDEST else f"{line[:_WIDEST]}…"


def tiles(spec: Spec, text: str, program: str | None) -> str:
    """List registers and spills in each configuration, for sm_90a.

    Raises:
        CodaError: the candidate does not trace, or has no such program.
    """
    chosen = program_of(spec, text, program)
    programs = {spec.variant(binding): chosen for binding in spec.bindings()}
    m, n, k = spec.gemm_dims
    shapes = [(sizes[m], sizes[n], sizes[k]) for sizes in spec.bench_shapes]
    element = next(iter(next(iter(spec.types.values()), ["bfloat16"])))
    jobs = compile_gate.jobs_for(spec, programs, [element], newer=False, shapes=shapes)
    once = {job.config: job for job in jobs if not job.again}
    _, kernels = compile_gate.compile_all(
        execution.executor(), list(once.values()), lambda *_: None
    )
    default = DEFAULT_CONFIGS["sm_90a"].label
    lines = [f"{chosen.name}, {element}, sm_90a, at the tiles for the bench shapes:"]
    for kernel in kernels:
        said = kernel.error or resources(kernel)
        lines.append(f"{kernel.tile}: {said}{', the default' * (kernel.tile == default)}")
    if any(kernel.local_stores for kernel in kernels):
        lines.append(crowded(chosen.graph))
    return "\n".join(lines)


def crowded(graph: Graph) -> str:
    """Say where most elementwise values are alive, which spill first."""
    per_element = [n.shape in (Shape.TILE, Shape.HALF, Shape.WIDE) for n in graph.nodes]
    last = {a: i for i, n in enumerate(graph.nodes) for a in (i, *n.args)}
    last |= dict.fromkeys(graph.outputs.values(), len(graph.nodes))
    alive = [
        [a for a in range(i + 1) if last[a] > i and per_element[a]] for i in range(len(graph.nodes))
    ]
    at = max(range(len(alive)), key=lambda i: len(alive[i]))
    values = ", ".join(f"`{expression(graph, a, 24)}`" for a in alive[at])
    return (
        f"As written, most values are alive once `{expression(graph, at)}` is computed: {values}. "
        "What is used up soon after it is computed spills less."
    )


def roofline(spec: Spec, text: str, name: str | None = None) -> str:
    """State flops, bytes and the floor at each shape, on an H200."""
    program, element = program_of(spec, text, name), spec.elements[0]
    lines: list[str] = []
    for sizes in spec.bench_shapes:
        m, n, k = (sizes[dim] for dim in spec.gemm_dims)
        facts = inspected(spec, program, sizes, element)
        least = inspect.roofline(facts, inspect.datasheet(facts.gemm_bytes))
        lines.append(
            f"{m}x{n}x{k}: GEMM {facts.gemm_flops / 1e9:.1f} GFLOP, epilogue "
            f"{facts.epilogue_flops / 1e9:.3f} GFLOP, {facts.bytes_moved / 1e6:.1f} MB at least; "
            f"floor {least.floor_us:.1f} us "
            f"({'compute' if least.compute_us > least.memory_us else 'memory'} bound)"
        )
        if len(lines) == 1:
            about = f"launches {facts.launches}, tile-local {facts.tile_local}"
            lines.insert(0, f"{program.name}: {about}, split-K-safe {facts.split_k_safe}")
    return "\n".join(lines)
