"""Bubblewrap around a child that runs what is not ours: a user's reference, a compiled kernel.

It has no network, sees no other process, reads what the user may read, and writes its scratch
folder and the caches that it is given.
"""

import shutil
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def missing() -> str:
    """Say why no child can be confined on this machine; empty where one can."""
    if shutil.which("bwrap") is None:
        return "bwrap was not found; the package bubblewrap has it"
    done = subprocess.run(_wrapped(["/bin/true"], []), capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or ["bwrap failed"])[-1] if done.returncode else ""


def confined(command: list[str], writable: Iterable[Path]) -> list[str]:
    """Wrap a command in bubblewrap, with some folders to write; as it is where that is missing."""
    return command if missing() else _wrapped(command, writable)


def _wrapped(command: list[str], writable: Iterable[Path]) -> list[str]:
    binds = [part for path in writable for part in ("--bind", str(path), str(path))]
    for node in sorted(Path("/dev").glob("nvidia*")):
        binds += ["--dev-bind", str(node), str(node)]
    return [
        "bwrap", "--unshare-all", "--cap-drop", "ALL", "--ro-bind", "/", "/",
        "--dev", "/dev", "--proc", "/proc", *binds, "--", *command,
    ]  # fmt: skip
