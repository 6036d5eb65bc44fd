"""The agent skill: its format, that nothing is left out of it, and that what it says is so."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from coda_agent.agent import skill
from coda_agent.agent.cli import app
from coda_agent.agent.judge.compile_gate import check_signature
from coda_agent.agent.prompt import instructions
from coda_agent.agent.workbench import TOOLS
from coda_agent.demos import END, demos
from coda_agent.primitives import __all__ as vocabulary
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import draw_inputs, load_spec, run_reference
from coda_agent.specs.format import DTYPES, Dim, Draw, Header, InPlace, Input, Tolerance

FILES = skill.files("coda-agent")
PAGES = {path: text for path, text in FILES.items() if path.endswith(".md")}


def test_the_front_matter_is_within_the_limits_of_the_format() -> None:
    front = yaml.safe_load(FILES["SKILL.md"].split("---\n")[1])
    assert front["name"] == "coda-agent"
    assert 1 <= len(front["description"]) <= 1024
    assert not set("<>\n") & set(front["description"])
    assert set(front) == {"name", "description", "license", "metadata"}
    assert all(isinstance(x, str) for pair in front["metadata"].items() for x in pair)
    assert len(FILES["SKILL.md"].splitlines()) <= 500


@pytest.mark.parametrize("name", ["x" * 65, "-a", "a-", "a--b", "A", "a_b", "a b", "é"])
def test_a_name_that_the_format_does_not_allow_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CodaError, match="is no name of a skill"):
        skill.write(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


def test_every_demonstration_is_there_and_is_a_program() -> None:
    known = {demo.name: demo for demo in demos()}
    found = {Path(x).stem: text for x, text in FILES.items() if "/demonstrations/" in x}
    assert found.keys() == known.keys()
    for name, text in found.items():
        candidate = text.partition(END)[0]
        programs = [*read_programs(candidate).values()]
        assert [x.digest for x in programs] == [x.digest for x in known[name].programs]


def test_every_spec_in_it_is_one() -> None:
    shown = {path: text for path, text in FILES.items() if "/specs/" in path}
    assert {load_spec(path, text=text).name for path, text in shown.items()} == {*skill.EXAMPLES}


def test_its_own_example_is_a_spec_and_a_program_of_it() -> None:
    first, *_ = re.findall(r"````markdown\n(.*?)````", FILES["references/spec.md"], re.DOTALL)
    assert len(first.splitlines()) == 12
    spec = load_spec("ffn_gate.md", text=first)
    text = re.findall(r"```python no-run\n(.*?)```", FILES["SKILL.md"], re.DOTALL)[0]
    programs = read_programs(text, [spec.name])
    assert check_signature(spec, programs) == []
    values = draw_inputs(spec, spec.check_shapes[1], spec.default_types(), seed=0)
    want = run_reference(spec, values, exact=True)["y"]
    x, w = (torch.as_tensor(values[name]).double() for name in spec.gemm)
    dtypes, wide = {"y": torch.float64}, torch.float64
    got = interpret(programs[spec.name], x, w, values, dtypes=dtypes, compute=wide)["y"]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_the_language_the_tools_and_the_format_are_whole() -> None:
    headings = re.findall(r"^### `(\w+)", FILES["references/primitives.md"], re.MULTILINE)
    assert sorted(headings) == sorted({*vocabulary} - {"Program"})
    assert all(text in FILES["references/language.md"] for text in instructions().values())
    tools = re.findall(r"^## (\w+)", FILES["references/tools.md"], re.MULTILINE)
    assert tools == [*TOOLS]
    said = set(re.findall(r"\w+", FILES["references/spec.md"]))
    models = (Header, Input, Dim, InPlace, Tolerance)
    assert {field for model in models for field in model.model_fields} <= said
    assert {*DTYPES, *get_args(get_type_hints(Draw)["kind"])} <= said


def test_links_resolve_and_all_is_reachable() -> None:
    reached = {"SKILL.md"}
    for path, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            target = str((Path("/") / path).parent.joinpath(link).resolve().relative_to("/"))
            assert target in FILES, f"{path}: {link}"
            reached.add(target)
    assert reached == FILES.keys()


def test_commands_and_tools_exist() -> None:
    """That their options exist is tested with those of the documentation."""
    root: Any = typer.main.get_command(app)
    named = {x for text in PAGES.values() for x in re.findall(r"[`$] ?coda-agent ([a-z]+)", text)}
    assert {"tool", "spec", "generate", "mcp", "check"} <= named <= {*root.commands}
    called = re.findall(r"coda-agent tool ([a-z]\w+)", FILES["SKILL.md"])
    assert called and {*called} <= {*TOOLS}


def test_writing_twice_gives_equal_bytes_and_spares_what_is_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "kernels"

    def there() -> dict[str, bytes]:
        return {str(x.relative_to(out)): x.read_bytes() for x in out.rglob("*") if x.is_file()}

    skill.write(out)
    first = there()
    assert first == {x: text.encode() for x, text in skill.files("kernels").items()}
    (out / "references" / "tools.md").write_text("changed")
    skill.write(out)
    assert there() == first
    (out / "notes.md").write_text("mine")
    with pytest.raises(CodaError, match=r"notes\.md is no file of this skill"):
        skill.write(out)
    for text in ("", "---\nname: kernels\n---\n", "---\n- a\n---\n", "---\n: {\n---\n", "\xff"):
        (out / "SKILL.md").write_text(text, "latin-1")
        done = CliRunner().invoke(app, ["skill", "--out", str(out)])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == f"error: {out} holds no skill of coda-agent (name another --out)\n"
        assert (out / "notes.md").read_text() == "mine"


def test_by_default_it_is_written_where_agents_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["skill"]).exit_code == 0
    assert (tmp_path / ".agents/skills/coda-agent/SKILL.md").read_text() == FILES["SKILL.md"]
