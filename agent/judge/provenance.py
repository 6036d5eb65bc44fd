"""What decided a verdict: digests of spec, candidate, judge and toolchain."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coda_agent.specs import Spec

PACKAGES = ("torch", "nvidia-cutlass-dsl", "quack-kernels", "triton")
_MODULES = {"nvidia-cutlass-dsl": "cutlass", "quack-kernels": "quack"}


def version(package: str) -> str | None:
    """Installed version of a distribution; the module's own word where it is only on the path."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(_MODULES.get(package, package))
        return getattr(module, "__version__", None)


def digests(spec: Spec, text: str) -> dict[str, str]:
    """SHA-256 of spec, candidate, toolchain and of the judge's sources."""
    return {
        "spec": spec.digest,
        "candidate": sha(text),
        "judge": judge_digest(),
        "toolchain": toolchain({package: version(package) for package in PACKAGES}),
    }


def toolchain(versions: Mapping[str, str | None]) -> str:
    """Digest of what compiles a kernel, out of a machine's packages."""
    # torch and triton bring their own releases on a machine with a GPU, and the reference is
    # checked by itself.
    found = {package: versions.get(package) for package in _MODULES}
    return sha(json.dumps(found, sort_keys=True))


def sha(text: str) -> str:
    """`sha256:` and the hash of `text`, line ends normalised."""
    # A text with half a surrogate pair has a digest too, and a verdict.
    data = text.replace("\r\n", "\n").encode("utf-8", "surrogatepass")
    return "sha256:" + hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=1)
def judge_digest() -> str:
    """Digest of the sources of the judge, the language, the spec format and kernels' functions.

    It says where a verdict came from, and that a worker of a cluster runs the same judge. Whether
    a verdict still stands, `rules.py` says.
    """
    agent = Path(__file__).parent
    root = agent.parent.parent
    files = [
        *agent.glob("*.py"),
        *(agent.parent / "execution").glob("*.py"),
        *(agent.parent / "sandbox").glob("*.py"),
        *(root / "primitives").glob("*.py"),
        *(root / "specs").glob("*.py"),
        *(root / "generated").glob("*.py"),
    ]
    hashed = hashlib.sha256()
    for file in sorted(files, key=lambda f: (f.parent.name, f.name)):
        hashed.update(f"{file.parent.name}/{file.name}\0".encode() + file.read_bytes() + b"\0")
    return "sha256:" + hashed.hexdigest()
