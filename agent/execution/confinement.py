"""Bubblewrap around a child that runs a user's reference.

It has no network, sees no other process, reads what the user may read, and writes its scratch
folder.
"""

import shutil
import subprocess
from functools import lru_cache


@lru_cache(maxsize=1)
def missing() -> str:
    """Say why no child can be confined here; empty where one can."""
    if shutil.which("bwrap") is None:
        return "bwrap was not found; the package bubblewrap has it"
    done = subprocess.run(_wrapped(["/bin/true"]), capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or ["bwrap failed"])[-1] if done.returncode else ""


def confined(command: list[str], scratch: str) -> list[str]:
    """Wrap a command in bubblewrap, if there, with a scratch folder."""
    return command if missing() else _wrapped(command, "--bind", scratch, scratch)


def _wrapped(command: list[str], *binds: str) -> list[str]:
    return [
        "bwrap", "--unshare-all", "--cap-drop", "ALL", "--ro-bind", "/", "/",
        "--dev", "/dev", "--proc", "/proc", *binds, "--", *command,
    ]  # fmt: skip
