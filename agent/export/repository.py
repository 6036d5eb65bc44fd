"""A repository in the layout of Hugging Face `kernels`, variant `tvm-ffi`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coda_agent.agent.doctor import package_version
from coda_agent.agent.export.folds import folds
from coda_agent.agent.export.objects import RUN, Wanted, exported
from coda_agent.agent.workspace import GitError, Kernel, run_git
from coda_agent.primitives import memory
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.runtime import call_cache
from coda_agent.runtime.loading import load_kernel

NAME = "coda-agent-kernels"
# One for each release of CUDA that torch may be built for; they hold the same bytes.
_CUDA = "cu128", "cu130"
_MARK = "metadata.json"


def write(
    kernels: Sequence[Kernel],
    out: Path,
    wanted: Wanted,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> dict[str, Any]:
    """Export kernels to the folder `out`, in place of a former export.

    Returns:
        `folder`, `variants`, `id`, and by kernel how many `objects` it has and their `bytes`.

    Raises:
        CodaError: `out` holds something else or cannot be written, or a kernel cannot be exported
            so.
        MachineError: what is needed to link is missing.
    """
    if out.exists() and any(out.iterdir()) and not [*out.glob(f"build/*/{_MARK}")]:
        raise CodaError(f"{out} is not empty and holds no export", hint="name another --out")
    _check_writable(out)
    loaded = [load_kernel(kernel.folder) for kernel in kernels]
    abouts, libraries = exported(loaded, wanted, progress)
    folded, files = folds((p for x in loaded for p in x.programs.values()), wanted.archs)
    sizes: dict[str, dict[str, int]] = {}
    for kernel, objects in zip(kernels, libraries, strict=True):
        files |= objects
        for path in (kernel.program, kernel.spec, kernel.folder / "evidence.json"):
            files[f"kernels/{kernel.name}/{path.name.replace('.py', '.txt')}"] = path.read_bytes()
        sizes[kernel.name] = {"objects": len(objects), "bytes": sum(map(len, objects.values()))}
    files["kernels.json"] = _json(
        {"gpu": wanted.gpu, "ran": [RUN], "folds": folded, "kernels": abouts}
    )
    files |= _loader()
    files["__init__.py"] = _module([kernel.name for kernel in kernels])
    metadata = _metadata(files, wanted, [kernel.folder for kernel in kernels])
    files[_MARK] = _json(metadata)
    import tvm_ffi

    ffi = "".join(tvm_ffi.__version__.split(".")[:2])
    variants = [f"tvm-ffi{ffi}-{cuda}-x86_64-linux" for cuda in _CUDA]
    docs = [about["doc"] or "" for about in abouts]
    readme = page(kernels, docs, wanted, metadata["id"])
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
        for name, data in files.items():
            for variant in variants:
                path = Path(folder, "new", "build", variant, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        Path(folder, "new", "README.md").write_text(readme, "utf-8")
        if out.exists():
            out.rename(Path(folder, "old"))
        Path(folder, "new").rename(out)
    return {"folder": out, "variants": variants, "id": metadata["id"], "kernels": sizes}


def _check_writable(out: Path) -> None:
    """Refuse a place that cannot be written, before minutes of compiling."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=out.parent).cleanup()
    except OSError as error:
        message = f"{out} cannot be written: {error.strerror}"
        raise CodaError(message, hint="name another --out") from None


def _loader() -> dict[str, bytes]:
    """Read the loader's modules by name, as one package."""
    own = Path(__file__).with_name("loader").glob("*.py")
    found = {}
    for path in (*own, Path(call_cache.__file__), Path(memory.__file__)):
        text = re.sub(
            r"(?m)^from coda_agent\.[\w.]*\b(\w+) import", r"from .\1 import", path.read_text()
        )
        found[f"_loader/{path.name}"] = text.encode()
    return found


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def _module(kernels: Sequence[str]) -> bytes:
    """Write the file that is imported of the repository."""
    lines = [
        '"""Kernels that were compiled ahead: `help` of each says what it takes and computes."""',
        "",
        "from pathlib import Path",
        "",
        "from ._loader.kernel import load",
        "from ._loader.store import KernelError",
        "",
        "_kernels = load(Path(__file__).parent)",
        *(f'{name} = _kernels["{name}"]' for name in kernels),
        "",
        f"__all__ = {sorted([*kernels, 'KernelError'])}",
    ]
    return ("\n".join(lines) + "\n").encode()


def digest(data: bytes) -> str:
    """SHA-256 as `metadata.json` has it."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def identity(digests: Mapping[str, str]) -> str:
    """Make the `id` of a variant of its files' digests."""
    sums = (name.encode() + base64.b64decode(x) for name, x in sorted(digests.items()))
    return f"{NAME.replace('-', '_')}_cuda_{hashlib.sha256(b''.join(sums)).hexdigest()[:8]}"


def _metadata(
    files: Mapping[str, bytes], wanted: Wanted, folders: Sequence[Path]
) -> dict[str, Any]:
    """Make `metadata.json` as `kernels` 0.17 reads it, with a unique `id`."""
    sums = {name: digest(data) for name, data in sorted(files.items())}
    archs = [f"{arch[3:-2]}.{arch[-2:]}" for arch in wanted.archs]
    found = {
        "id": identity(sums),
        "name": NAME,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": ["tvm-ffi"],
        "backend": {"type": "cuda", "archs": archs},
        "digest": {"algorithm": "sha256", "files": sums},
    }
    try:
        commit = run_git(folders[0], "rev-parse", "HEAD").decode().strip()
        dirty = any(run_git(x, "status", "--porcelain", "--", ".") for x in folders)
    except (GitError, MachineError):  # a package that was installed has no history
        return found
    builder = {"version": package_version("coda-agent", "coda_agent")}
    return found | {
        "provenance": {"kernel-builder": builder, "kernel": {"commit": commit, "dirty": dirty}}
    }


def page(kernels: Sequence[Kernel], docs: Sequence[str], wanted: Wanted, id_: str) -> str:
    """Write README.md: loading, what kernels take (`docs`), figures, evidence."""
    lines = [
        f"---\nlibrary_name: kernels\nlicense: apache-2.0\ntags: [kernels]\n---\n\n# {NAME}\n",
        "GEMM-epilogue kernels, compiled ahead. They need torch for CUDA 12.8 or later and",
        "apache-tvm-ffi.\n",
        "```python\nfrom pathlib import Path\nfrom kernels import get_local_kernel\n",
        f'kernels = get_local_kernel(Path("."))\nhelp(kernels.{kernels[0].name})\n```\n',
        "- A is (…, M, K) and B (N, K), the `nn.Linear` layout. K is last in memory; other strides",
        "  are copied. Kernels have no backward pass.",
        "- Final reductions are folded by one launch more; `block_size` gives the partials.",
        f"- Tiles are chosen by what was measured on {wanted.gpu}.",
        f"- Operators are `torch.ops.{id_}.<kernel>`.",
        "- `kernels/<kernel>/` in a variant's folder has the program, the spec and the evidence.",
    ]
    if never := [arch for arch in wanted.archs if arch != RUN]:
        lines.append(f"- Objects for {', '.join(never)} compile, and never ran.")
    for kernel, doc in zip(kernels, docs, strict=True):
        evidence = kernel.evidence
        lines += ["", f"## {kernel.name}", "", "```", doc, "```", ""]
        gates = ", ".join(name for name, gate in evidence.gates.items() if gate.passed)
        where = f"{evidence.date[:10]}, {evidence.machine.name}"
        lines.append(f"Verdict: {evidence.level} ({where}; passed: {gates}).")
        if evidence.cells:
            lines += ["", "| dtype | shape | tile | of the bare GEMM | over torch.compile |"]
            lines.append("|---|---|---|---|---|")
        for cell in evidence.cells:
            shape = "×".join(map(str, cell.sizes.values()))
            shares = [f"{x.ratio:.3f}" if x else "" for x in (cell.of_gemm, cell.over_compile)]
            lines.append(f"| {cell.dtype} | {shape} | {cell.tile} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"
