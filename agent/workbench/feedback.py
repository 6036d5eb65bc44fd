"""What the judge said, as an author reads it: gate by gate, the first finding first.

The grammar, one attempt:

    attempt 3, check interpret: FAILED at numerics
      static       passed
      compile      passed   8 kernels; a program, target and tile: registers, spill stores
      numerics     FAILED   2 findings
        1. what is wrong
           at   where: output, rows, columns, tile, sizes
           try  what to try
      performance  skipped: why

A passed gate may add figures: the worst error as a share of what is allowed (1.0 is the limit),
times in microseconds with their share of a bare GEMM's speed and of torch.compile's.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_agent.agent.judge import Verdict

MAX_FINDINGS = 8


def feedback(verdict: "Verdict", check: str, number: int) -> str:
    """A verdict as text for an author; at most `MAX_FINDINGS` findings of a gate."""
    failed = next((gate.name for gate in verdict.gates if not gate.passed), None)
    head = f"FAILED at {failed}" if failed else f"passed ({verdict.level or 'nothing shown yet'})"
    lines = [f"attempt {number}, check {check}: {head}"]
    for gate in verdict.gates:
        if gate.skipped:
            lines.append(f"  {gate.name:<12} skipped: {gate.skipped}")
            continue
        count = f"{len(gate.findings)} findings"
        said = "; ".join(_figures(gate.name, gate.data)) if gate.passed else count
        lines.append(f"  {gate.name:<12} {'passed' if gate.passed else 'FAILED'}   {said}".rstrip())
        for i, finding in enumerate(gate.findings[:MAX_FINDINGS], 1):
            lines.append(f"    {i}. {finding.message}")
            if finding.where:
                at = ", ".join(f"{key} {value}" for key, value in finding.where.items())
                lines.append(f"       at   {at}")
            if finding.hint:
                lines.append(f"       try  {finding.hint}")
        lines += (f"    {line}" for line in _timings(gate.data))
    lines += (f"  not shown: {sentence}" for sentence in verdict.not_shown)
    return "\n".join(lines)


def _figures(gate: str, data: dict[str, Any]) -> Iterator[str]:
    if gate == "compile" and (kernels := data.get("kernels")):
        yield f"{len(kernels)} kernels"
        spilling = [k for k in kernels if k.get("local_stores")]
        for kernel in [*spilling, *kernels][:2]:
            yield (
                f"{kernel['program']} {kernel['arch']} {kernel['dtype']} at {kernel['tile']}: "
                f"{kernel.get('registers')} registers, {kernel.get('local_stores')} spill stores"
            )
    if gate == "numerics":
        yield f"by the {data.get('ran')}"
        for program, worst in data.get("worst", {}).items():
            yield f"{program}: {worst.get('ratio', 0.0):.2f} of the bound ({worst.get('output')})"
        if refused := data.get("refused_tiles"):
            yield f"{len(refused)} tiles refused"


def _timings(data: dict[str, Any]) -> Iterator[str]:
    for cell in data.get("cells", []):
        if "times" not in cell:
            continue
        sizes = "x".join(str(size) for size in cell["sizes"].values())
        yield (
            f"{cell['dtype']} {sizes}: {cell['times']['ours']['median_us']:.1f} us at "
            f"{cell['tile']}, {cell['of_gemm']['ratio']:.3f} of a bare GEMM's speed, "
            f"{cell['over_compile']['ratio']:.3f} of torch.compile's, floor {cell['floor_us']} us"
        )
