"""Tests of primitives/objects.py."""

from hashlib import sha256
from pathlib import Path

import pytest

from coda_agent.primitives import objects


def test_the_fingerprint_is_of_names_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "ROOT", tmp_path)
    found = objects.fingerprint.__wrapped__
    for name, text in {"a/x.py": "1", "a/b/y.py": "2", "a/z.md": "3", "c/w.py": "4"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    first = found("a")
    assert first == sha256(b"a/b/y.py\0002\0a/x.py\0001\0").hexdigest() == found("a")
    assert found("a", "c") == found("c", "a") != first
    (tmp_path / "a" / "z.md").write_text("another")
    assert found("a") == first  # no program
    (tmp_path / "a" / "b" / "y.py").rename(tmp_path / "a" / "b" / "v.py")
    assert found("a") != first
