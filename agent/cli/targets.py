"""Arguments and options that commands share, and what they name: a file, a kernel, a spec."""

import functools
import inspect
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coda_agent.agent import pipeline, sandbox
from coda_agent.agent.cli.report import Progress, Reply
from coda_agent.agent.pipeline import Device
from coda_agent.agent.workspace import Run, Workspace, find, packaged_specs, resolve_spec
from coda_agent.primitives.errors import CodaError, MachineError, SpecError, WorkspaceError
from coda_agent.primitives.suggest import near_matches

if TYPE_CHECKING:
    from coda_agent.specs import Spec

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where the numerics run.")]
NoCommit = Annotated[bool, typer.Option("--no-commit", help="Judge, but store nothing.")]
All = Annotated[bool, typer.Option("--all", help="Every kernel of the workspace.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help='Name, part of one, folder or "last".')]
Kernels = Annotated[list[str] | None, typer.Argument(metavar="[KERNEL]...")]


@dataclass(frozen=True)
class Shared:
    """An option that holds for all that a command calls, and that it does not take itself.

    Attributes:
        name: Of the parameter.
        annotation: With its `typer.Option`.
        default: Where it is not given.
        apply: Told the value before the command begins.
    """

    name: str
    annotation: Any
    default: Any
    apply: Callable[[Any], None]


def sharing(*options: Shared) -> Callable[[Callable[..., Reply]], Callable[..., Reply]]:
    """Adds options to a command, before its --json."""

    def decorate(command: Callable[..., Reply]) -> Callable[..., Reply]:
        @functools.wraps(command)
        def run(**given: Any) -> Reply:
            for option in options:
                option.apply(given.pop(option.name, option.default))
            return command(**given)

        signature = inspect.signature(command)
        added = [
            inspect.Parameter(o.name, _KEYWORD, default=o.default, annotation=o.annotation)
            for o in options
        ]
        own = list(signature.parameters.values())
        last = len(own) - (own[-1].name == "as_json")
        parameters = [*own[:last], *added, *own[last:]]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _exports(variable: str) -> Callable[[str | bool | None], None]:
    """What the judge and its children read from the environment."""

    def apply(value: str | bool | None) -> None:
        if value:
            os.environ[variable] = "1" if value is True else str(value)

    return apply


def require_sandbox(tier: str | None) -> None:
    """Demand a sandbox for the rest of the command; said now where none is as strong.

    Raises:
        MachineError: no such sandbox works here.
    """
    if tier is not None:
        os.environ[sandbox.VARIABLE] = tier
    if sandbox.VARIABLE in os.environ:
        sandbox.choose()


SANDBOX = Shared(
    "sandbox",
    Annotated[
        Literal["bubblewrap", "landlock", "process"] | None,
        typer.Option(help="The weakest sandbox to compile in; else $CODA_AGENT_SANDBOX."),
    ],
    None,
    require_sandbox,
)
CONTENDED = Shared(
    "contended",
    Annotated[
        bool, typer.Option("--contended", help="Time on a GPU that others use, too."),
    ],
    False,
    _exports("CODA_AGENT_CONTENDED"),
)  # fmt: skip
EXECUTOR = Shared(
    "executor",
    Annotated[
        str | None,
        typer.Option(
            metavar="dask://HOST:PORT",
            help="Compile, check and time on a Dask cluster; else $CODA_AGENT_EXECUTOR, else here.",
        ),
    ],
    None,
    _exports("CODA_AGENT_EXECUTOR"),
)


def require_gpu(device: str) -> None:
    """Asked for CUDA without a GPU: said now, rather than after an author's work."""
    if device == "cuda" and not os.environ.get("CODA_AGENT_EXECUTOR"):
        from coda_agent.agent.doctor import gpus

        if not gpus():
            hint = "`coda-agent doctor` says what there is; --device cpu proves without one"
            raise MachineError("this machine has no NVIDIA GPU (nvidia-smi names none)", hint=hint)


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


def judged(
    kind: str,
    target: str,
    spec: str | None = None,
    *,
    device: Device = "cuda",
    gates: tuple[str, ...] | None = None,
    silent: bool,
) -> pipeline.Outcome:
    """What the judge says of a FILE or KERNEL, in a run of its own."""
    text, found = program(target, spec)
    run = new_run(kind, found.name)
    with Progress(silent=silent) as observer:
        return pipeline.judge_only(run, kind, found, text, observer, device=device, gates=gates)


def named(kernels: list[str] | None, every: bool) -> list[str]:
    """The kernels asked for; each is looked up before the first is judged."""
    workspace = find()
    if every == bool(kernels):
        raise CodaError("name kernels, or give --all", hint="coda-agent list")
    known = [kernel.name for kernel in workspace.kernels()]
    return [workspace.kernel(name).name for name in kernels or known]
