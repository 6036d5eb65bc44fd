"""What arguments that commands share name: a file, a kernel, a spec."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from coda_agent.agent.workspace import (
    Kernel,
    Run,
    find,
    here,
    kernel_names,
    resolve_kernel,
    resolve_spec,
    spec_names,
)
from coda_agent.primitives.errors import CodaError, SpecError, WorkspaceError
from coda_agent.primitives.objects import text_of
from coda_agent.primitives.suggest import near_matches
from coda_agent.primitives.syntax import program_names
from coda_agent.specs import Spec, load_spec


def accepted(name: str) -> Kernel:
    """Find a kernel as `resolve_kernel`, in the workspace around this folder."""
    return resolve_kernel(name, here())


def new_run(kind: str, spec: str) -> Run:
    """Make a run of the workspace, or else in a temporary folder."""
    if workspace := here():
        return workspace.new_run(kind, spec)
    return Run(f"{kind}-{spec}", Path(tempfile.mkdtemp(prefix=f"coda-agent-{kind}-")))


def program(arg: str, spec: str | None = None) -> tuple[str, Spec]:
    """Read the text and the spec of a FILE or KERNEL.

    Raises:
        WorkspaceError: there is no such thing, or no spec for it.
    """
    path = _program_file(arg)
    return text_of(path), load_spec(_spec_of(path, spec))


def explainable(arg: str) -> tuple[str | None, Spec | None]:
    """Read the text and the spec of a FILE, KERNEL or SPEC.

    A kernel goes before a spec of its name: it is what runs. But a spec that a workspace changed
    goes before the package's kernel, and the spec's path asks for the spec.
    """
    workspace = here()
    kernels = kernel_names(workspace)
    if workspace and (kernel := kernels.get(arg)) and not workspace.owns(kernel):
        if workspace.differing_spec(arg, text_of(kernel.spec)):
            del kernels[arg]
    if arg.endswith(".py") or arg in kernels:
        path = _program_file(arg)
        try:
            return text_of(path), load_spec(_spec_of(path, None))
        except (WorkspaceError, SpecError):
            return text_of(path), None
    specs = spec_names(workspace)
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
    return accepted(arg).program


def _spec_of(path: Path, spec: str | None) -> Path:
    """Find a program's spec: as given, beside it, or by its name."""
    workspace = here()
    if spec is not None:
        return resolve_spec(spec, workspace)
    if (beside := path.with_name("spec.md")).is_file():
        return beside
    known = spec_names(workspace)
    # A spec with parameters has a program for each choice, named <spec>__<value>.
    names = sorted({name.partition("__")[0] for name in program_names(text_of(path))})
    if len(found := [name for name in names if name in known]) == 1:
        return known[found[0]].resolve()
    what = " or ".join(names) or "no program"
    raise WorkspaceError(f"no spec for {path} (it defines {what})", hint="name it with --spec")


def named(
    kernels: list[str] | None, every: bool, look: Callable[[str], Kernel] = accepted
) -> list[Kernel]:
    """Find the kernels asked for, all before the first is judged."""
    workspace = find()
    if every == bool(kernels):
        raise CodaError("name kernels, or give --all", hint="coda-agent show lists them")
    return [look(name) for name in kernels] if kernels else workspace.kernels()
