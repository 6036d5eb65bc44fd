"""Accepted kernels read from their folders, with their evidence."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, NonNegativeInt

from coda_agent.primitives.errors import TextError, WorkspaceError
from coda_agent.primitives.objects import reason, text_of
from coda_agent.primitives.reader import read_programs
from coda_agent.runtime import dispatch_tables as tables
from coda_agent.runtime.kernel import Kernel
from coda_agent.runtime.tile_choice import TileChoice
from coda_agent.runtime.tuning import UserTuning, read_tuned
from coda_agent.specs import Spec, load_spec

# By operator: torch takes each name once a process.
_LOADED: dict[str, tuple[str, Kernel]] = {}


def load_kernel(folder: str | Path) -> Kernel:
    """Load a kernel from its folder, such as a workspace's `generated/ffn_gate`.

    Its operator is `coda_agent::<name>` for a kernel of this package. Elsewhere, where other
    contents may come under the same name, `coda_agent::<name>_<digest of the files>`.

    Args:
        folder: With kernel.py, spec.md and, of an accepted kernel, tuned.json and evidence.json.

    Returns:
        The function, which `help` describes.

    Raises:
        WorkspaceError: the folder holds no kernel, a revoked one, or not the one its evidence was
            made for, or a file that cannot be read.
    """
    path = (folder := Path(folder)) / "kernel.py"
    if not path.is_file():
        raise WorkspaceError(f"{folder} holds no kernel.py")
    paths = [folder / f for f in ("kernel.py", "spec.md", "tuned.json", "evidence.json")]
    texts = [p.read_bytes() if p.is_file() else b"{}" for p in paths]
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]
    name = (spec := load_spec(paths[1])).name
    tuned, evidence = read_tuned(paths[2]), _read_evidence(paths[3], texts[3])
    _check_digests(folder, evidence.digests, texts[0], spec)
    if evidence.level == "revoked":
        hint = f"`coda-agent show {folder.name}` says why; git has what was accepted before"
        raise WorkspaceError(f"{folder} is revoked: the judge refuses this kernel", hint=hint)
    if not evidence.level:
        message = f"coda-agent: nobody judged {folder}: it has no evidence.json"
        warnings.warn(message, stacklevel=2)
    packaged = folder.parent == tables.PACKAGED and _LOADED.get(name, (digest,))[0] == digest
    if not packaged:
        name = f"{name}_{digest}"
    if name not in _LOADED:
        try:
            programs = read_programs(
                text_of(path, kind=WorkspaceError), [*map(spec.variant, spec.bindings())]
            )
        except TextError as error:
            raise WorkspaceError(f"{path}: {error.message}", hint=error.hint) from None
        refused = frozenset(found.tile for found in evidence.refused_tiles)
        first, spills = next(iter(programs.values())), evidence.compiled.spills
        about = tuned, refused, user_tuning(folder), folder.parent, spills
        kernel = Kernel(spec, programs, name, TileChoice(spec.name, first, *about))
        if packaged:  # a global, to pickle: an attribute of the package
            kernel.__module__, kernel.origin = "coda_agent.generated", name
        else:
            kernel.origin = load_kernel, (folder.resolve(),)
        _LOADED[name] = digest, kernel
    return _LOADED[name][1]


def user_tuning(folder: Path) -> UserTuning:
    """Find what the user measured of the kernel in `folder`."""
    texts = [(folder / file).read_bytes() for file in ("kernel.py", "spec.md")]
    return UserTuning(folder.name, hashlib.sha256(b"\0".join(texts)).hexdigest())


class _RefusedTile(BaseModel):
    tile: str


class _Compiled(BaseModel):
    spills: dict[str, NonNegativeInt] = {}


class _Evidence(BaseModel):
    """What calls need of evidence.json, whose whole is the judge's."""

    level: str = ""
    digests: dict[str, str] = {}
    refused_tiles: tuple[_RefusedTile, ...] = ()
    compiled: _Compiled = _Compiled()


def _read_evidence(path: Path, text: bytes) -> _Evidence:
    try:
        return _Evidence.model_validate_json(text)
    except ValueError as error:
        raise WorkspaceError(
            f"{path} is not readable evidence: {reason(error)}",
            hint=f"git checkout -- {path} restores what was accepted",
        ) from error


def _check_digests(folder: Path, digests: Mapping[str, str], program: bytes, spec: Spec) -> None:
    """Refuse files that were changed after the judge saw them."""
    found = {
        "kernel.py": ("candidate", hashlib.sha256(program.replace(b"\r\n", b"\n")).hexdigest()),
        "spec.md": ("spec", spec.digest.removeprefix("sha256:")),
    }
    for file, (key, digest) in found.items():
        if digests.get(key, f"sha256:{digest}") != f"sha256:{digest}":
            raise WorkspaceError(
                f"{folder / file} is not what its evidence was made for",
                hint=f"coda-agent verify {folder.name} judges it as it is now",
            )
