"""What this machine has, and what each thing it has makes possible."""

import hashlib
import importlib.metadata
import importlib.util
import platform
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from coda_agent.agent import authors, publish, workspace
from coda_agent.agent.execution.confinement import missing
from coda_agent.agent.judge.machine import Gpu, smi
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.objects import writable_cache
from coda_agent.runtime.target import find_tool

_PACKAGES = (
    ("torch", "torch", "the reference and the interpreter: `proved`"),
    ("quack-kernels", "quack", "the GEMM mainloop: `proved`"),
    ("triton", "triton", "torch.compile as a baseline on a GPU"),
)
_NEEDED = ("torch", "nvidia-cutlass-dsl", "quack-kernels", "cache")
"""Without these no kernel can be shown to be anything."""
_COMPILER = "nvidia-cutlass-dsl"
_DRIVER = 580
"""The oldest driver that runs what is built for CUDA 13."""


@dataclass(frozen=True)
class Item:
    """One thing looked for.

    Attributes:
        value: What was found; None where it is missing.
        enables: What it is good for.
        hint: What to do where it is missing or broken.
        broken: Whether it is here and cannot do that, by which `doctor` fails.
    """

    name: str
    value: str | None
    enables: str
    hint: str = ""
    broken: bool = False


def gpus() -> list[Gpu]:
    """List this machine's GPUs, as far as nvidia-smi answers, without torch."""
    rows = smi("gpu=uuid,name,compute_cap,driver_version")
    return [Gpu(*row) for row in rows if len(row) == 4]


def package_version(distribution: str, module: str) -> str | None:
    """Find a package's version, "unknown" of a source tree; None where missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec(module) else None


def diagnose(start: Path) -> tuple[list[Item], str | None]:
    """Look at the machine, and at the repository `start` lies in.

    Returns:
        The findings, and the highest level a kernel can reach here (None: not even `proved`).
    """
    items = [*_python(), *_gpu(), *_tools(), *_git(start)]
    found = {item.name: item.value for item in items if not item.broken}
    if not all(found.get(name) for name in _NEEDED):
        return items, None
    runs = all(map(found.get, ("gpu", "driver", "torch with CUDA")))
    return items, "accepted" if runs else "proved"


def _python() -> Iterator[Item]:
    yield Item("python", platform.python_version(), "everything")
    yield _compiler()
    for distribution, module, enables in _PACKAGES:
        version = package_version(distribution, module)
        yield Item(distribution, version, enables, f"pip install {distribution}")
    cache, why = None, ""
    try:
        cache = str(writable_cache())
    except MachineError as error:
        why = str(error)
    yield Item("cache", cache, "keeping compiled kernels: `proved`", why, broken=cache is None)


def _compiler() -> Item:
    """Check that the compiler's wheels are whole and of one version.

    Wheels of releases before 4.8 have files of one name with other contents: the one for CUDA 13
    over the base, or the reverse, is a compiler that fails in the middle of a kernel.
    """
    enables, version = "compiling: `proved`", package_version(_COMPILER, "cutlass")
    if version in (None, "unknown"):
        return Item(_COMPILER, version, enables, f"pip install {_COMPILER}")
    wheels = {x.name: x for x in distributions() if x.name.startswith(_COMPILER)}
    off = [name for name, x in wheels.items() if x.version != version or not _whole(x)]
    if not off:
        return Item(_COMPILER, version, enables)
    found = ", ".join(f"{name} {wheels[name].version}" for name in off)
    names = " ".join(f"{name}=={version}" for name in wheels if name != _COMPILER)
    hint = f"{found}: not the files of {version}; pip install --force-reinstall --no-deps {names}"
    return Item(_COMPILER, version, enables, hint, broken=True)


def _whole(wheel: importlib.metadata.Distribution) -> bool:
    """Compare a wheel's files with what was brought, libraries by size."""
    for file in wheel.files or ():
        if file.size is None or file.hash is None or file.parts[0] == "..":
            continue  # made here: RECORD itself, and scripts
        path = Path(str(file.locate()))
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if path.suffix == ".py":
            digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
            if urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                return False
    return True


def _gpu() -> Iterator[Item]:
    found = gpus()
    hopper = [gpu for gpu in found if gpu.capability == "9.0"]
    value = "; ".join(f"{gpu.name} ({gpu.arch}, driver {gpu.driver})" for gpu in hopper)
    hint = "nvidia-smi names none; kernels stay `proved` here"
    if found and not hopper:
        hint = f"{found[0].name} is no Hopper GPU; kernels stay `proved` here"
    yield Item("gpu", value or None, "`verified` and `accepted`", hint)
    cuda: str | None = None
    built = package_version("torch", "torch") if hopper else None
    if built:
        built = torch.version.cuda
        cuda = str(built) if torch.cuda.is_available() else None
    if hopper:
        old = int(hopper[0].driver.partition(".")[0] or 0) < _DRIVER
        wheels = {wheel.name for wheel in distributions()}
        new = str(built).startswith("13.") or f"{_COMPILER}-libs-cu13" in wheels
        hint = f"CUDA 13 needs {_DRIVER} or newer: update the driver"
        broken = old and new
        yield Item("driver", hopper[0].driver, "running what is built for CUDA", hint, broken)
    hint = "needs a GPU and a torch built for it"
    broken = bool(hopper) and cuda is None
    yield Item("torch with CUDA", cuda, "running kernels", hint, broken)
    names = list(dict.fromkeys(gpu.name for gpu in found))
    for name in names:
        yield _dispatch(name)
    if not names:
        from coda_agent.runtime.dispatch_tables import fitted

        hint = "tiles measured on these cards, which pick on others, too"
        yield Item("dispatch", ", ".join(fitted()), hint, "no table in the package")


def _dispatch(gpu: str) -> Item:
    """Say whether a GPU's tiles are picked by measurements or the prior."""
    from coda_agent.runtime.dispatch_tables import PACKAGED, file, read

    table, value = read(PACKAGED, gpu), None
    if table:
        worst = max((entry.regret.mean for entry in table.kernels.values()), default=1.0)
        value = f"measured for {len(table.kernels)} kernels; picks are {worst - 1:.1%} off, or less"
    name = file(PACKAGED, gpu).name
    hint = f"what other cards took picks; `coda-agent fit --all` measures and writes {name}"
    return Item(f"dispatch on {gpu}", value, "the fastest tile at any shape", hint)


def _tools() -> Iterator[Item]:
    hint = "part of the CUDA toolkit, and of triton's Linux wheels"
    for tool in ("cuobjdump", "nvdisasm"):
        yield Item(tool, find_tool(tool), "`explain --stage sass`", hint)
    for kind in authors.kinds().values():
        if need := kind.need():
            value = "set" if need.met else None
            yield Item(need.name, value, f"the author `{kind.name}`", need.hint)
    enables = "references are admitted without network, with a scratch folder to write"
    yield Item("bubblewrap", None if missing() else "works", enables, missing())


def _git(start: Path) -> Iterator[Item]:
    root: str | None = None
    hint, identity, identity_hint = "", None, ""
    try:
        found = workspace.find(start)
        root = str(found.root)
        publish.check_identity(found)
        identity = found.git("var", "GIT_COMMITTER_IDENT").rpartition(">")[0] + ">"
    except CodaError as error:
        hint = str(error) if root is None else ""
        identity_hint = error.hint if root is not None else "looked for in a workspace only"
    yield Item("workspace", root, "generate, verify, show", hint)
    yield Item("git identity", identity, "committing what is accepted", identity_hint)
