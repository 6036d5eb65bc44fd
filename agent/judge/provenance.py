"""Digests of specs and candidates, and versions of compiling packages."""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata

from coda_agent.specs import Spec

PACKAGES = ("torch", "nvidia-cutlass-dsl", "quack-kernels", "triton")
_MODULES = {"nvidia-cutlass-dsl": "cutlass", "quack-kernels": "quack"}


def version(package: str) -> str | None:
    """Find a distribution's version, or its module's own word."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(_MODULES.get(package, package))
        return getattr(module, "__version__", None)


def digests(spec: Spec, text: str) -> dict[str, str]:
    """Give SHA-256 of a spec and of a candidate's text."""
    return {"spec": spec.digest, "candidate": sha(text)}


def sha(text: str) -> str:
    """Give `sha256:` and the hash of `text`, line ends normalised."""
    # A text with half a surrogate pair has a digest too, and a verdict.
    data = text.replace("\r\n", "\n").encode("utf-8", "surrogatepass")
    return "sha256:" + hashlib.sha256(data).hexdigest()
