"""The workspace: a git repository, or a folder of one.

- Everything a command knows by name (a spec, a kernel) is looked up here, so that an unknown name
  always gets the same answer: what exists, and what was probably meant.
- Git is always asked, never guessed at: `.git` may be a file (worktree, submodule), and the
  repository may lie above the workspace.
"""

import contextlib
import importlib.util
import re
import secrets
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from coda_agent.agent.evidence import Evidence
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import MachineError, WorkspaceError
from coda_agent.primitives.objects import reason, text_of
from coda_agent.primitives.suggest import near_matches
from coda_agent.runtime.tuning import read_tuned

INIT_HINT = "`coda-agent init` makes one"
ROOMS = ("specs", "generated", "logs")

_IGNORED = ("logs/runs/",)
_README = Path(__file__).with_name("new_workspace.md")


class GitError(WorkspaceError):
    """Git refused a command; `stderr` is all it said."""

    def __init__(self, message: str, *, stderr: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stderr = stderr


def run_git(folder: Path, *args: str, lock: int | None = None) -> bytes:
    """Run a git command in `folder`, through GitPython, hooks off; its stdout.

    The descriptor `lock` is kept open as long as git works, whatever becomes of this process.

    Raises:
        GitError: git exited with anything but 0.
        MachineError: there is no git executable.
    """
    no_git = MachineError("git was not found", hint="install git and put it on PATH")
    try:
        from git.cmd import Git
        from git.exc import GitCommandNotFound
    except ImportError as error:  # GitPython looks for the executable when it is imported
        raise no_git from error
    # Paths are names, not patterns, and to look takes no lock. reference-transaction and
    # post-index-change hooks run even under plumbing commands.
    settings = ("-c", "core.hooksPath=/dev/null", "-c", "maintenance.auto=false")
    command = ["git", "--literal-pathspecs", "--no-optional-locks", *settings, *args]
    try:
        status, stdout, stderr = Git(folder).execute(
            command, with_extended_output=True, with_exceptions=False,
            stdout_as_string=False, strip_newline_in_stdout=False,
            pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
    except GitCommandNotFound as error:  # it was there at the import
        raise no_git from error
    if status != 0:
        said = stderr if isinstance(stderr, str) else bytes(stderr).decode(errors="replace")
        if path := re.search(r"Unable to create '(.+\.lock)': File exists", said):
            raise lock_error(folder / path[1], said)
        lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no reason"]
        # After the reason git says at length what one could do.
        reason = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1])
        raise GitError(f"git {args[0]} failed: {reason}", stderr=said)
    return bytes(stdout)


def lock_error(lock: Path, said: str = "") -> GitError:
    """Make the error of a git lock that stands in the way."""
    message = f"{lock} is in git's way: a git command runs here, or one was killed and left it"
    hint = f"where none runs, nor an editor of one: rm {shlex.quote(str(lock))}"
    return GitError(message, stderr=said, hint=hint)


def packaged_specs() -> dict[str, Path]:
    """List the specs that come with the package, by name."""
    folders = _folders("coda_agent.specs")
    return {n: path for folder in folders for n, path in _specs_in(folder).items()}


def packaged_kernels() -> "dict[str, Kernel]":
    """List the accepted kernels that come with the package, by name."""
    folders = _folders("coda_agent.generated")
    return {k.name: k for folder in folders for k in _kernels_in(folder)}


def spec_names(workspace: "Workspace | None") -> dict[str, Path]:
    """List specs by name, the workspace's own first."""
    return packaged_specs() | (_specs_in(workspace.specs) if workspace else {})


def kernel_names(workspace: "Workspace | None") -> "dict[str, Kernel]":
    """List accepted kernels by name, the workspace's own first."""
    return packaged_kernels() | {k.name: k for k in (workspace.kernels() if workspace else [])}


def resolve_kernel(name: str, workspace: "Workspace | None") -> "Kernel":
    """Find a kernel to read: the workspace's, else the package's.

    Raises:
        WorkspaceError: there is none.
    """
    names = kernel_names(workspace)
    if name not in names:
        where = f" in {workspace.generated} or" if workspace else ""
        message = f"no kernel named {name!r}{where} among the packaged kernels"
        ready = name in spec_names(workspace) and f"it has a spec: coda-agent generate {name}"
        raise WorkspaceError(message, hint=ready or near_matches(name, names))
    return names[name]


def _folders(package: str) -> list[Path]:
    # Found, not imported: listing names has no use for what a package imports.
    found = importlib.util.find_spec(package)
    return [Path(folder) for folder in (found and found.submodule_search_locations) or []]


def _specs_in(folder: Path) -> dict[str, Path]:
    return {p.stem: p for p in sorted(folder.rglob("*.md")) if p.stem.lower() != "readme"}


@dataclass(frozen=True)
class Kernel:
    """One accepted kernel: generated/<name>/."""

    name: str
    folder: Path

    @property
    def program(self) -> Path:
        return self.folder / "kernel.py"

    @property
    def text(self) -> str:
        """The program's text.

        Raises:
            WorkspaceError: the file is missing or is no text.
        """
        return text_of(self.program, kind=WorkspaceError)

    @property
    def spec(self) -> Path:
        return self.folder / "spec.md"

    @cached_property
    def evidence(self) -> Evidence:
        """What it stands on.

        Raises:
            WorkspaceError: the file is missing, damaged or of an earlier form.
        """
        path = self.folder / "evidence.json"
        try:
            return Evidence.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            hint = f"git checkout -- {path} restores what was accepted; what an earlier "
            hint += "coda-agent accepted, generate makes again"
            raise WorkspaceError(
                f"{path} is not readable evidence: {reason(error)}", hint=hint
            ) from error

    @property
    def tuned(self) -> JsonObject:
        """GPU name to dtype to measured shapes; empty where there is none.

        Raises:
            WorkspaceError: the file is damaged.
        """
        return read_tuned(self.folder / "tuned.json")

    @property
    def stale(self) -> list[str]:
        """The gates whose word no longer stands; none of unreadable evidence."""
        with contextlib.suppress(WorkspaceError):
            return self.evidence.stale
        return []

    @property
    def level(self) -> str:
        """proved, verified, accepted or revoked; damaged where the evidence cannot be read."""
        with contextlib.suppress(WorkspaceError):
            return self.evidence.level
        return "damaged"


@dataclass(frozen=True)
class Run:
    """One run's folder, logs/runs/<id>/."""

    id: str
    folder: Path


@dataclass(frozen=True)
class Workspace:
    """A workspace at `root`, in the git working tree at `top`."""

    root: Path
    top: Path

    @property
    def specs(self) -> Path:
        return self.root / "specs"

    @property
    def generated(self) -> Path:
        return self.root / "generated"

    def git(self, *args: str, lock: int | None = None) -> str:
        """Run a git command at the top, as `run_git`; stdout as text."""
        return run_git(self.top, *args, lock=lock).decode("utf-8", "surrogateescape").strip()

    @cached_property
    def git_folder(self) -> Path:
        """Where git keeps this working tree's index and HEAD."""
        return Path(self.git("rev-parse", "--absolute-git-dir"))

    def differing_spec(self, name: str, text: str) -> Path | None:
        """Find the file of the spec `name`, where its text is another.

        The file is that of specs/, or else the package's; None where it holds the same, or there is
        none.
        """
        path = spec_names(self).get(name)
        return path if path and path.read_text("utf-8-sig", "replace") != text else None

    def kernels(self) -> list[Kernel]:
        """List the accepted kernels, the folders with an evidence.json, by name."""
        return _kernels_in(self.generated)

    def owns(self, kernel: Kernel) -> bool:
        """Tell whether a kernel is the workspace's, and not the package's."""
        return kernel.folder.parent == self.generated

    def kernel(self, name: str) -> Kernel:
        """Find the workspace's own kernel, for whoever writes to its folder.

        Raises:
            WorkspaceError: there is none.
        """
        known = {kernel.name: kernel for kernel in self.kernels()}
        if name not in known:
            hint = near_matches(name, known) or "nothing is accepted yet: coda-agent generate SPEC"
            raise WorkspaceError(f"no kernel named {name!r} in {self.generated}", hint=hint)
        return known[name]

    def new_run(self, kind: str, spec: str) -> Run:
        """Make logs/runs/<UTC time>-<kind>-<spec>-<4 hex>/."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        runs = self.root / "logs" / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            run_id = f"{stamp}-{kind}-{spec}-{secrets.token_hex(2)}"
            folder = runs / run_id
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return Run(run_id, folder)


def _kernels_in(folder: Path) -> list[Kernel]:
    found = sorted(folder.glob("*/evidence.json"))
    return [Kernel(p.parent.name, p.parent) for p in found if p.parent.name[0] != "."]


def resolve_spec(arg: str, workspace: Workspace | None) -> Path:
    """Find a spec by path or name, in the workspace or among the packaged.

    Raises:
        WorkspaceError: there is no such file, or no spec of that name.
    """
    path = Path(arg)
    if path.suffix == ".md" or "/" in arg:
        if not path.is_file():
            raise WorkspaceError(f"no spec file at {path}")
        return path.resolve()
    known = spec_names(workspace)
    if arg not in known:
        where = f" in {workspace.specs} or" if workspace else ""
        message = f"no spec named {arg!r}{where} among the packaged specs"
        draft = f"draft one first: coda-agent spec {arg}" + ":FUNCTION" * (":" not in arg)
        raise WorkspaceError(message, hint=draft if ".py" in arg else near_matches(arg, known))
    return known[arg].resolve()


def find(start: Path | None = None) -> Workspace:
    """Find the workspace at or above `start` (default: the current folder).

    Raises:
        WorkspaceError: no git repository there, or none of its folders on the way up has the
            three rooms.
    """
    start = (start or Path.cwd()).resolve()
    top = _top(start)
    for folder in (start, *start.parents):
        if folder.is_relative_to(top) and all((folder / room).is_dir() for room in ROOMS):
            return Workspace(folder, top)
    missing = ", ".join(f"{room}/" for room in ROOMS if not (top / room).is_dir())
    raise WorkspaceError(f"{top} is not a workspace: it has no {missing}", hint=INIT_HINT)


def here() -> Workspace | None:
    """Find the workspace around the current folder, if there is one."""
    try:
        return find()
    except (WorkspaceError, MachineError):  # there may be no git either
        return None


def _top(folder: Path) -> Path:
    """Find the top of the working tree `folder` lies in."""
    try:
        said = run_git(folder, "rev-parse", "--show-toplevel")
    except GitError as error:
        if "not a git repository" in error.stderr:
            message = f"no git repository at or above {folder}"
            raise WorkspaceError(message, hint=INIT_HINT) from error
        raise
    # Path of bytes, not text: a folder's name need not be UTF-8.
    return Path(said.removesuffix(b"\n").decode("utf-8", "surrogateescape")).resolve()


def init(path: Path) -> tuple[Workspace, list[str]]:
    """Make a workspace at `path`, beside what exists; nothing is committed.

    Returns:
        The workspace, and what was made or extended, as paths relative to it.
    """
    if path.exists() and not path.is_dir():
        raise WorkspaceError(f"{path} is a file, a workspace is a folder")
    path.mkdir(parents=True, exist_ok=True)
    root = path.resolve()
    made: list[str] = []
    try:
        top = _top(root)
    except WorkspaceError as error:
        if error.hint != INIT_HINT:
            raise
        run_git(root, "init", "--quiet")
        made.append(".git")
        top = _top(root)
    for room in ROOMS:
        (root / room).mkdir(exist_ok=True)
        if not any((root / room).iterdir()):
            (root / room / ".gitkeep").touch()
            made.append(f"{room}/.gitkeep")
    ignore = root / ".gitignore"
    text = text_of(ignore) if ignore.exists() else ""
    if missing := [line for line in _IGNORED if line not in text.splitlines()]:
        start = text if not text or text.endswith("\n") else f"{text}\n"
        ignore.write_text(start + "\n".join(missing) + "\n", "utf-8")
        made.append(".gitignore")
    if not any(root.glob("README*")):
        (root / "README.md").write_bytes(_README.read_bytes())
        made.append("README.md")
    return Workspace(root, top), made


def commit_made(workspace: Workspace, made: list[str]) -> str:
    """Commit what `init` made, beside whatever is staged; what is left.

    A file that git knew before may hold the user's own changes too, so it is left to him.
    """
    files = [name for name in made if name != ".git"]
    todo = f"git add {' '.join(files)} && git commit"
    if not files or run_git(workspace.root, "ls-files", "--", *files):
        return f"not committed: {todo}" if files else ""
    try:
        run_git(workspace.root, "add", "--", *files)
        run_git(workspace.root, "commit", "--quiet", "-m", "A coda-agent workspace", "--", *files)
    except GitError as error:
        return f"not committed ({error.message}): {todo}"
    return ""
