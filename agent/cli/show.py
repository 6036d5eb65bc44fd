"""The command that shows kernels, and what of them needs a look."""

import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import review as reviews
from coda_agent.agent.cli import targets
from coda_agent.agent.cli.kernels import differing
from coda_agent.agent.cli.options import completed, known_kernels
from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.reply import Reply
from coda_agent.agent.tables import by_head
from coda_agent.agent.workspace import Kernel, find, here, kernel_names, spec_names
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError, WorkspaceError


@reported()
def show(
    kernel: Annotated[
        str | None,
        typer.Argument(
            metavar="KERNEL",
            help="One; none lists all. A pattern such as 'gemm_*' lists kernels and specs.",
            autocompletion=completed(known_kernels),
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write pages there, instead: a list, and one of each."),
    ] = None,
) -> Reply:
    """Show a kernel and what it stands on, or list all: what needs a look on top."""
    if html:
        return _pages(kernel, html)
    if kernel is None or "*" in kernel:
        return _all(kernel)
    return _one(targets.accepted(kernel))


def _all(pattern: str | None) -> Reply:
    """List the workspace's kernels, the package's, and by a pattern specs without one."""
    workspace = find()
    kernels = kernel_names(workspace)
    kernels = {name: kernels[name] for name in fnmatch.filter(kernels, pattern or "*")}
    own = reviews.review(workspace, [k for k in kernels.values() if workspace.owns(k)])
    packaged = sorted((k for k in kernels.values() if not workspace.owns(k)), key=lambda k: k.name)
    specs = fnmatch.filter(spec_names(workspace), pattern or "*")
    missing = sorted(set(specs) - set(kernels))
    if pattern and not (kernels or missing):
        raise WorkspaceError(f"no kernel or spec has a name like {pattern!r}")
    listed: list[JsonObject] = []
    for k, look in [*((r.kernel, r.look) for r in own), *((k, None) for k in packaged)]:
        listed.append({
            "name": k.name, "level": k.level, "folder": k.folder, "stale": k.stale,
            "packaged": look is None, "differing_spec": differing(workspace, k), "look": look or [],
        })  # fmt: skip
    rows = [*reviews.index(own)]
    for k in listed[len(own) :]:
        other = k["differing_spec"]
        note = "of the package" + f"; its spec.md differs from {other}" * bool(other)
        rows.append((k["name"], k["level"], reviews.slowest(kernels[k["name"]]), note))
    if pattern:
        rows += [(name, "spec only", "", "") for name in missing]
    end = f"\n{len(missing)} specs have no kernel: coda-agent show '*' lists them, too"
    return Reply({"kernels": listed, "specs": missing}, columns(rows) + end * (not pattern))


def _one(kernel: Kernel) -> Reply:
    """Show a kernel: program, level, evidence, and what a call dispatches."""
    (found,) = reviews.review(here(), [kernel])
    evidence = None if kernel.level == "damaged" else kernel.evidence
    runs = dispatched(kernel.folder) if evidence else {}
    tables = reviews.tables(kernel)
    program = kernel.program.read_text("utf-8", "replace") if kernel.program.is_file() else ""
    document = {
        "name": kernel.name, "folder": kernel.folder, "program": program, "level": kernel.level,
        "look": found.look, "tables": {title: by_head(rows) for title, rows in tables.items()},
        "evidence": evidence and evidence.model_dump(mode="json"), "dispatch": runs,
    }  # fmt: skip
    facts = [*reviews.facts(found)]
    if evidence:
        facts += [(f"{key} digest", value) for key, value in evidence.digests.items()]
    for where, tiles in runs.items():
        facts += [(where if i == 0 else "", line) for i, line in enumerate(tiles)]
    parts = [f"{kernel.folder}\n{columns(facts)}"]
    parts += [f"{title}\n{columns(rows)}" for title, rows in tables.items()]
    return Reply(document, "\n\n".join([*parts, program.rstrip()]))


def _pages(kernel: str | None, folder: Path) -> Reply:
    """Write a page for each kernel, and one that lists them."""
    workspace = find()
    chosen = [targets.accepted(kernel)] if kernel else workspace.kernels()
    if not chosen:
        raise WorkspaceError("nothing is accepted yet", hint="coda-agent generate SPEC")
    folder.mkdir(parents=True, exist_ok=True)
    pages = reviews.write_pages(folder, reviews.review(workspace, chosen))
    return Reply({"pages": pages}, f"wrote {pages[0]} and {len(pages) - 1} kernels beside it")


def dispatched(folder: Path) -> dict[str, list[str]]:
    """Say which tiles calls run, by M, or why there are none.

    They are of the N and K of the kernel's first benchmark, on this machine's GPU, else on an H200.
    """
    from coda_agent.runtime.dispatch import H200
    from coda_agent.runtime.loading import load_kernel

    try:
        kernel = load_kernel(folder)
    except CodaError as error:
        return {"calls": [error.message]}
    _, n, k = (kernel.spec.bench_shapes[0][dim] for dim in kernel.spec.gemm_dims)
    dtype = kernel.spec.dtype_of(kernel.spec.gemm[0], kernel.spec.default_types())
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else H200.name
    tiles = {m: kernel.tiles.choose(m, n, k, dtype, gpu=gpu) for m in (1 << i for i in range(14))}
    lines = []
    for tile, rows in groupby(tiles, lambda m: tiles[m]):
        first, *_, last = [*rows] * 2
        why = "" if tile is None or tile.fused else ": cuBLAS's product and one kernel are faster"
        span = f"{first} to {last}" if last > first else f"{first}"
        lines.append(f"M = {span}: {tile.label if tile else 'none'}{why}")
    return {f"{dtype}, N = {n}, K = {k}, {gpu}": lines}
