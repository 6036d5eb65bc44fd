"""Acceptance: what generated/<kernel>/ holds after a verdict, and the commit that brings it there.

A verdict supersedes older evidence where it shows more, or as much by another judge or toolchain;
one that refuses revokes. How the four files reach git is in `publish.py`.
"""

import contextlib
import json
import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coda_agent.agent.plain import plain, utc_now
from coda_agent.agent.publish import FILES, exclusive, held, publish
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import WorkspaceError

if TYPE_CHECKING:
    from coda_agent.agent.judge import Verdict
    from coda_agent.specs import Spec

SCHEMA = 1


def accept(
    workspace: Workspace, spec: "Spec", text: str, verdict: "Verdict", *, author: str, run_id: str
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
    subject = f"Accept {spec.name} ({verdict.level}): {spec.summary}"
    sources = {"kernel.py": text, "spec.md": spec.text}
    return _record(workspace, spec.name, sources, verdict, verdict.level, subject, author, run_id)


def raise_or_revoke(
    workspace: Workspace, kernel: str, verdict: "Verdict", *, run_id: str, text: str | None = None
) -> str | None:
    """Brings a kernel's evidence in line with a new verdict and commits it.

    A pass raises the level, or keeps it: a machine that can show less than an earlier one did has
    contradicted nothing. A refusal revokes it. `text` is the program that was judged, by default
    kernel.py as it is now. Returns and raises as `accept`.
    """
    stored = workspace.kernel(kernel)
    level = (verdict.passed and verdict.level) or "revoked"
    author = str(stored.evidence.get("author", "unknown"))
    if _digests(verdict).get("candidate") != stored.evidence.get("digests", {}).get("candidate"):
        author = f"{author.removesuffix(', edited by hand')}, edited by hand"
    failed = [gate.name for gate in verdict.gates if not gate.passed and not gate.skipped]
    reason = "re-graded" if verdict.passed else f"failed {', '.join(failed)}"
    subject = f"{'Verify' if verdict.passed else 'Revoke'} {kernel} ({level}): {reason}"
    sources = {
        "kernel.py": text if text is not None else stored.program.read_text("utf-8"),
        "spec.md": stored.spec.read_text("utf-8"),
    }
    return _record(workspace, kernel, sources, verdict, level, subject, author, run_id)


def store_tuned(workspace: Workspace, kernel: str, measured: Mapping[str, Any]) -> str | None:
    """Adds measured shapes to a kernel's tuned.json and commits it; None where nothing is new.

    Raises:
        WorkspaceError: no such kernel in HEAD; else as `accept`.
    """
    with exclusive(workspace, kernel):
        files = held(workspace, kernel)
        if files.keys() != set(FILES):
            raise WorkspaceError(f"{kernel} is not committed", hint="accept it first: generate")
        tuned = _merged(_parsed(files, "tuned.json"), measured)
        files["tuned.json"] = _encode(_sorted(tuned))
        return publish(workspace, kernel, files, f"Tune {kernel} on {', '.join(measured)}\n")


def _merged(known: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """tuned.json with the entries of `measured` in place of, or beside, those of the same shape."""
    merged: dict[str, Any] = {gpu: dict(types) for gpu, types in known.items()}
    for gpu, types in measured.items():
        for dtype, entries in types.items():
            found = {(e["m"], e["n"], e["k"]): e for e in merged.get(gpu, {}).get(dtype, [])}
            found |= {(e["m"], e["n"], e["k"]): e for e in entries}
            merged.setdefault(gpu, {})[dtype] = [found[shape] for shape in sorted(found)]
    return merged


def _record(
    workspace: Workspace,
    name: str,
    sources: Mapping[str, str],
    verdict: "Verdict",
    level: str,
    subject: str,
    author: str,
    run_id: str,
) -> str | None:
    digests = _digests(verdict)
    evidence = {
        "schema": SCHEMA,
        "kernel": name,
        "level": level,
        "digests": digests,
        "author": author,
        "run": run_id,
        "gates": [_sorted(gate) for gate in verdict.gates],
        "environment": _sorted(verdict.environment),
        "not_shown": list(verdict.not_shown),
        "date": utc_now(),
    }
    trailed = ("spec", "candidate", "judge")
    trailers = {f"{key.title()}-Digest": digests.get(key, "unknown") for key in trailed}
    trailers |= {"Level": level, "Author": author}
    message = textwrap.shorten(subject, 100, placeholder=" …") + "\n\n"
    message += "\n".join(f"{key}: {' '.join(value.split())}" for key, value in trailers.items())
    with exclusive(workspace, name, sources["kernel.py"]):
        before = held(workspace, name)
        old, known = _parsed(before, "evidence.json"), _parsed(before, "tuned.json")
        if not _same_program(digests, old):
            known = {}  # another program's best tiles
        measured = plain(verdict.tuned or {}) if verdict.passed else {}
        if before.keys() != set(FILES) or _supersedes(verdict, level, old):
            files = {file: text.encode() for file, text in sources.items()}
            files["evidence.json"] = _encode(evidence)
            tuned = _merged(known, measured)
        else:
            files = dict(before)
            tuned = _merged(measured, known)  # a GPU not seen before is all that can be new
        files["tuned.json"] = _encode(_sorted(tuned))
        return publish(workspace, name, files, message + "\n")


def _digests(verdict: "Verdict") -> dict[str, str]:
    return {key: str(value) for key, value in sorted(verdict.digests.items())}


def _sorted(value: object) -> Any:
    """`value` as plain JSON data with the keys of every object in order."""
    return json.loads(json.dumps(plain(value), sort_keys=True))


def _encode(value: object) -> bytes:
    """JSON for review in git: a record without records inside, or a list of numbers, is a line."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    # A line break in JSON text is layout, never part of a string.
    leaf = re.compile(r"\{\n[^{}\[\]]*\}|\[\n[-+.\deE,\s]*\]")
    return (leaf.sub(lambda m: re.sub(r"\n\s*", " ", m[0]), text) + "\n").encode()


def _same_program(digests: Mapping[str, str], old: Mapping[str, Any]) -> bool:
    known = old.get("digests", {})
    return all(digests.get(key) == known.get(key) for key in ("spec", "candidate"))


def _supersedes(verdict: "Verdict", level: str, old: Mapping[str, Any]) -> bool:
    """Whether new evidence replaces `old`: another program, a refusal, more shown, or as much
    shown by another judge or toolchain."""
    from coda_agent.agent.judge.records import rank

    digests, before = _digests(verdict), old.get("level")
    if not _same_program(digests, old) or (rank(before) < 0 and before != "revoked"):
        return True
    if level == before:
        return digests != old["digests"]
    return not verdict.passed or rank(level) > rank(before)


def _parsed(files: Mapping[str, bytes], file: str) -> dict[str, Any]:
    """A JSON object HEAD holds; empty where it is missing or damaged."""
    with contextlib.suppress(ValueError, TypeError):
        return dict(json.loads(files.get(file, b"{}")))
    return {}
