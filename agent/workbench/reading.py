"""What an author reads of vocabulary, demonstrations and a spec, in brief."""

from coda_agent.demos import demos
from coda_agent.primitives.catalogue import entries
from coda_agent.specs import Spec
from coda_agent.specs.format import Draw


def vocabulary(word: str = "") -> str:
    """List primitives with a word in name, kind or summary."""
    lines = (f"{e.signature}  [{e.kind}]  {e.summary}" for e in entries())
    return "\n".join(line for line in lines if word.lower() in line.lower())


def names_by_kind() -> str:
    """The name of each primitive, a line for each kind."""
    kinds: dict[str, list[str]] = {}
    for entry in entries():
        kinds.setdefault(entry.kind, []).append(entry.name)
    return "\n".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def demonstrations(word: str) -> str:
    """A line for each demonstration whose text has a word."""
    found = (d for d in demos() if word.lower() in d.text.lower())
    return "\n".join(f"{demo.name}: {demo.summary}" for demo in found)


def programs_to_define(spec: Spec) -> str:
    """Say which programs a candidate must have, with operands and outputs."""
    lines = ["Programs to define:"]
    for binding in spec.bindings():
        updated = spec.updated(binding)
        hidden = (*spec.gemm, *updated.values())
        operands = ", ".join(name for name in spec.inputs if name not in hidden)
        added = "".join(f"; {o} is an AddTile: what is added to {x}" for o, x in updated.items())
        said = f"operands after acc: {operands or 'none'}{added}"
        lines.append(f"- {spec.variant(binding)}: {said}")
    lines.append(f"Outputs of each, in this order: {', '.join(spec.outputs)}")
    draws = (f"{name} {_drawn(spec.inputs[name].draw)}" for name in spec.inputs)
    lines.append(f"Drawn for the checks: {', '.join(draws)}")
    lines.append(
        "Judged too: inputs of all magnitudes and signs in their domains, zeros, NaN, infinity"
    )
    return "\n".join(lines + _canonical(spec))


def _drawn(draw: Draw) -> str:
    return f"{draw.kind}({', '.join(map(str, draw.args))})"


def _canonical(spec: Spec) -> list[str]:
    """What a program sees where declared tensors are something else."""
    if (layout := spec.layout) is None:
        return []
    lines = ["The spec has its tensors as a user does. A program reads and writes these instead:"]
    for place in (*layout.inputs, *layout.outputs):
        shape = ", ".join(map(str, spec.symbolic_shape(place.name)))
        said = [f"- {place.name} ({shape})"]
        if len(place.parts) > 1:
            said.append(f"{', '.join(part.name for part in place.parts)} side by side")
        if place.halves:
            said.append("entries 2j and 2j + 1 are entries j and j + N/2 of the spec's")
        lines.append("; ".join(said))
    return lines
