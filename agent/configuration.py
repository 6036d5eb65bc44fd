"""A Hugging Face configuration, and a layer's widths in it."""

import json
from pathlib import Path
from typing import Any

from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import text_of


def configuration(path: Path) -> JsonObject:
    """Read a Hugging Face config.json, or that of a folder.

    Raises:
        CodaError: it cannot be read, or is something else.
    """
    path = path / "config.json" if path.is_dir() else path
    about = json_of(path, text_of(path))
    if not isinstance(about, dict):
        raise CodaError(f"{path} is no model's configuration, expected a JSON object")
    if isinstance(text := about.get("text_config"), dict):  # of a model that reads more than text
        about |= text
    return about


def widths(about: JsonObject, path: Path) -> dict[str, int]:
    """Take the widths of a model's layer, as suites name them.

    Raises:
        CodaError: `path` lacks one.
    """

    def width(key: str, default: int | None = None) -> int:
        found = about.get(key)
        found = default if found is None else found
        if not isinstance(found, int) or found <= 0:
            raise CodaError(f"{path}: {key} is {found!r}, expected a positive number")
        return found

    hidden, heads = width("hidden_size"), width("num_attention_heads")
    head = width("head_dim", hidden // heads)
    return {
        "hidden": hidden,
        "q": heads * head,
        "kv": width("num_key_value_heads", heads) * head,
        "head": head,
        "mlp": width("intermediate_size"),
        "vocabulary": width("vocab_size"),
    }


def json_of(path: Path, text: str) -> Any:
    """Parse a file's text as JSON.

    Raises:
        CodaError: it is none.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise CodaError(f"{path} is not JSON: {error}") from error
