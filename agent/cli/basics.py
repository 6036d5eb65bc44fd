"""Commands for a first look: workspace, machine, stages of programs, primitives."""

import shlex
from pathlib import Path
from textwrap import indent
from typing import Annotated, Literal

import typer

from coda_agent.agent import pages, workspace
from coda_agent.agent.cli import targets
from coda_agent.agent.cli.options import completed, known_kernels, known_specs
from coda_agent.agent.cli.report import columns, reported, waiting
from coda_agent.agent.cli.spec import Shapes, source_of, spec_examples
from coda_agent.agent.doctor import diagnose
from coda_agent.agent.explain import explain as explained
from coda_agent.agent.explain import stage_of
from coda_agent.agent.references import examples_of
from coda_agent.agent.reply import Reply
from coda_agent.primitives.catalogue import entries, vocabulary_names
from coda_agent.primitives.errors import MachineError, WorkspaceError
from coda_agent.primitives.program import Program
from coda_agent.primitives.suggest import near_matches

_EXAMPLE = """an example, in that folder:
  coda-agent spec gemm_bias_act           # or: coda-agent spec FILE.py:FUNCTION
  coda-agent generate gemm_bias_act"""


@reported()
def init(path: Annotated[Path, typer.Argument()] = Path()) -> Reply:
    """Make a workspace: specs/, generated/, logs/ under git."""
    made, new = workspace.init(path)
    left = workspace.commit_made(made, new)
    text = f"workspace {made.root}" + ("".join(f"\n  + {item}" for item in new) or " (unchanged)")
    text += f"\n{left}" * bool(left) + f"\n{_EXAMPLE}" * bool(new)
    if made.root != Path.cwd().resolve():
        text += f"\nnext: cd {shlex.quote(str(path))}"
    return Reply({"workspace": made.root, "made": new, "left": left}, text)


@reported()
def doctor(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="With --exports: exports, or folders of some."),
    ] = None,
    exports: Annotated[
        bool, typer.Option("--exports", help="Look at what was exported, here by default.")
    ] = False,
) -> Reply:
    """Say what this machine has and what that makes possible, or what exports hold."""
    if exports:
        return _exports(folders or [Path()])
    if folders:
        raise WorkspaceError(f"{folders[0]} is looked at with --exports")
    items, level = diagnose(Path.cwd())
    rows = [
        (
            item.name,
            f"{item.value or 'missing'}{' (broken)' * item.broken}",
            item.enables + f" ({item.hint})" * (item.broken or not item.value),
        )
        for item in items
    ]
    end = f"kernels can reach `{level}` here" if level else "nothing can be shown here"
    broken = [item.name for item in items if item.broken]
    end += f"; broken: {', '.join(broken)}" * bool(broken)
    document = {"items": [vars(item) for item in items], "level": level}
    code = MachineError.exit_code if broken or not level else 0
    return Reply(document, f"{columns(rows)}\n\n{end}", code)


def _exports(folders: list[Path]) -> Reply:
    """Say a line for each exported kernel, and one for each fault."""
    from coda_agent.agent.export.inspection import exports_in, inspected  # it takes long to import

    found = [inspected(x) for folder in folders for x in exports_in(folder)]
    rows = [
        (
            kernel["name"], f"{kernel['level']} {kernel['judged']}, {kernel['machine']}",
            f"tiles for {export['gpu']}", ", ".join(kernel["archs"]), ", ".join(kernel["dtypes"]),
            "damaged" if export["faults"] else "intact", kernel["load"],
        )
        for export in found for kernel in export["kernels"]
    ]  # fmt: skip
    head = ("kernel", "level", "tiles", "architectures", "types", "state", "loaded by")
    faults = [fault for export in found for fault in export["faults"]]
    intact = sum(not export["faults"] for export in found)
    end = f"{intact} of {len(found)} exports are intact"
    text = "\n".join([*[columns([head, *rows])] * bool(rows), *faults, "", end])
    return Reply({"exports": found}, text, WorkspaceError.exit_code if faults else 0)


@reported(compiles=True)
def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|KERNEL|FILE|MODULE:FUNCTION|FILE.py:FUNCTION",
            autocompletion=completed(known_kernels, known_specs, files=True),
        ),
    ],
    stage: Annotated[
        Literal["graph", "plan", "program", "cute", "ptx", "sass"] | None,
        typer.Option(help="What to print; of a function its plan, else the program."),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="One variant of several.")] = None,
    shape: Shapes = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Of a plan: rules that did not fire, too.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a plan as a page there, instead.")
    ] = None,
) -> Reply:
    """Print one stage of a program on its way to the machine, or how a function is cut."""
    stage = stage or ("plan" if ":" in target or html else None)
    if html and stage != "plan":
        raise WorkspaceError(f"--html shows a plan, and --stage is {stage}", hint="--stage plan")
    with waiting(f"{stage or 'program'} of {target}"):
        if ":" in target or stage == "plan":
            return _planned(target, stage or "plan", shape or [], html, verbose=verbose)
        program, spec = targets.explainable(target)
        stage = stage or "program"
        text = explained(spec, program, stage, variant=variant)
    return Reply({"target": target, "stage": stage, "text": text}, text.rstrip())


def _planned(
    target: str, stage: str, shapes: list[str], html: Path | None, *, verbose: bool
) -> Reply:
    """Show a function's plan, or one stage of each of its kernels."""
    from coda_agent.fuse import show, worker  # they import what runs kernels

    if ":" in target:
        source = source_of(target)
        examples = examples_of(source, shapes)
    else:
        spec = targets.explainable(target)[1]
        if spec is None:
            raise WorkspaceError(f"{target} has no spec, so it has no plan")
        source, examples = spec_examples(spec)
    found = worker.explained(source, examples)
    document = {"target": target, "stage": stage, **found.model_dump(mode="json")}
    if html:
        sections = [(head, columns(rows)) for head, rows in show.lines(found, verbose=True)]
        programs = "\n\n".join(text for text, _ in found.kernels)
        page = pages.write(html, f"Plan of {source.name}", [*sections, ("programs", programs)])
        return Reply(document | {"html": page}, f"wrote {page}")
    if stage == "plan":
        parts = [
            f"{heading}\n" + indent(columns(rows, 2), "  ")
            for heading, rows in show.lines(found, verbose=verbose)
            if rows
        ]
        parts += ["programs", *(text for text, _ in found.kernels)] if verbose else []
        return Reply(document, "\n\n".join(parts))
    texts = [
        text if stage == "program" else stage_of(None, Program.from_dict(data), stage)
        for text, data in found.kernels
    ]
    return Reply(document | {"texts": texts}, "\n\n".join(texts))


@reported()
def primitives(
    name: Annotated[str | None, typer.Argument(autocompletion=completed(vocabulary_names))] = None,
) -> Reply:
    """List what programs are written from, or describe one."""
    known = {entry.name: entry for entry in entries()}
    if name is None:
        keys = ("name", "kind", "signature", "summary")
        document = [{key: getattr(entry, key) for key in keys} for entry in known.values()]
        return Reply(document, columns([(e.name, e.kind, e.summary) for e in known.values()]))
    if name not in known:
        raise WorkspaceError(f"no primitive named {name!r}", hint=near_matches(name, known))
    entry = known[name]
    fields = ("name", "kind", "signature", "summary", "doc")
    text = f"{entry.signature}  ({entry.kind})\n\n{entry.doc}"
    return Reply({key: getattr(entry, key) for key in fields}, text)
