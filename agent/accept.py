"""What generated/<kernel>/ holds after a verdict, and the commit of it.

A verdict takes the place of the evidence as a whole (`Evidence.yields_to`); one that refuses
revokes. How the four files reach git is in `publish.py`.
"""

import contextlib
import json
import re
import textwrap
from collections.abc import Mapping

from coda_agent.agent.evidence import Evidence, Standing
from coda_agent.agent.judge import Verdict
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.publish import exclusive, publish
from coda_agent.agent.workspace import Kernel, Workspace
from coda_agent.primitives.errors import WorkspaceError
from coda_agent.specs import Spec


def accept(
    workspace: Workspace, spec: Spec, text: str, verdict: Verdict, *, author: str, run_id: str
) -> str | None:
    """Store a candidate that passed, and commit it.

    Returns:
        The commit, or None where HEAD already holds this program with evidence as strong.

    Raises:
        ValueError: the verdict is a refusal.
        WorkspaceError: the kernel's place is not fit (`publish.check_place`), or git refused;
            nothing has changed then.
    """
    if not verdict.passed or verdict.level is None:
        raise ValueError(f"the judge refused {spec.name}: there is nothing to accept")
    new = Evidence.of(verdict, kernel=spec.name, author=author, run=run_id)
    sources = {"kernel.py": text, "spec.md": spec.text}
    return _record(workspace, new, verdict, sources, "Store", spec.summary)


def raise_or_revoke(
    workspace: Workspace, kernel: str, verdict: Verdict, *, run_id: str, text: str | None = None
) -> str | None:
    """Bring a kernel's evidence in line with a verdict, and commit it.

    A pass raises the level, or keeps it: a machine that can show less than an earlier one did has
    contradicted nothing. A refusal revokes it. `text` is the program that was judged, by default
    kernel.py as it is now. Returns and raises as `accept`.
    """
    stored = workspace.kernel(kernel)
    author = stored.evidence.author
    if verdict.digests.get("candidate") != stored.evidence.digests.get("candidate"):
        author = f"{author.removesuffix(', edited by hand')}, edited by hand"
    level: Standing = (verdict.passed and verdict.level) or "revoked"
    new = Evidence.of(verdict, kernel=kernel, level=level, author=author, run=run_id)
    sources = {
        "kernel.py": text if text is not None else stored.text,
        "spec.md": stored.spec.read_text("utf-8"),
    }
    if verdict.passed:
        return _record(workspace, new, verdict, sources, "Verify", "re-graded")
    reason = f"failed {', '.join(new.failed)}"
    return _record(workspace, new, verdict, sources, "Revoke", reason)


def store_tuned(workspace: Workspace, kernel: str, measured: JsonObject) -> str | None:
    """Add measured shapes to a kernel's tuned.json; None where none is new.

    Raises:
        WorkspaceError: no such kernel; else as `accept`.
    """
    with exclusive(workspace, kernel) as lock:
        tuned = _merged(_tuned(workspace.kernel(kernel)), measured)
        files, message = {"tuned.json": _encode(tuned)}, f"Tune {kernel} on {', '.join(measured)}\n"
        return publish(workspace, kernel, files, message, lock)


def _record(
    workspace: Workspace,
    new: Evidence,
    verdict: Verdict,
    sources: Mapping[str, str],
    verb: str,
    reason: str,
) -> str | None:
    """Publish the four files as stored evidence and a verdict make them."""
    measured: JsonObject = {}
    if verdict.passed and verdict.tuned:
        measured = verdict.model_dump(mode="json")["tuned"]
    with exclusive(workspace, new.kernel, sources["kernel.py"]) as lock:
        kernel, old = Kernel(new.kernel, workspace.generated / new.kernel), None
        with contextlib.suppress(WorkspaceError):  # there is none, or none that can be read
            old = kernel.evidence
        # Another program's tiles are not the best of this one.
        known = _tuned(kernel) if old and old.of_program(new.digests) else {}
        renew = old is None or old.yields_to(new)
        evidence = new if old is None or renew else old
        # Other tiles than those that were timed come with those timings, or not at all.
        files = {**sources, "tuned.json": _encode(_merged(known, measured, renew=renew))}
        if evidence is new:
            files["evidence.json"] = new.text()
        return publish(workspace, new.kernel, files, _message(evidence, verb, reason), lock)


def _message(evidence: Evidence, verb: str, reason: str) -> str:
    head = f"{verb} {evidence.kernel} ({evidence.level}): {reason}"
    trailers = {f"{key.title()}-Digest": value for key, value in evidence.digests.items()}
    trailers |= {"Level": evidence.level, "Author": evidence.author}
    lines = [f"{key}: {' '.join(value.split())}" for key, value in trailers.items()]
    return "\n".join([textwrap.shorten(head, 100, placeholder=" …"), "", *lines, ""])


def _merged(known: JsonObject, measured: JsonObject, *, renew: bool = True) -> JsonObject:
    """Merge measured entries; `renew` replaces those of the same shape.

    One of the stored configuration changes nothing: times differ by noise.
    """
    merged: JsonObject = {gpu: dict(types) for gpu, types in known.items()}
    for gpu, types in measured.items():
        for dtype, entries in types.items():
            found = {(e["m"], e["n"], e["k"]): e for e in merged.get(gpu, {}).get(dtype, [])}
            for entry in entries:
                shape = entry["m"], entry["n"], entry["k"]
                is_new = shape not in found
                if is_new or (renew and found[shape]["config"] != entry["config"]):
                    found[shape] = entry
            merged.setdefault(gpu, {})[dtype] = [found[shape] for shape in sorted(found)]
    return merged


def _encode(tuned: JsonObject) -> str:
    """JSON for review in git: a configuration is a line."""
    text = json.dumps(tuned, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A line break in JSON text is layout, never part of a string.
    leaf = re.compile(r"\{\n[^{}\[\]]*\}")
    return leaf.sub(lambda m: re.sub(r"\n\s*", " ", m[0]), text) + "\n"


def _tuned(kernel: Kernel) -> JsonObject:
    """Read a kernel's tuned.json; empty where it is missing or damaged."""
    with contextlib.suppress(WorkspaceError):
        return dict(kernel.tuned)
    return {}
