"""The launches that fold partials, compiled ahead, and their launcher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from coda_agent.agent.export.objects import linked
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.program import Program

_LAUNCH = Path(__file__).with_name("launch.c")
# Of what is folded in one step; as many partials, or more, are a multiple of 16 or are not.
_ACROSS = 16, 32, 64, 128, 256
_ACROSS_DOWN = _ACROSS[:3]  # where partials of a row do not follow each other in memory
_KEPT = 8191


def folds(
    programs: Iterable[Program], archs: Iterable[str]
) -> tuple[dict[str, list[dict[str, object]]], dict[str, bytes]]:
    """Compile what folds: what the loader knows by architecture, and files.

    Both are empty where no program reduces.

    Raises:
        MachineError: Triton or a C compiler is missing.
    """
    wanted = {(x.combine, x.over_rows) for program in programs for x in program.reductions.values()}
    if not wanted:
        return {}, {}
    try:
        from coda_agent.primitives.fold import compiled, prepared
    except ImportError as error:
        raise MachineError(
            f"{error.name} is missing, which compiles the folds of partials",
            hint="pip install triton",
        ) from None
    files = {"folds/launch.so": linked("__tvm_ffi_load; __tvm_ffi_launch", _LAUNCH)}
    about: dict[str, list[Any]] = {}
    for arch in archs:
        known = about[arch] = []
        for combine, over_rows in sorted(wanted):
            for kept, folded, *strides in _layouts(over_rows=over_rows):
                raw = torch.empty_strided((kept, folded), strides, device="meta")
                _, (_, _, (down,), (across,)) = prepared([raw], [(combine, 1.0, 0.0)])
                found = compiled(raw, combine, int(arch[3:-1]))
                hints = [1 if x == 1 else 16 if x % 16 == 0 else 0 for x in (folded, *strides)]
                file = f"folds/{combine}-{across}-{'-'.join(map(str, hints))}-{arch}.cubin"
                files[file] = found.asm["cubin"]
                known.append(
                    {
                        "combine": combine,
                        "hints": hints,
                        "across": across,
                        "down": down,
                        "file": file,
                        "name": found.metadata.name,
                        "threads": 32 * found.metadata.num_warps,
                        "shared": found.metadata.shared,
                    }
                )
        known.sort(key=lambda x: x["across"])
    return about, files


def _layouts(*, over_rows: bool) -> Iterator[tuple[int, int, int, int]]:
    """List shapes and strides of partials: one of each compiled form."""
    counts = (1, *[x - odd for x in (_ACROSS_DOWN if over_rows else _ACROSS) for odd in (0, 1)])
    for folded in counts:
        if not over_rows:
            yield _KEPT, folded, folded, 1
            continue
        for kept in (4096, 4088):  # N is a multiple of 8
            yield kept, folded, 1, kept
