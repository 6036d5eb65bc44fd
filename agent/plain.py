"""Values as JSON, money for people, and the time of records."""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, cast


def plain(value: object) -> Any:
    """Turn a value into JSON data: records dicts, other things strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {str(key): plain(item) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast(Iterable[object], value)]
    dump = getattr(value, "model_dump", None)
    return plain(dump()) if callable(dump) else str(value)


def dollars(usd: float | None) -> str:
    """Write an amount as people read it; None is unknown."""
    return "unknown" if usd is None else f"${usd:.2f}"


def utc_now() -> str:
    """Write the present time as events and records hold it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
