"""Functions as people write them in models, by topic: what the composer is tried on.

Each was written in a library's own style, before the composer was seen on it. `EXAMPLES` of a topic
has shapes of its functions' arguments; a type follows a colon, without one it is bfloat16.
"""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

TOPICS: tuple[ModuleType, ...] = tuple(
    importlib.import_module(f"{__name__}.{topic.name}") for topic in pkgutil.iter_modules(__path__)
)
EXAMPLES: dict[str, str] = {x: e for topic in TOPICS for x, e in topic.EXAMPLES.items()}
FUNCTIONS: dict[str, Callable[..., Any]] = {x: getattr(t, x) for t in TOPICS for x in t.EXAMPLES}
FILES: dict[str, str] = {x: str(topic.__file__) for topic in TOPICS for x in topic.EXAMPLES}
