"""What an exported repository holds, and whether it is intact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coda_agent.agent.evidence import Evidence
from coda_agent.agent.export.repository import digest, identity
from coda_agent.primitives.errors import CodaError


def exports_in(folder: Path) -> list[Path]:
    """`folder` where it is an export, and else those in it.

    Raises:
        CodaError: there is none.
    """
    for found in ([folder], sorted(x for x in folder.glob("*") if x.is_dir())):
        if some := [x for x in found if [*x.glob("build/*/kernels.json")]]:
            return some
    hint = "expected build/<variant>/kernels.json; coda-agent export KERNEL --out DIR writes one"
    raise CodaError(f"{folder} is no export, and holds none", hint=hint)


def inspected(folder: Path) -> dict[str, Any]:
    """Read an export, as far as possible, without torch and GPU.

    Returns:
        `folder`; `variants` that can be read; `id`, `provenance` and the `gpu` whose
        times choose tiles; `faults`, a line for each file that is missing or changed; `kernels`,
        each with `name`, `level`, `judged` (the day of its verdict), `machine`, `archs`, `dtypes`
        and what `load`s it.
    """
    found: dict[str, Any] = {"folder": folder, "variants": [], "faults": [], "kernels": []}
    for variant in sorted(path for path in folder.glob("build/*") if path.is_dir()):
        faults: list[str] = []
        try:
            metadata = json.loads((variant / "metadata.json").read_text("utf-8"))
            faults += _faults(variant, metadata)
            about = {key: metadata.get(key) for key in ("id", "provenance")}
            found |= about | _contents(folder, variant)
            found["variants"].append(variant.name)
        except OSError as error:
            faults = faults or [f"{error.filename} cannot be read: {error.strerror}"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            faults = faults or [f"{variant} is not of a form that is known: {error!r}"]
        found["faults"] += faults
    return found


def _faults(variant: Path, metadata: dict[str, Any]) -> Iterator[str]:
    """List a variant's files that are not what was exported."""
    digests = metadata["digest"]["files"]
    if metadata["id"] != identity(digests):
        yield f"{variant / 'metadata.json'} has digests that are not those of its id"
    for name, expected in digests.items():
        try:
            if digest((variant / name).read_bytes()) != expected:
                yield f"{variant / name} is not what was exported: its SHA-256 differs"
        except OSError as error:
            yield f"{variant / name} cannot be read: {error.strerror}"


def _contents(folder: Path, variant: Path) -> dict[str, Any]:
    whole = json.loads((variant / "kernels.json").read_text("utf-8"))
    kernels = []
    for about in whole["kernels"]:
        path = variant / f"kernels/{about['name']}/evidence.json"
        evidence = Evidence.model_validate_json(path.read_bytes())
        forms = [(dtype, x) for v in about["variants"] for dtype, x in v["forms"].items()]
        archs = dict.fromkeys(arch for _, form in forms for arch in form["objects"])
        kernels.append(
            {
                "name": about["name"],
                "level": evidence.level,
                "judged": evidence.date[:10],
                "machine": evidence.machine.name,
                "archs": [x + " (never run)" * (x not in whole["ran"]) for x in archs],
                "dtypes": [*dict.fromkeys(dtype for dtype, _ in forms)],
                "load": f'get_local_kernel(Path("{folder}")).{about["name"]}',
            }
        )
    return {"gpu": whole["gpu"], "kernels": kernels}
