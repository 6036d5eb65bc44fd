"""Archives: what pages were made from, whole and out of a reader's way.

Each publication is one `evals/archive/<name>-<12 hex>.tar.xz`. The hex digits begin the SHA-256 of
the tar file in it, which is the same for the same files. The program works without an archive: it
is for whoever doubts a figure, or wants to compute it again.
"""

import hashlib
import io
import lzma
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

FOLDER = Path("evals", "archive")
"""Where archives are, in a workspace."""


def write(name: str, files: Mapping[str, bytes], folder: Path) -> Path:
    """Writes files, by their paths in the archive, as <name>-<12 hex>.tar.xz in `folder`; the
    path."""
    tar = _tar(files)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{_digest(tar)}.tar.xz"
    path.write_bytes(lzma.compress(tar, preset=9 | lzma.PRESET_EXTREME))
    return path


def pack(name: str, files: Mapping[str, bytes], folder: Path) -> Path:
    """As `write`, in place of what another publication of that name left there."""
    path = write(name, files, folder)
    for other in found(name, folder):
        if other != path:
            other.unlink()
    return path


def found(name: str, folder: Path) -> list[Path]:
    """The archives of a name; of what `pack` wrote there is at most one."""
    return [p for p in sorted(folder.glob(f"{name}-*.tar.xz")) if p.name[:-20] == name]


def read(path: Path) -> dict[str, bytes]:
    """The files of an archive.

    Raises:
        CodaError: it is damaged, or its content is not what its name says.
    """
    try:
        tar = lzma.decompress(path.read_bytes())
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            members = {m.name: archive.extractfile(m) for m in archive.getmembers()}
        files = {name: member.read() for name, member in members.items() if member}
    except (OSError, lzma.LZMAError, tarfile.TarError) as error:
        raise CodaError(f"{path} is no readable archive: {error}", hint="fetch it again") from error
    if not path.name.endswith(f"-{_digest(tar)}.tar.xz"):
        raise CodaError(f"{path} holds something else than its name says", hint="fetch it again")
    return files


def unpack(path: Path, folder: Path) -> list[Path]:
    """Writes the files of an archive below `folder`; their paths.

    Raises:
        CodaError: as `read`, or a path would lead out of the folder.
    """
    written: list[Path] = []
    for name, content in read(path).items():
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise CodaError(f"{path}: {name} leads out of {folder}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        written.append(target)
    return written


def publish(name: str, files: Iterable[Path], root: Path) -> Path:
    """Packs files of the workspace at `root`, by their paths in it; the archive."""
    content = {file.relative_to(root).as_posix(): file.read_bytes() for file in files}
    return pack(name, content, root / FOLDER)


def restored(name: str, folder: Path, root: Path) -> Path:
    """A folder of the workspace at `root`; what was published is unpacked where it is not there."""
    if not (root / folder).is_dir():
        for path in found(name, root / FOLDER):
            unpack(path, root)
    return root / folder


def problems(workspace: Workspace) -> list[str]:
    """What is wrong with the archives of a workspace, a line for each fault."""
    said: list[str] = []
    for path in sorted((workspace.root / FOLDER).glob("*.tar.xz")):
        try:
            read(path)
        except CodaError as error:
            said.append(str(error))
    return said


def _tar(files: Mapping[str, bytes]) -> bytes:
    """A tar file that says nothing but names and contents, in the order of the names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            about = tarfile.TarInfo(name)
            about.size = len(files[name])
            archive.addfile(about, io.BytesIO(files[name]))
    return buffer.getvalue()


def _digest(tar: bytes) -> str:
    return hashlib.sha256(tar).hexdigest()[:12]
