"""Near misses, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ask "did you mean x?" of names that hold or resemble it."""
    names = sorted(set(known), key=lambda n: (len(n), n))
    holding = [n for n in names if len(name) > 2 and name.lower() in n.lower()][:3]
    # What most kernels are called makes none of them near.
    bare = {n.removeprefix("gemm_"): n for n in names}
    close = holding or [bare[n] for n in get_close_matches(name.removeprefix("gemm_"), bare)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def near_matches(name: str, known: Iterable[str]) -> str:
    """Ask `did_you_mean`, or else list all that is known."""
    names = sorted(set(known))
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    listed = f"known: {', '.join(names[:12])}{more}" if names else ""
    return did_you_mean(name, names) or listed
