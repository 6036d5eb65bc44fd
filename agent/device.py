"""Where the numerics of a candidate run, as a user chooses it."""

from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
"""`auto` is a GPU where there is one."""
