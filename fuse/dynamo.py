"""Dynamo as calls of fused functions have it: it looks at more than it does by default."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.variables.misc import RandomVariable
from torch.fx.experimental import _config as symbols

from coda_agent.fuse.ran import GRAPHS


@functools.lru_cache(maxsize=1)
def _patchers() -> list[Callable[[], Callable[[], None]]]:
    """What sets torch's options for a call of ours, and gives what sets them back."""
    wanted = {
        # Each is True to check less at a call, and would miss a hook, a tensor's own attributes, or
        # a function's defaults.
        "skip_nnmodule_hook_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "assume_dunder_attributes_remain_unchanged": False,
        "suppress_errors": False,
        # For each code, which all functions have in common that one line made in a loop.
        "recompile_limit": 64,
    }
    known = {name: value for name, value in wanted.items() if hasattr(config, name)}
    # Each dim has a symbol of its own, though it is as large as another's: a model of 4096 columns
    # may be called with 4096 rows.
    own: Any = symbols
    supported = RandomVariable.is_supported_random_obj
    # It draws the same from an object of random.Random at each call (torch 2.13), so in our calls
    # it is not to know them. GRAPHS is of our calls.
    RandomVariable.is_supported_random_obj = staticmethod(
        lambda val: GRAPHS.get() is None and supported(val)
    )
    return [
        config._make_closure_patcher(**known), own._make_closure_patcher(use_duck_shape=False)
    ]  # fmt: skip


@contextmanager
def strict() -> Iterator[None]:
    """Lets Dynamo guard all that a call goes by."""
    undo = [patch() for patch in _patchers()]
    try:
        yield
    finally:
        for back in undo:
            back()


def of_dynamo(error: Exception) -> bool:
    """Whether Dynamo raised it while it recorded a function, which it did not run then."""
    home = "torch._dynamo.convert_frame"
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, TorchDynamoException) or any(
        frame.f_globals.get("__name__") == home for frame in frames
    )
