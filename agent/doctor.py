"""What this machine has, and what each thing it has makes possible."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coda_agent.agent.events import has_secrets
from coda_agent.primitives.errors import CodaError

_PACKAGES = (
    ("torch", "torch", "the reference and the interpreter: `proved`"),
    ("nvidia-cutlass-dsl", "cutlass", "compiling: `proved`"),
    ("quack-kernels", "quack", "the GEMM mainloop: `proved`"),
    ("triton", "triton", "torch.compile as a baseline on a GPU"),
)
_NEEDED = ("python", "torch", "nvidia-cutlass-dsl", "quack-kernels")
"""Without these no kernel can be shown to be anything."""


@dataclass(frozen=True)
class Item:
    """One thing looked for; `value` is None where it is missing, `enables` what it is good for."""

    name: str
    value: str | None
    enables: str
    hint: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it; `arch` as compilers spell it: sm_90."""

    name: str
    arch: str
    driver: str


def gpus() -> list[Gpu]:
    """The GPUs of this machine, without importing torch; none where nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
    return [Gpu(r[0], "sm_" + r[1].replace(".", ""), r[2]) for r in rows if len(r) == 3]


def package_version(distribution: str, module: str) -> str | None:
    """A package's version; None where it is missing or cannot be imported for it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:  # a source tree on the path has no metadata
        if importlib.util.find_spec(module) is None:
            return None
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))
    except ImportError:
        return None


_SANDBOXES = {
    "bubblewrap": "compiling candidates without network, home or other processes",
    "landlock": "compiling candidates without network, and with nothing to write but the cache",
}


def diagnose(start: Path) -> tuple[list[Item], str | None]:
    """Looks at the machine and at the repository `start` lies in.

    Returns:
        The findings, and the highest level a kernel can reach here (None: not even `proved`).
    """
    items = [*_python(), *_gpu(), *_tools(), *_sandboxes(), *_git(start)]
    found = {item.name: item.value for item in items}
    if not all(found[name] for name in _NEEDED):
        return items, None
    return items, "accepted" if found["gpu"] and found["torch with CUDA"] else "proved"


def _python() -> Iterator[Item]:
    version = platform.python_version() if sys.version_info >= (3, 11) else None
    yield Item("python", version, "everything", "3.11 or later is needed")
    for distribution, module, enables in _PACKAGES:
        version = package_version(distribution, module)
        yield Item(distribution, version, enables, f"pip install {distribution}")


def _gpu() -> Iterator[Item]:
    found = gpus()
    value = "; ".join(f"{gpu.name} ({gpu.arch}, driver {gpu.driver})" for gpu in found)
    hint = "nvidia-smi names none; kernels stay `proved` here"
    yield Item("gpu", value or None, "`verified` and `accepted`", hint)
    cuda: str | None = None
    if found and package_version("torch", "torch"):
        import torch  # only here: it takes seconds, and without a GPU the answer is known

        cuda = str(torch.version.cuda) if torch.cuda.is_available() else None
    hint = "needs a GPU and a torch built for it"
    yield Item("torch with CUDA", cuda, "running kernels", hint)


def _tools() -> Iterator[Item]:
    for tool in ("cuobjdump", "nvdisasm"):
        path = shutil.which(tool) or _beside(tool)
        hint = "part of the CUDA toolkit, and of triton's Linux wheels"
        yield Item(tool, path, "`explain --stage sass`", hint)
    key = "set" if has_secrets() else None
    hint = "not needed by the composer"
    yield Item("ANTHROPIC_API_KEY", key, "the author `claude`", hint)


def _sandboxes() -> Iterator[Item]:
    from coda_agent.agent.sandbox import unavailable

    for tier, enables in _SANDBOXES.items():
        reason = unavailable(tier)
        yield Item(f"sandbox {tier}", None if reason else "works", enables, reason or "")


def _beside(tool: str) -> str | None:
    """The tool in the CUDA toolkit, or as triton ships it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    folders = [Path(home) / "bin"]
    if triton := importlib.util.find_spec("triton"):
        for package in triton.submodule_search_locations or []:
            folders.append(Path(package) / "backends" / "nvidia" / "bin")
    return next((str(folder / tool) for folder in folders if (folder / tool).is_file()), None)


def _git(start: Path) -> Iterator[Item]:
    from coda_agent.agent import accept, workspace

    root: str | None = None
    hint, identity, identity_hint = "", None, ""
    try:
        found = workspace.find(start)
        root = str(found.root)
        accept.check_identity(found)
        identity = found.git("var", "GIT_COMMITTER_IDENT").rpartition(">")[0] + ">"
    except CodaError as error:
        hint = str(error) if root is None else ""
        identity_hint = error.hint if root is not None else "looked for in a workspace only"
    yield Item("workspace", root, "generate, verify, list, show", hint)
    yield Item("git identity", identity, "committing what is accepted", identity_hint)
