"""The machine that a verdict was given on, as evidence names it."""

import platform

from coda_agent.agent.judge.machine import Gpu, gpu_state
from coda_agent.agent.judge.provenance import PACKAGES, version
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.deferred import torch


def environment(device: str, gpu: Gpu | None = None) -> JsonObject:
    """Describe the machine and versions; on "cuda" a GPU, too."""
    facts: JsonObject = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "packages": {p: version(p) for p in PACKAGES},
    }
    if device == "cuda":
        facts["gpu"] = gpu_state(gpu and gpu.uuid)
        facts["cuda"] = torch.version.cuda
    return facts
