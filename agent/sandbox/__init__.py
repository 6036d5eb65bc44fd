"""Where a candidate is traced and compiled: the tiers of sandbox, and which of them work here.

- `bubblewrap`: namespaces of its own, and seccomp on top. A child has no network and sees no other
  process. Everything is read-only, and of the home and /tmp it sees only what Python needs.
- `landlock`: Landlock and seccomp. A child reads the same, but sees nothing of /proc. It writes the
  object cache and a folder of its own, and opens no socket.
- `process`: a child can read and write what the user can.

In each tier the environment is scrubbed, resources are limited and the tree dies with the child
(`execution/child.py`). A candidate's own Python is locked down further, as far as the kernel can
(`launcher.lock_down`). A tier counts as working where a process in it was refused what it must be
refused.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from coda_agent.agent.sandbox import launcher
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.objects import cache_directory, writable_cache

TIERS = ("bubblewrap", "landlock", "process")
VARIABLE = "CODA_AGENT_SANDBOX"
_DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
_ROOT = Path(__file__).resolve().parents[2]  # of the rooms: a repository, or coda_agent/ installed


@dataclass(frozen=True)
class Sandbox:
    """A tier that works here, and why each stronger one does not."""

    tier: str
    missing: dict[str, str]

    def wrap(self, command: list[str]) -> list[str]:
        """The command that runs `command` in the sandbox."""
        return _wrapped(self.tier, command)


def choose() -> Sandbox:
    """The strongest tier that works here.

    Raises:
        CodaError: $CODA_AGENT_SANDBOX names no tier.
        MachineError: it demands a stronger tier than works here, or no cache can be written.
    """
    writable_cache()
    demanded = os.environ.get(VARIABLE) or "process"
    if demanded not in TIERS:
        raise CodaError(f"no sandbox {demanded!r}", hint=f"one of {', '.join(TIERS)}")
    missing: dict[str, str] = {}
    for tier in TIERS:
        if (reason := unavailable(tier)) is None:
            return Sandbox(tier, missing)
        missing[tier] = reason
        if tier == demanded:
            break
    raise MachineError(
        f"the sandbox must be {demanded} or stronger, and none of those works here",
        hint=reasons(missing),
    )


def reasons(missing: Mapping[str, str]) -> str:
    """Why tiers do not work here, in one line."""
    return "; ".join(f"{tier}: {reason}" for tier, reason in missing.items())


@lru_cache
def unavailable(tier: str) -> str | None:
    """Why a tier does not work here, found by starting a process in it; None where it does."""
    if tier == "process":
        return None
    with tempfile.NamedTemporaryFile(prefix="coda-agent-") as secret:
        paths = [str(_ROOT), secret.name, str(cache_directory()), f"/proc/{os.getpid()}/fd"]
        environment = {"TMPDIR": str(cache_directory()), "LANG": "C"}
        try:
            command = _wrapped(tier, [sys.executable, "-I", "-S", "-c", _PROBE, *paths])
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=20, env=environment, cwd="/"
            )
        except (OSError, subprocess.TimeoutExpired, CodaError) as error:
            return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return done.stdout.strip() or None


# What it prints is what should have been refused; what it cannot do and should ends it.
_PROBE = """
import os, sys, _socket
root, secret, cache, open_files = sys.argv[1:]
own = os.path.join(cache, f"probe-{os.getpid()}")
open(own, "x").close()
os.unlink(own)
os.path.getsize(root)
def attempt(name, action):
    try: action()
    except OSError: return
    print("it does not stop", name, end=" ")
def write():
    path = os.path.join(root, f"probe-{os.getpid()}")
    open(path, "x").close()
    os.unlink(path)
attempt("writes", write)
attempt("reading files of others", lambda: open(secret).close())
attempt("a look at other processes", lambda: os.listdir(open_files))
attempt("sockets", lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM).close())
"""


def _wrapped(tier: str, command: list[str]) -> list[str]:
    cache = writable_cache()
    if tier == "process":
        return command
    hidden = [p for p in _private_folders() if p != cache]
    git = [p for p in hidden if p.name == ".git"]
    if tier == "landlock":
        # Of /proc not even the process's own folder: a rule for it holds until the kernel drops its
        # caches (measured), and a fork has another. Compiled objects are the same without. But at
        # its first cast to float16 torch reads what the processor is, or refuses all such casts.
        shown = [*_visible(Path("/"), [*hidden, Path("/dev"), Path("/proc")])]
        for path in _needed(hidden):
            shown += _visible(path, git)
        read = [*map(str, shown), *_DEVICES, "/proc/cpuinfo"]
        return launcher.confined(command, {"read": read, "write": [str(cache), *_DEVICES[:3]]})
    if (program := shutil.which("bwrap")) is None:
        raise MachineError("bwrap was not found", hint="the package bubblewrap has it")
    mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for folder in hidden:
        if folder not in git:
            mounts += ["--tmpfs", str(folder)]
    for path in _needed(hidden):
        mounts += ["--ro-bind", str(path), str(path)]
    for path in git:
        mounts += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
    mounts += ["--bind", str(cache), str(cache), "--setenv", "TMPDIR", "/tmp"]
    return [
        program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
        *mounts, "--chdir", "/", "--", *launcher.confined(command, {}),
    ]  # fmt: skip


def _private_folders() -> list[Path]:
    """What a child has no business with, outer folders first."""
    names = ["/tmp", "/var/tmp", "/run", "/home", "/root", tempfile.gettempdir()]
    names.append(os.path.expanduser("~"))  # `Path.home()` raises where a user has none
    found = {Path(name).resolve() for name in (*names, _ROOT / ".git")}
    return sorted(p for p in found if p.exists() and p != Path("/"))


def _needed(hidden: list[Path]) -> list[Path]:
    """Of Python, its packages and this one, what lies in a hidden folder and must be seen."""
    names: Iterable[str | Path] = (
        sys.prefix, sys.base_prefix, *sys.path, _ROOT, os.environ.get("CUDA_HOME", "/"),
        *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep),
    )  # fmt: skip
    paths = {Path(name).resolve() for name in names if name and Path(name).exists()}
    folders = [h for h in hidden if h.name != ".git"]
    inside = (p for p in paths if any(h in p.parents for h in folders))
    # A path entry that is the home itself would show all of it.
    return sorted(p for p in inside if not any(h == p or p in h.parents for h in folders))


def _visible(path: Path, hidden: list[Path]) -> Iterator[Path]:
    """`path`, or what is in it, without what is hidden, in as few paths as possible."""
    real = path.resolve()
    if any(h == real or h in real.parents for h in hidden):
        return
    if any(path in h.parents for h in hidden) and not path.is_symlink():
        for inner in sorted(path.iterdir()):
            yield from _visible(inner, hidden)
    else:
        yield path
