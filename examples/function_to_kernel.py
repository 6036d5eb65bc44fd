"""Make a kernel of your own function, and call it.

    python examples/function_to_kernel.py

The composer writes it: offline, without a key. The workspace is a scratch folder that is left to
look at. On a Hopper GPU the kernel runs and is timed; elsewhere it is proved, and interpreted.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from coda_agent.runtime.loading import load_kernel


def gated(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w.T + b) ** 2


def main() -> None:
    """Draft its spec, have it written, and compare it with PyTorch."""
    folder = Path(tempfile.mkdtemp(prefix="coda-agent-"))
    source = f"from __future__ import annotations\n\nimport torch\n\n\n{inspect.getsource(gated)}"
    (folder / "gated.py").write_text(source)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for name in ("user.name", "user.email"):  # git may have none, and this is a scratch repository
        subprocess.run(["git", "config", name, "example"], cwd=folder, check=True)
    coda_agent(folder, "init", ".")
    shapes = [f"--shape={x}" for x in ("x=4096,4096", "w=4096,4096", "b=4096")]
    coda_agent(folder, "spec", "gated.py:gated", *shapes)
    coda_agent(folder, "generate", "gated", "--author", "composer")
    print((folder / "generated" / "gated" / "kernel.py").read_text())

    kernel = load_kernel(folder / "generated" / "gated")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    x, w, b = (torch.randn(shape, device=where).bfloat16() for shape in ((96, 64), (128, 64), 128))
    x, w = (t.requires_grad_() for t in (x, w / 8))
    found, own = kernel(x, w, b), gated(x, w, b)
    (ours,), (theirs,) = (torch.autograd.grad(y.sum(), [x]) for y in (found, own))
    print(f"largest difference from PyTorch: {(found - own).abs().max().item():.4f}")
    print(f"of gradients: {(ours - theirs).abs().max().item():.4f}")


def coda_agent(folder: Path, *words: str) -> None:
    """Run the command in a folder, and end where it fails."""
    print("$ coda-agent", *words, flush=True)
    command = [Path(sys.executable).with_name("coda-agent"), *words]
    if code := subprocess.run(command, cwd=folder).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
