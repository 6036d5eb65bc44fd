"""The machine that a verdict was given on, as evidence names it."""

import platform
from typing import Any

from coda_agent.agent.judge.machine import Gpu, gpu_state
from coda_agent.agent.judge.provenance import PACKAGES, version


def environment(device: str, gpu: Gpu | None = None) -> dict[str, Any]:
    """Describe the machine and versions; on "cuda" a GPU, too."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "packages": {p: version(p) for p in PACKAGES},
    }
    if device == "cuda":
        import torch

        facts["gpu"] = gpu_state(gpu and gpu.uuid)
        facts["cuda"] = torch.version.cuda
    return facts
