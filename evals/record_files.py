"""Trial records on disk: one JSON file a trial, beside the definition of its suite.

- A file is written whole or not at all, and carries a checksum.
- What is damaged, double or not ours is named by `read_records` and counts for nothing.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from coda_agent.evals import archive
from coda_agent.evals.records import SCHEMA, TrialKey, TrialRecord, suite_digest
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import write_whole

TRIALS = Path("evals", "results", "trials")
"""Where records are, in a workspace: a folder for each suite."""

_CHECKSUM = '"checksum": "{}"'


PUBLISHED = "trials"
"""The archive of the records that a workspace has published, with the logs of their runs."""


class Problem(NamedTuple):
    """A file that was not counted."""

    path: Path
    kind: Literal["truncated", "corrupted", "duplicated", "foreign"]
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: {self.message}"


class Results(NamedTuple):
    """What a folder of records holds."""

    records: list[TrialRecord]
    problems: list[Problem]


class _Unusable(Exception):
    """Why a file counts for nothing: a problem's kind and message."""


def trials_folder(root: Path) -> Path:
    """The folder of a workspace's records; published ones are unpacked where there is none."""
    return archive.restored(PUBLISHED, TRIALS, root)


def publish(root: Path) -> Path:
    """Packs a workspace's records and the logs of their runs into one archive; its path."""
    folder = root / TRIALS
    logs = [log for record in read_records(folder).records if (log := record.run.file(root))]
    return archive.publish(PUBLISHED, [*folder.rglob("*.json"), *logs], root)


def file_name(key: TrialKey) -> str:
    """The name of a record's file: readable, and never that of another key."""
    author = re.sub(r"[^\w.-]+", "-", key.author)[:60]
    end = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:10]
    return f"{key.spec}-{author}-{key.trial}-{end}.json"


def write_record(folder: Path, record: TrialRecord) -> Path:
    """Writes one record into a suite's folder, whole or not at all; its path.

    A record of the same key is replaced.
    """
    text = record.model_copy(update={"checksum": ""}).model_dump_json(indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = folder / file_name(record.key)
    write_whole(path, text.replace(_CHECKSUM.format(""), _CHECKSUM.format(digest), 1))
    return path


def replace_record(folder: Path, record: TrialRecord, **changes: Any) -> Path:
    """Writes a record with changes in the place of the one it was, anywhere under a folder.

    Raises:
        CodaError: there is no file of its name.
        ValidationError: the changes contradict the rest.
    """
    name = file_name(record.key)
    if (place := min(folder.rglob(name), default=None)) is None:
        hint = "`coda-agent eval leaderboard` names what is not counted"
        raise CodaError(f"no record {name} in {folder}", hint=hint)
    fields = {**record.model_dump(), **changes}
    return write_record(place.parent, TrialRecord.model_validate(fields))


def write_definition(folder: Path, definition: dict[str, Any]) -> Path:
    """Puts a suite's definition beside its records, which are foreign without it."""
    path = folder / _definition_name(suite_digest(definition))
    write_whole(path, json.dumps(definition, indent=1, sort_keys=True) + "\n")
    return path


def read_records(folder: Path) -> Results:
    """The records under a folder, and each file that is none or counts for nothing, with the
    reason; a folder that is not there has neither."""
    paths = set(folder.rglob("*.json"))
    definitions = {path for path in paths if path.name.startswith("suite-")}
    suites: set[tuple[Path, str]] = set()
    found: list[tuple[Path, TrialRecord]] = []
    problems: list[Problem] = []
    for path in (*sorted(definitions), *sorted(paths - definitions)):
        try:
            if path in definitions:
                suites.add((path.parent, _read_definition(path)))
            else:
                found.append((path, _read_record(path, suites)))
        except _Unusable as fault:
            problems.append(Problem(path, *fault.args))
    # Of two files of one trial, that with the name that belongs to it is the program's own.
    found.sort(key=lambda pair: pair[0].name != file_name(pair[1].key))
    kept: dict[TrialKey, tuple[Path, TrialRecord]] = {}
    for path, record in found:
        first, _ = kept.setdefault(record.key, (path, record))
        if first != path:
            problems.append(Problem(path, "duplicated", f"the same trial is in {first}"))
    return Results([record for _, record in kept.values()], problems)


def _definition_name(digest: str) -> str:
    return f"suite-{digest.removeprefix('sha256:')[:12]}.json"


def _read_definition(path: Path) -> str:
    """The digest of the suite in a file, whose name it must fit."""
    try:
        digest = suite_digest(json.loads(path.read_text("utf-8")))
    except (ValueError, OSError) as error:
        raise _Unusable("corrupted", f"no definition of a suite: {error}") from error
    if path.name != _definition_name(digest):
        raise _Unusable("corrupted", "its name is not its digest")
    return digest


def _read_record(path: Path, suites: set[tuple[Path, str]]) -> TrialRecord:
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _Unusable("foreign", f"not text: {error}") from error
    try:
        record = TrialRecord.model_validate_json(text)
    except ValidationError as error:
        raise _refused(text, error) from error
    bare = text.replace(_CHECKSUM.format(record.checksum), _CHECKSUM.format(""), 1)
    if hashlib.sha256(bare.encode()).hexdigest() != record.checksum:
        raise _Unusable("corrupted", "its checksum does not fit its text")
    if (path.parent, record.suite.digest) not in suites:
        said = f"no definition of suite {record.suite.name} {record.suite.digest[:19]} here"
        raise _Unusable("foreign", said)
    return record


def _refused(text: str, error: ValidationError) -> _Unusable:
    """Why a text is no record."""
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        if "EOF" in fault["msg"]:
            return _Unusable("truncated", fault["msg"])
        return _Unusable("foreign", f"not JSON: {fault['msg']}")
    data: Any = json.loads(text)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA:
        return _Unusable("foreign", f"schema_version is {version!r}, expected {SCHEMA}")
    where = ".".join(map(str, fault["loc"])) or "record"
    return _Unusable("corrupted", f"{where}: {fault['msg'].removeprefix('Value error, ')}")
