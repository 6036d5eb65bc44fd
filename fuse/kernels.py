"""A step's text as a kernel: found among accepted ones by what it computes, or composed and judged.

What was composed is kept in the user's cache, with the level that the judge gave it here. The
composer and the judge are imported where nothing was kept: that took 0.3 s of CPU time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.fuse.trace import Value, plain
from coda_agent.primitives.errors import CodaError, MachineError, ProgramError, WorkspaceError
from coda_agent.primitives.objects import fingerprint, user_cache, write_whole
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.runtime.kernel import Kernel, load_kernel
from coda_agent.specs import Spec, load_spec
from coda_agent.specs.source import extracted

if TYPE_CHECKING:
    from coda_agent.agent.workspace import Kernel as Entry

SOURCES = (
    "fuse", "agent/authors", "agent/judge", "agent/execution",
    "primitives", "specs", "runtime", "generated",
)  # fmt: skip
"""The folders that compose, judge and run a kernel, by which what was kept holds."""
_GATES = ("static", "compile", "numerics")
# By operator: torch takes each name once a process.
_LOADED: dict[str, Kernel] = {}


@dataclass(frozen=True, eq=False)
class Composed:
    """A step as a kernel.

    Attributes:
        spec: Drafted from its text.
        text: The candidate.
        program: What it defines.
        level: What the judge gave it: "" where it was not asked, else "proved" or "verified"; or
            the level of the accepted kernel that computes the same.
        folder: Of the accepted kernel that computes the same, or the same and more; or "".
        more: Whether that one has outputs more. Then its measured tiles are taken, not its level.
    """

    spec: Spec
    text: str
    program: Program
    level: str
    folder: str
    more: bool = False

    @property
    def accepted(self) -> str:
        """The name of the accepted kernel that computes the same, or ""."""
        return "" if self.more else self.like

    @property
    def like(self) -> str:
        """The name of the accepted kernel whose tiles it has, or ""."""
        return Path(self.folder).name

    @cached_property
    def kernel(self) -> Kernel:
        """What runs it: with the tiles that were measured of the accepted one, where there is."""
        digest = hashlib.sha256((self.spec.text + self.text).encode()).hexdigest()[:12]
        name = f"plan_{self.spec.name}_{digest}"
        if known := _LOADED.get(name):
            return known
        programs = {self.spec.name: self.program}
        if not self.folder:
            return _LOADED.setdefault(name, Kernel(self.spec, programs, {}, frozenset(), name))
        known = load_kernel(Path(self.folder))
        like = Kernel(
            self.spec, programs, known.tuned, known.refused, name, known.user, known.folder,
            known.spills,
        )  # fmt: skip
        like.model = known.model  # a dispatch table is found by the accepted kernel's name
        return _LOADED.setdefault(name, like)


def composed(
    text: str, inputs: Mapping[str, Value], a: str, *, judged: bool, kept: bool = True
) -> Composed:
    """The kernel of a step.

    Args:
        text: A module with one function.
        inputs: An example of each argument of it, in order.
        a: The argument that has the type that the spec leaves open.
        judged: Whether a new one is judged.
        kept: Whether it is kept in the user's cache.

    Raises:
        CodaError: no kernel computes it, or the judge refuses it.
    """
    dtypes = {name: _dtype(name, x, inputs[a]) for name, x in inputs.items()}
    # A kernel takes any number of rows, so what was composed for some is taken for others.
    lead = inputs[a].meta.shape[:-1]
    rows = {str(e): f"M{i}" for i, e in enumerate(lead) if not isinstance(e, int)}
    faces = [
        (name, [rows.get(str(e), plain(e)) for e in x.meta.shape], dtypes[name])
        for name, x in inputs.items()
    ]
    key = json.dumps([text, faces, fingerprint(*SOURCES)])
    path = user_cache() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    known = remembered(path)
    if "refused" in known:
        raise ProgramError(known["refused"])
    folder = known.get("folder")
    if folder is None or (folder and known["accepted"] != _evidence(Path(folder))):
        known = {}
    try:
        known = known or _composed(text, {n: (x.shape, dtypes[n]) for n, x in inputs.items()})
        spec = load_spec(Path(f"{known['name']}.md"), text=known["spec"])
        if known["accepted"] and not known["more"]:
            known["level"] = "accepted"
        elif judged and known["level"] != "verified" and known["level"] != _reachable():
            known["level"] = _judged(spec, known["text"])
    except CodaError as error:
        if kept and not isinstance(error, MachineError):
            remember(path, {"refused": error.message})
        raise
    if kept:
        remember(path, known)
    element = str(inputs[a].meta.dtype).removeprefix("torch.")
    if element not in (types := spec.types.get("T", (element,))):
        raise ProgramError(f"{a} is {element}, and what is beside it makes that {types[0]}")
    program = Program.from_dict(json.loads(known["program"]))
    about = known["level"], known["folder"], bool(known["more"])
    return Composed(spec, known["text"], program, *about)


def _composed(text: str, faces: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, str]:
    """What is kept of a step that the composer wrote.

    Raises:
        CodaError: as `composed`.
    """
    from coda_agent.agent.authors.composer import Composer
    from coda_agent.specs.draft import Example, draft

    source = extracted(text, "plan")
    examples = {name: Example(*face) for name, face in faces.items()}
    spec = load_spec(Path(f"{source.name}.md"), text=draft(source, examples, source.name))
    written = Composer().write(spec, lambda *_: None)
    program = read_programs(written)[spec.name]
    twin, more = _equal(program, spec), ""
    if twin is None and (twin := _equal(program, spec, more=True)):
        more = "yes"
    return {
        "name": source.name, "spec": spec.text, "text": written, "level": "",
        "program": json.dumps(program.to_dict()), "folder": str(twin.folder) if twin else "",
        "accepted": _evidence(twin.folder) if twin else "", "more": more,
    }  # fmt: skip


def _dtype(name: str, x: Value, a: Value) -> str:
    """An argument's element type as a spec has it.

    Raises:
        CodaError: no kernel reads it.
    """
    dtype = str(x.meta.dtype).removeprefix("torch.")
    if not x.shape and dtype != "float32":
        raise CodaError(f"{name} is one number of {dtype}, and a kernel reads float32")
    if x.meta.device != a.meta.device:
        raise CodaError(f"{name} is on {x.meta.device}, and {a.name} on {a.meta.device}")
    return "T" if x.meta.dtype == a.meta.dtype else dtype


def remembered(path: Path) -> dict[str, str]:
    """What was kept in a file; nothing where there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def remember(path: Path, known: Mapping[str, str]) -> None:
    """Keep it in a file for `remembered`."""
    if dict(known) != remembered(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(known))


@lru_cache(maxsize=1)
def _reachable() -> str:
    """The level that this machine can show without timing a kernel."""
    from coda_agent.agent import execution
    from coda_agent.agent.judge.machine import Gpu

    return "verified" if isinstance(execution.usable_gpu("auto"), Gpu) else "proved"


def _judged(spec: Spec, text: str) -> str:
    """
    Raises:
        ProgramError: the judge refuses it.
    """
    from coda_agent.agent import execution
    from coda_agent.agent.judge import judge_candidate

    verdict = judge_candidate(spec, text, execution.executor(), gates=_GATES)
    if not verdict.passed:
        findings = [f.message for gate in verdict.gates for f in gate.findings]
        raise ProgramError(f"the judge refuses it: {(findings or ['no reason'])[0]}")
    return str(verdict.level)


@lru_cache(maxsize=1)
def _accepted() -> dict[str, tuple[Entry, list[Program], Spec]]:
    """The accepted kernels of the package and of the workspace around the current folder."""
    from coda_agent.agent.workspace import find, packaged_kernels

    known = packaged_kernels()
    with contextlib.suppress(WorkspaceError, MachineError):  # there may be no workspace, nor git
        known |= {kernel.name: kernel for kernel in find().kernels()}
    return {
        name: (
            kernel,
            [*read_programs(kernel.program.read_text("utf-8")).values()],
            load_spec(kernel.spec),
        )
        for name, kernel in known.items()
        if kernel.level == "accepted"
    }


def _less(program: Program) -> Iterator[tuple[tuple[str, ...], Program]]:
    """A program without each choice of its outputs that leaves one which reads as much."""
    for count in range(1, len(program.outputs)):
        for left_out in itertools.combinations(program.outputs, count):
            with contextlib.suppress(ProgramError):
                yield left_out, program.without(left_out)


def _evidence(folder: Path) -> str:
    """A digest of an accepted kernel's program and of what is known of it; "" where there is none.

    What was kept of a step names the kernel that computes the same. Without a look at that program
    and at its level it would outlive both.
    """
    try:
        found = [(folder / x).read_bytes() for x in ("kernel.py", "spec.md", "evidence.json")]
    except OSError:
        return ""
    return hashlib.sha256(b"\0".join(found)).hexdigest()


def _equal(program: Program, spec: Spec, *, more: bool = False) -> Entry | None:
    """The accepted kernel that computes the same by one of its programs; or the same and `more`."""
    for kernel, programs, theirs in _accepted().values():
        known = (x for p in programs for x in (_less(p) if more else [((), p)]))
        for left_out, other in known:
            if _same(program, other) and _types(theirs, left_out) == _types(spec):
                return kernel
    return None


def _types(spec: Spec, left_out: Sequence[str] = ()) -> list[str]:
    outputs = [x for o, x in spec.outputs.items() if o not in left_out]
    return sorted(x.dtype for x in (*spec.inputs.values(), *outputs))


def _same(one: Program, other: Program) -> bool:
    """Whether two programs compute the same, in whatever order operands and outputs are named."""
    kinds: Callable[[Mapping[str, type]], list[str]] = lambda x: sorted(
        k.__name__ for k in x.values()
    )
    if any(kinds(getattr(one, x)) != kinds(getattr(other, x)) for x in ("operands", "outputs")):
        return False
    return any(
        replace(one, operands=operands, outputs=outputs).digest == other.digest
        for operands in _orders(one.operands, other.operands)
        for outputs in _orders(one.outputs, other.outputs)
    )


def _orders(own: Mapping[str, type], other: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Names in all orders in which their kinds stand as the other's do."""
    by_kind = {kind: [x for x, k in own.items() if k is kind] for kind in other.values()}
    for chosen in itertools.product(*(itertools.permutations(x) for x in by_kind.values())):
        names = {kind: iter(x) for kind, x in zip(by_kind, chosen, strict=True)}
        yield {next(names[kind]): kind for kind in other.values()}
