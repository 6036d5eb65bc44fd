"""What makes a verdict stale, shown by edits in a copy of the sources."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from coda_agent.agent.judge import rules
from coda_agent.agent.judge.records import GATES
from coda_agent.agent.judge.rules import ROOT, RULES, meaning, meanings
from coda_agent.primitives.errors import CodaError

BOUND = r"^(\w+ = )[^\"'\n]*\d.*$"
"""A module's first constant with a number in it."""
FINDING = r"(Finding\(\s*message=f?\")"


once = cache(meaning)
"""Of a hundred modules, one is edited in a test; parsing them all took 2 s a test."""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that could decide, to be edited."""
    monkeypatch.setattr(rules, "meaning", once)
    for folder in ("agent", "primitives", "specs", "generated"):
        ignored = shutil.ignore_patterns("__pycache__", "*.json", "*.md")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


def changed(sources: Path, file: str, pattern: str, into: str) -> set[str]:
    """The rules whose meaning changes when the first match of `pattern` in a file is replaced."""
    before = rules.parsed_meanings(sources)
    path = sources / file
    text = path.read_text("utf-8")
    edited = re.sub(pattern, into, text, count=1, flags=re.MULTILINE)
    assert edited != text, f"{pattern!r} is not in {file}"
    path.write_text(edited, "utf-8")
    after = rules.parsed_meanings(sources)
    return {name for name in RULES if before[name] != after[name]}


@pytest.mark.sampled(0.3)
def test_sources_are_parsed_once_until_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parsed, parse = list[Path](), rules.parsed_meanings

    def counted(root: Path) -> dict[str, str]:
        parsed.append(root)
        return parse(root)

    monkeypatch.setattr(rules, "parsed_meanings", counted)
    fresh, kept = rules.meanings.__wrapped__, tmp_path / "coda-agent" / "meanings.json"
    before = fresh()
    assert before == parse(ROOT) == fresh() and len(parsed) == 1
    for torn in (kept.read_text()[:-9], "[]", ""):
        kept.write_text(torn)
        assert before == fresh() == fresh()
    assert len(parsed) == 4
    edited = rules._texts(ROOT) | {"agent/judge/oracle.py": "X = 1"}
    monkeypatch.setattr(rules, "_texts", lambda root: edited)
    assert fresh()["numerics"] != before["numerics"] and len(parsed) == 5
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # no folder
    assert fresh() == parse(ROOT)


def gates_on(rule: str) -> set[str]:
    return {gate for gate in GATES if rule in rules.involved(gate)}


def test_the_lock_is_of_these_sources() -> None:
    """See CONTRIBUTING.md: both ways out need a reason."""
    rules.lock.cache_clear()
    names = " ".join(rules.differing())
    assert not names, (
        f"the meaning of {names} is not what {rules.LOCK.name} holds. Where it changed:\n"
        f'    coda-agent rules raise {names} --why "..."    # verdicts have to be given again\n'
        "Where it is worded otherwise and means the same:\n"
        f'    coda-agent rules same {names} --why "..."     # the scores have to confirm it'
    )


def test_every_module_is_in_a_rule_or_outside() -> None:
    decided = [module for rule in RULES.values() for module in rule.modules]
    folders = ("agent/judge", "primitives", "specs", "generated")
    there = {f.relative_to(ROOT).as_posix() for d in folders for f in (ROOT / d).glob("*.py")}
    unplaced = there - {*decided, *rules.OUTSIDE}
    assert not unplaced, f"put {sorted(unplaced)} into a rule of rules.py, or into OUTSIDE"
    assert {*decided, *rules.OUTSIDE} == there, "rules.py names modules that are not there"
    assert len(decided) == len(set(decided)) and rules.OUTSIDE.isdisjoint(decided)
    assert set(GATES) <= set(RULES)


@pytest.mark.parametrize(
    ("file", "pattern", "into"),
    [
        ("agent/judge/oracle.py", r"\Z", "\n# a remark\n"),
        ("agent/judge/oracle.py", r'\A"""', '"""Another first line. '),
        ("agent/judge/performance.py", r'^(def .*(?:\n.*)*?:\n    """)', r"\1Said otherwise. "),
        ("agent/judge/timing.py", r"\Aimport|^import ", "import antigravity\nimport "),
        ("agent/judge/numerics.py", FINDING, r"\1Look: "),
        ("agent/judge/compile_gate.py", r"same names, same order", "the same names in order"),
        ("agent/judge/static.py", r"is not a name of the vocabulary", "is unknown"),
        ("agent/judge/performance.py", r"slower than torch.compile", "not as fast as torch"),
        ("agent/judge/diagnosis.py", r"enters twice", "comes in twice"),
        ("primitives/errors.py", r"\Z", "\nX = 1\n"),
        ("agent/execution/pool.py", r"\Z", "\nX = 1\n"),
        ("agent/execution/cluster.py", r"\Z", "\nX = 1\n"),
        ("agent/execution/device_worker.py", r"\Z", "\nX = 1\n"),
        ("agent/judge/executor.py", r"\Z", "\nX = 1\n"),
    ],
)
def test_words_and_transport_leave_every_verdict_valid(
    sources: Path, file: str, pattern: str, into: str
) -> None:
    assert changed(sources, file, pattern, into) == set()


@pytest.mark.parametrize(
    ("file", "pattern", "into", "gates"),
    [
        ("agent/judge/compare.py", BOUND, r"\g<1>77", {"numerics"}),
        ("agent/judge/oracle.py", BOUND, r"\g<1>77", {"numerics"}),
        ("agent/judge/meaning.py", BOUND, r"\g<1>77", {"numerics"}),
        ("agent/judge/performance.py", r"1\.25, 1\.15", "9.25, 1.15", {"performance"}),
        ("agent/judge/timing.py", BOUND, r"\g<1>77", {"performance"}),
        ("agent/judge/static.py", BOUND, r"\g<1>77", {"static"}),
        ("agent/judge/compile_gate.py", BOUND, r"\g<1>77", {"compile"}),
        ("primitives/lower.py", r"\Z", "\nX = 1\n", {"compile", "numerics", "performance"}),
        ("primitives/ops.py", r"\Z", "\nX = 1\n", set(GATES)),
        ("specs/reference.py", r"\Z", "\nX = 1\n", set(GATES)),
        ("agent/judge/__init__.py", r"\Z", "\nX = 1\n", set(GATES)),
    ],
)
def test_a_bound_makes_its_gates_stale(
    sources: Path, file: str, pattern: str, into: str, gates: set[str]
) -> None:
    (moved,) = changed(sources, file, pattern, into)
    assert gates_on(moved) == gates


def test_what_decides_is_meaning_and_what_is_said_is_not() -> None:
    same = [
        'def f(x: int) -> int:\n    """A."""\n    y: int = x\n    raise ValueError(f"no {x}")\n',
        "from typing import Any\nimport os\n\n\ndef f(x: Any):\n    # B\n    y = x\n"
        '    raise ValueError("never")\n',
    ]
    assert len({meaning(text) for text in same}) == 1
    assert meaning("from a import f\nf()") != meaning("from b import f\nf()")
    assert meaning("from a import f as g\n__all__ = ['g']") != meaning("__all__ = ['g']")
    assert meaning("x = 'mov b32'") != meaning("x = 'cvt b32'")
    assert meaning("x = 'was wrong'", prose=True) == meaning("x = 'is another'", prose=True)
    assert meaning("x = 'a_key'", prose=True) != meaning("x = 'b_key'", prose=True)
    assert meaning("class A:\n    x: int") != meaning("class A:\n    x: str")
    assert meaning("g(1 / 2, 'a')") != meaning("g(1 / 3, 'a')")
    assert meaning("Finding(message='a', n=1)") != meaning("Finding(message='a', n=2)")


def test_a_verdict_of_unlocked_sources_names_a_version_of_no_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {name: rules.Locked(version=3, meaning=now, why="") for name, now in meanings().items()}
    edited = {**known, "lowering": rules.Locked(version=3, meaning="sha256:other", why="")}
    for lock, expected in ((known, "3"), (edited, f"3+{meanings()['lowering'][7:15]}")):
        monkeypatch.setattr(rules, "lock", lambda lock=lock: lock)
        given = rules.given("numerics")
        assert given == {**dict.fromkeys(rules.involved("numerics"), "3"), "lowering": expected}
    assert rules.moved(given, "numerics") == ["lowering"] and rules.moved({}, "memcheck") == []


def test_raising_and_declaring(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    first = rules.raise_versions(RULES, "first", path)
    assert {entry.version for entry in first.values()} == {1} and list(first) == list(RULES)
    with pytest.raises(CodaError, match="nothing to declare"):
        rules.declare_same(["numerics"], "worded otherwise", path)
    held = json.loads(path.read_text())
    held["numerics"]["meaning"] = held["static"]["meaning"] = "sha256:other"
    path.write_text(json.dumps(held))
    again = rules.declare_same(["numerics"], "worded otherwise", path)
    assert again["numerics"].version == 1 and again["numerics"].same == ("worded otherwise",)
    assert again["numerics"].meaning == first["numerics"].meaning
    raised = rules.raise_versions(["static"], "a bound", path)["static"]
    assert (raised.version, raised.why, raised.same) == (2, "a bound", ())
    for names, why, said in ((["nothing"], "x", "no rule named"), (["static"], " ", "--why")):
        with pytest.raises(CodaError, match=said):
            rules.raise_versions(names, why, path)
