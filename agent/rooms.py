"""What makes a folder a workspace."""

from pathlib import Path

ROOMS = ("specs", "generated", "logs")


def above(start: Path) -> Path | None:
    """The nearest folder at or above `start` that has the rooms of a workspace."""
    folders = (start, *start.parents)
    return next((f for f in folders if all((f / room).is_dir() for room in ROOMS)), None)
