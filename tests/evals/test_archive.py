"""Archives: the same bytes for the same files, named by them, and refused when damaged."""

import io
import lzma
import tarfile
from pathlib import Path

import pytest

from coda_agent.evals import archive
from coda_agent.primitives.errors import CodaError

FILES = {"b/two.json": b"{}\n", "a.json": b"[1]\n" * 1000}


def test_equal_files_give_equal_bytes_and_names(tmp_path: Path) -> None:
    first = archive.pack("kernels", FILES, tmp_path / "x")
    second = archive.pack("kernels", dict(reversed(FILES.items())), tmp_path / "y")
    assert first.name == second.name and first.read_bytes() == second.read_bytes()
    assert archive.read(first) == FILES and list(archive.read(first)) == sorted(FILES)
    assert len(first.read_bytes()) < 1000


def test_a_publication_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    other = archive.pack("kernels-too", FILES, tmp_path)
    archive.pack("kernels", FILES, tmp_path)
    new = archive.pack("kernels", {"a": b"1"}, tmp_path)
    assert archive.found("kernels", tmp_path) == [new]
    assert sorted(tmp_path.iterdir()) == sorted([new, other])
    assert archive.pack("kernels", {"a": b"1"}, tmp_path) == new and new.is_file()


def test_damage_is_named(tmp_path: Path) -> None:
    path = archive.pack("kernels", FILES, tmp_path)
    other = path.rename(tmp_path / "kernels-000000000000.tar.xz")
    with pytest.raises(CodaError, match="something else than its name"):
        archive.read(other)
    other.write_bytes(other.read_bytes()[:50])
    with pytest.raises(CodaError, match="no readable archive"):
        archive.read(other)


def test_unpacking_stays_in_its_folder(tmp_path: Path) -> None:
    path = archive.pack("kernels", FILES, tmp_path)
    written = archive.unpack(path, tmp_path / "out")
    assert {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in written} == FILES
    evil = archive.pack("evil", {"../out.txt": b"x"}, tmp_path)
    with pytest.raises(CodaError, match="leads out of"):
        archive.unpack(evil, tmp_path / "out")
    assert not (tmp_path / "out.txt").exists()


def test_it_is_an_ordinary_tar(tmp_path: Path) -> None:
    path = archive.pack("kernels", FILES, tmp_path)
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(path.read_bytes()))) as found:
        assert {m.mtime for m in found} == {0} and {m.uname for m in found} == {""}
