"""Arguments and options that commands share, and what they name: a file, a kernel, a spec."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coda_agent.agent.pipeline import Device
from coda_agent.agent.workspace import Run, Workspace, find, packaged_specs, resolve_spec
from coda_agent.primitives.errors import CodaError, MachineError, SpecError, WorkspaceError
from coda_agent.primitives.suggest import near_matches

if TYPE_CHECKING:
    from coda_agent.specs import Spec

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where the numerics run.")]
NoCommit = Annotated[bool, typer.Option("--no-commit", help="Judge, but store nothing.")]
SandboxOption = Annotated[
    Literal["bubblewrap", "landlock", "process"] | None,
    typer.Option("--sandbox", help="The weakest sandbox to compile in; else $CODA_AGENT_SANDBOX."),
]


def _exported(variable: str, value: str | bool | None) -> str | bool | None:
    """An option that the judge and its children read from the environment."""
    if value:
        os.environ[variable] = "1" if value is True else str(value)
    return value


ContendedOption = Annotated[
    bool,
    typer.Option(
        "--contended", callback=lambda value: _exported("CODA_AGENT_CONTENDED", value),
        help="Time on a GPU that others use, too.",
    ),
]  # fmt: skip
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        "--executor", callback=lambda value: _exported("CODA_AGENT_EXECUTOR", value),
        metavar="dask://HOST:PORT",
        help="Compile, check and time on a Dask cluster; else $CODA_AGENT_EXECUTOR, else here.",
    ),
]  # fmt: skip


def require_gpu(device: str) -> None:
    """Asked for CUDA without a GPU: said now, rather than after an author's work."""
    if device == "cuda" and not os.environ.get("CODA_AGENT_EXECUTOR"):
        from coda_agent.agent.doctor import gpus

        if not gpus():
            hint = "`coda-agent doctor` says what there is; --device cpu proves without one"
            raise MachineError("this machine has no NVIDIA GPU (nvidia-smi names none)", hint=hint)


def require_sandbox(tier: str | None) -> None:
    """Demand a sandbox for the rest of the command; said now where none is as strong.

    Raises:
        MachineError: no such sandbox works here.
    """
    from coda_agent.agent import sandbox

    if tier is not None:
        os.environ[sandbox.VARIABLE] = tier
    if sandbox.VARIABLE in os.environ:
        sandbox.choose()


def here() -> Workspace | None:
    """The workspace around the current folder, for commands that can do without one."""
    try:
        return find()
    except WorkspaceError:
        return None


def new_run(kind: str, spec: str) -> Run:
    """A run of the workspace; a temporary folder where there is none."""
    if workspace := here():
        return workspace.new_run(kind, spec)
    return Run(f"{kind}-{spec}", Path(tempfile.mkdtemp(prefix=f"coda-agent-{kind}-")))


def program(arg: str, spec: str | None = None) -> tuple[str, "Spec"]:
    """The text and the spec of a FILE or KERNEL.

    Raises:
        WorkspaceError: there is no such thing, or no spec for it.
    """
    from coda_agent.specs import load_spec

    path = _program_file(arg)
    return _read(path), load_spec(_spec_of(path, spec))


def explainable(arg: str) -> tuple[str | None, "Spec | None"]:
    """The text and the spec of a FILE or KERNEL, without a spec where there is none; or a SPEC
    alone, without a text.

    A kernel goes before a spec of its name: it is what runs. The spec's path asks for the spec.
    """
    from coda_agent.specs import load_spec

    workspace = here()
    kernels = [kernel.name for kernel in workspace.kernels()] if workspace else []
    if arg.endswith(".py") or arg in kernels:
        path = _program_file(arg)
        try:
            return _read(path), load_spec(_spec_of(path, None))
        except (WorkspaceError, SpecError):
            return _read(path), None
    specs = workspace.spec_names() if workspace else packaged_specs()
    if not arg.endswith(".md") and "/" not in arg and arg not in specs:
        hint = near_matches(arg, [*kernels, *specs])
        raise WorkspaceError(f"no kernel, spec or file named {arg!r}", hint=hint)
    return None, load_spec(resolve_spec(arg, workspace))


def _program_file(arg: str) -> Path:
    path = Path(arg)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise WorkspaceError(f"no file at {path}")
        return path.resolve()
    return find().kernel(arg).program


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CodaError(f"{path} cannot be read as text: {error}") from error


def _spec_of(path: Path, spec: str | None) -> Path:
    """The spec given, else spec.md beside the program, else one by the program's own name."""
    from coda_agent.agent.judge.static import program_names

    workspace = here()
    if spec is not None:
        return resolve_spec(spec, workspace)
    if (beside := path.with_name("spec.md")).is_file():
        return beside
    known = workspace.spec_names() if workspace else packaged_specs()
    # A spec with parameters has a program for each choice, named <spec>__<value>.
    names = sorted({name.partition("__")[0] for name in program_names(_read(path))})
    if len(found := [name for name in names if name in known]) == 1:
        return known[found[0]].resolve()
    what = " or ".join(names) or "no program"
    raise WorkspaceError(f"no spec for {path} (it defines {what})", hint="name it with --spec")
