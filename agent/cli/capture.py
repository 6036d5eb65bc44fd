"""The command that writes the specs of a model's layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.cli.spec import check_free
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import find
from coda_agent.primitives.objects import write_whole

if TYPE_CHECKING:
    from coda_agent.agent.capture.pullback import Moved
    from coda_agent.agent.capture.steps import Captured


@reported()
def capture(
    config: Annotated[Path, typer.Argument(help="A Hugging Face config.json, or its folder.")],
    batch: Annotated[int, typer.Option(min=2, help="Samples.")] = 2,
    positions: Annotated[int, typer.Option(min=2, help="Tokens of each sample.")] = 4096,
    force: Annotated[bool, typer.Option("--force", help="Overwrite specs that are there.")] = False,
) -> Reply:
    """Write the specs of a model's layer, attention left out, and show what its steps move."""
    from coda_agent.agent.capture import config as configurations
    from coda_agent.agent.capture.steps import captured

    layer, workspace = configurations.read(config), find()
    found = captured(layer, batch, positions)
    paths = {name: workspace.specs / f"{name}.md" for name in found.specs}
    for name, path in paths.items():
        check_free(path, found.specs[name], force=force)
    for name, path in paths.items():
        write_whole(path, found.specs[name])
    document = {
        "model": layer.name, "specs": list(paths.values()),
        "steps": [vars(s) | {"moved": s.moved._asdict()} for s in found.steps],
        "sums": [
            {"piece": p, "direction": d, "plan": found.planned(p, d)._asdict(),
             "eager": eager._asdict()}
            for (p, d), eager in found.eager.items()
        ],
    }  # fmt: skip
    title = f"{layer.name}, {batch} x {positions} tokens in bfloat16, at the roofline of an H200"
    wrote = [f"wrote {path}" for path in paths.values()]
    return Reply(document, "\n".join([title, "", columns(_rows(found)), "", *_sums(found), *wrote]))


def _rows(found: "Captured") -> list[tuple[object, ...]]:
    """Each kernel and product; what else PyTorch has in one row for each piece and direction."""
    from coda_agent.agent.capture.pullback import total

    rows: list[tuple[object, ...]] = [("piece", "", "step", "kernel", *_UNITS)]
    for piece, direction in found.eager:
        steps = [s for s in found.steps if (s.piece, s.direction) == (piece, direction)]
        small = [s.moved for s in steps if s.single]
        for s in (s for s in steps if not s.single):
            kernel = f"{s.kernel}{', accepted' * s.accepted}" if s.kernel else "PyTorch"
            rows.append((piece, direction, s.name, kernel, *_cells(s.moved)))
        if small:
            name = f"{len(small)} other steps"
            rows.append((piece, direction, name, "PyTorch", *_cells(total(small))))
    return rows


_UNITS = ("MB", "launches", "us")


def _cells(moved: "Moved") -> tuple[str, int, str]:
    return f"{moved.bytes / 1e6:.1f}", moved.launches, f"{1e6 * moved.seconds:.1f}"


def _sums(found: "Captured") -> list[str]:
    """The plan of each piece beside PyTorch's calls one by one, and of a layer as a whole."""
    from coda_agent.agent.capture.pullback import total

    rows: list[tuple[object, ...]] = [("", "", *_UNITS, *(f"eager {x}" for x in _UNITS), "saved")]
    pairs = {(p, d): (found.planned(p, d), eager) for (p, d), eager in found.eager.items()}
    inner = [x for (p, _), x in pairs.items() if p != "exit"]
    pairs["a layer", ""] = total(plan for plan, _ in inner), total(eager for _, eager in inner)
    for (piece, direction), (plan, eager) in pairs.items():
        saved = round(1e6 * (eager.seconds - plan.seconds), 1) + 0.0  # never -0.0
        share = f"{saved:.1f} us, {saved / (1e4 * eager.seconds):.0f} %"
        rows.append((piece, direction, *_cells(plan), *_cells(eager), share))
    return [columns(rows), ""]
