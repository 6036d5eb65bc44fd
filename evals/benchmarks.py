"""The suites that `bench` measures; most import torch when made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from coda_agent.evals.cases import Suite
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.suggest import near_matches

SUITES: Mapping[str, str] = {
    "kernels": "kernels.own",
    "paper": "kernels.paper",
    "shapes": "kernels.shapes",
    "layers": "layers.suite",
    "fuse": "functions.suite",
    "gradients": "gradients.suite",
    "host": "host.suite",
    "models": "serving.suite",
    "numerics": "numerics.suite",
}
"""Where the function is that makes each for a workspace: the module of this room, and its name."""


def load(name: str, root: Path) -> Suite:
    """Make a suite for a workspace.

    Raises:
        CodaError: there is none of that name.
    """
    if name not in SUITES:
        raise CodaError(f"no suite {name!r}", hint=near_matches(name, SUITES))
    module, _, function = SUITES[name].partition(".")
    return getattr(import_module(f"{__package__}.{module}"), function)(root)
