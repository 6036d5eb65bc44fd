"""The one small edit that makes a wrong program right.

- Each edit changes a node of the graph, or one use of it: another operation, a sign, an operand, a
  constant, a factor on the other side of an activation. It counts where the edited program gives
  the truth at nearly all elements, on the inputs that failed and on others.
- Before that, digits are followed: a node that overflows, and one whose rounding is what is off.
- Edits are tried from the simplest on. All run in float64, on the rows that are most wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from coda_agent.agent.judge import edits, fits
from coda_agent.agent.judge.edits import Changes, Edit
from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.replaying import MISFITS, SHIFT, Mistake, Replay, found_lost
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch

FAULTS = {
    "wrong_sign": "a term, a factor or a rotation of the other sign",
    "wrong_operation": "another operation or activation in one place",
    "wrong_constant": "another number",
    "misplaced": "a factor or a term on the wrong side of an operation",
    "missing_term": "a factor, a term or an operation left out",
    "extra_term": "a factor, a term or an operation too many",
    "overflow": "an intermediate value that overflows",
    "cancellation": "digits lost between numbers that nearly cancel",
}
# A program of 48 operations has 36,000 edits, which took 8 s. Of 618 mistakes of people and of
# mutants that were found, the last one was after 5,301 trials.
_MAX_RUNS = 7_000


def mistake(
    variant: Variant, o: str, sets: Iterable[tuple[Inputs, torch.Tensor]]
) -> Mistake | None:
    """Find the mistake that explains a wrong output, or None.

    Args:
        variant: The program, whose output is wrong in float64.
        o: The output.
        sets: Inputs in float64, each with the exact output; on the first it is wrong. What is found
            there holds on the others too.
    """
    first, *others = sets
    whole = Replay(variant, o, *first)
    if (lost := found_lost(whole, 2.0**-52)) is not None:
        return lost
    if not bool(whole.wrong.any()):
        return None
    some = Replay(variant, o, *first, whole.out)
    more = [Replay(variant, o, *x, single=True) for x in others]
    overflowing: Mistake | None = None
    for edit in _edits(some):
        if some.runs > _MAX_RUNS:
            break
        try:
            changes = edit.changes(some.values)
            found = some.right(changes) and not (
                some.small and some.branched(changes) and not _chosen(some, changes)
            )
            found = found and whole.right(edit.changes(whole.values))
            if found and all(r.right(edit.changes(r.values)) for r in more):
                return Mistake(edit.fault, edit.text)
            # The right program may overflow as well: it is named where nothing else is found.
            if (
                found
                and overflowing is None
                and all(r.right(edit.changes(r.values)) for r in more[:1])
            ):
                overflowing = Mistake(edit.fault, edit.text)
        except MISFITS:
            continue
    return overflowing


def _chosen(replay: Replay, changes: Changes) -> bool:
    """Whether changes take one value of a choice always, which is right everywhere then."""
    ((place, due), *more) = changes.items()
    node = replay.graph.nodes[place] if isinstance(place, int) and place >= 0 else None
    return not more and isinstance(due, int) and node is not None and node.op == "where"


def sided(variant: Variant, o: str, inputs: Inputs, truth: torch.Tensor) -> str:
    """Name the value of a program by whose sign an output is wrong, or nothing."""
    replay = Replay(variant, o, inputs, truth)
    wrong = replay.wrong if truth.ndim > 1 else replay.wrong[:, None]
    shapes = (wrong.shape, (1, wrong.shape[1]), (len(wrong), 1)) if not wrong.all() else ()
    for i, v in enumerate(replay.values):
        for side, word in ((v < 0, "negative"), (v > 0, "positive")) if v.shape in shapes else ():
            if torch.equal(side.expand_as(wrong), wrong):
                return f"it is wrong where `{replay.read.text(i)}` is {word}, and only there"
    return ""


def _edits(replay: Replay) -> Iterator[Edit]:
    graph, root = replay.read, replay.root
    live = graph.below(root)
    nodes = [(i, n) for i, n in enumerate(graph.nodes) if i in live and n.name != SHIFT]
    uses = [(c, k) for c, n in nodes for k in range(len(n.args))] + [(-1, 0)]
    source = {u: graph.nodes[u[0]].args[u[1]] if u[0] >= 0 else root for u in uses}
    count = {i: sum(s == i for s in source.values()) for i in live}
    # A node with one use is that use: trying both would find nothing new.
    sites: list[tuple[Any, int]] = [(i, i) for i, n in nodes if n.op != "const"]
    sites += [(u, i) for u, i in source.items() if count[i] > 1 and graph.nodes[i].op != "const"]
    yield from edits.stores(replay)
    yield from edits.branches(graph, nodes)
    yield from edits.superfluous(graph, nodes)
    yield from edits.signs(graph, nodes, sites)
    yield from edits.swaps(graph, nodes)
    yield from edits.dropped(graph, nodes)
    yield from edits.operations(graph, nodes)
    yield from edits.groups(graph, nodes)
    yield from fits.constants(replay, nodes)
    yield from fits.bounds(replay)
    operands = [i for i, n in enumerate(graph.nodes) if n.op == "operand"]
    yield from edits.replaced(graph, [x for x in sites if x[1] in operands], operands)
    yield from edits.inserted(graph, sites, operands, "missing_operand", "+·")
    yield from edits.moved(graph, nodes, sites)
    yield from edits.inserted(graph, sites, operands, "missing_operand", "-/")
    yield from fits.fitted(replay, sites)
    yield from edits.wrapped(graph, sites)
    yield from edits.inserted(graph, sites, operands, "missing_operand", "<>s")
    others = [i for i, n in enumerate(graph.nodes) if n.op not in ("operand", "const")]
    if replay.small and any(n.op == "where" for n in graph.nodes):
        others = []  # the value of the other branch is among them
    yield from edits.inserted(graph, sites, others, "missing_term", "+-·/<>s")
    yield from edits.replaced(graph, sites, others + operands)
    yield from edits.activations(graph, nodes)
