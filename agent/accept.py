"""Acceptance: what generated/<kernel>/ holds after a verdict, and the commit that brings it there.

A verdict renews evidence gate by gate (`Evidence.renewed`); one that refuses revokes. How the four
files reach git is in `publish.py`.
"""

import contextlib
import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from coda_agent.agent.evidence import Evidence, Standing, keep_raw
from coda_agent.agent.judge import Verdict
from coda_agent.agent.publish import FILES, exclusive, held, publish
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import WorkspaceError
from coda_agent.specs import Spec


def accept(
    workspace: Workspace, spec: Spec, text: str, verdict: Verdict, *, author: str, run_id: str
) -> str | None:
    """Stores a candidate that passed and commits it.

    Returns:
        The commit, or None where HEAD already holds this program with evidence as strong; the
        working tree then shows what HEAD holds.

    Raises:
        ValueError: the verdict is a refusal.
        WorkspaceError: the kernel's place is not fit (`publish.check_place`), or git refused;
            nothing has changed then.
    """
    if not verdict.passed or verdict.level is None:
        raise ValueError(f"the judge refused {spec.name}: there is nothing to accept")
    sources = {"kernel.py": text, "spec.md": spec.text}
    new = Evidence.of(verdict, kernel=spec.name, level=verdict.level, author=author, run=run_id)
    return _record(workspace, new, verdict, sources, "Accept", spec.summary)


def raise_or_revoke(
    workspace: Workspace, kernel: str, verdict: Verdict, *, run_id: str, text: str | None = None
) -> str | None:
    """Brings a kernel's evidence in line with a new verdict and commits it.

    A pass raises the level, or keeps it: a machine that can show less than an earlier one did has
    contradicted nothing. A refusal revokes it. `text` is the program that was judged, by default
    kernel.py as it is now. Returns and raises as `accept`.
    """
    stored = workspace.kernel(kernel)
    level: Standing = (verdict.passed and verdict.level) or "revoked"
    author = stored.evidence.author
    if verdict.digests.get("candidate") != stored.evidence.digests.get("candidate"):
        author = f"{author.removesuffix(', edited by hand')}, edited by hand"
    failed = [gate.name for gate in verdict.gates if not gate.passed and not gate.skipped]
    reason = "re-graded" if verdict.passed else f"failed {', '.join(failed)}"
    sources = {
        "kernel.py": text if text is not None else stored.program.read_text("utf-8"),
        "spec.md": stored.spec.read_text("utf-8"),
    }
    new = Evidence.of(verdict, kernel=kernel, level=level, author=author, run=run_id)
    verb = "Verify" if verdict.passed else "Revoke"
    return _record(workspace, new, verdict, sources, verb, reason)


def store_tuned(workspace: Workspace, kernel: str, measured: Mapping[str, Any]) -> str | None:
    """Adds measured shapes to a kernel's tuned.json and commits it; None where nothing is new.

    Raises:
        WorkspaceError: no such kernel in HEAD; else as `accept`.
    """
    with exclusive(workspace, kernel) as lock:
        files = held(workspace, kernel)
        if files.keys() != set(FILES):
            raise WorkspaceError(f"{kernel} is not committed", hint="accept it first: generate")
        tuned = _merged(_tuned(files), measured)
        files["tuned.json"] = _encode(tuned)
        message = f"Tune {kernel} on {', '.join(measured)}\n"
        return publish(workspace, kernel, files, message, lock=lock)


def _record(
    workspace: Workspace,
    new: Evidence,
    verdict: Verdict,
    sources: Mapping[str, str],
    verb: str,
    reason: str,
) -> str | None:
    """Publishes the four files as HEAD's evidence and a new verdict make them."""
    measured: dict[str, Any] = {}
    if verdict.passed and verdict.tuned:
        measured = verdict.model_dump(mode="json")["tuned"]
    with exclusive(workspace, new.kernel, sources["kernel.py"]) as lock:
        before = held(workspace, new.kernel)
        old = _evidence(before)
        same = old is not None and old.of_program(new.digests)
        known = _tuned(before) if same else {}  # another program's tiles are not the best of this
        evidence = old.renewed(new) if old and before.keys() == set(FILES) else new
        if evidence is None:
            files, evidence = dict(before), old or new
        else:
            files = {file: text.encode() for file, text in sources.items()}
            files["evidence.json"] = evidence.text().encode()
            keep_raw(workspace.root, verdict, evidence)
        # Other tiles than those that were timed come with those timings, or not at all.
        renew = evidence.raw("performance") == new.raw("performance")
        files["tuned.json"] = _encode(_merged(known, measured, renew=renew))
        message = _message(evidence, verb, reason)
        return publish(workspace, new.kernel, files, message, lock=lock)


def _message(evidence: Evidence, verb: str, reason: str) -> str:
    subject = f"{verb} {evidence.kernel} ({evidence.level}): {reason}"
    digests = evidence.digests
    trailers = {f"{key.title()}-Digest": digests.get(key, "unknown")
                for key in ("spec", "candidate", "judge")}  # fmt: skip
    trailers |= {"Level": evidence.level, "Author": evidence.author}
    lines = [f"{key}: {' '.join(value.split())}" for key, value in trailers.items()]
    return "\n".join([textwrap.shorten(subject, 100, placeholder=" …"), "", *lines, ""])


def _merged(
    known: Mapping[str, Any], measured: Mapping[str, Any], *, renew: bool = True
) -> dict[str, Any]:
    """tuned.json with the entries of `measured` beside, or where `renew` is set in place of, those
    of the same shape. One of the stored configuration changes nothing: times differ by noise.
    """
    merged: dict[str, Any] = {gpu: dict(types) for gpu, types in known.items()}
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


def _encode(tuned: Mapping[str, Any]) -> bytes:
    """JSON for review in git: a configuration is a line."""
    text = json.dumps(tuned, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A line break in JSON text is layout, never part of a string.
    leaf = re.compile(r"\{\n[^{}\[\]]*\}")
    return (leaf.sub(lambda m: re.sub(r"\n\s*", " ", m[0]), text) + "\n").encode()


def _evidence(files: Mapping[str, bytes]) -> Evidence | None:
    """The evidence HEAD holds; None where it is missing, damaged or of an earlier form."""
    with contextlib.suppress(ValidationError):
        return Evidence.model_validate_json(files.get("evidence.json", b""))
    return None


def _tuned(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The tuned.json HEAD holds; empty where it is missing or damaged."""
    with contextlib.suppress(ValueError, TypeError):
        return dict(json.loads(files.get("tuned.json", b"{}")))
    return {}
