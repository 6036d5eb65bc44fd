import subprocess
from pathlib import Path

import pytest

from coda_agent.agent import workspace
from coda_agent.agent.evidence import Evidence
from coda_agent.agent.judgement import Machine
from coda_agent.agent.workspace import resolve_spec
from coda_agent.primitives.errors import WorkspaceError
from coda_agent.primitives.suggest import near_matches


def git(folder: Path, *args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_init_makes_a_workspace_once(tmp_path: Path) -> None:
    made, new = workspace.init(tmp_path / "w")
    assert new[0] == ".git" and "README.md" in new
    assert workspace.find(made.root) == made
    assert workspace.init(made.root)[1] == []
    run = made.new_run("generate", "x")
    (run.folder / "a").touch()
    assert "runs" not in git(made.root, "status", "--porcelain", "-uall")


def test_init_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("build/")
    (tmp_path / "README.rst").write_text("mine")
    workspace.init(tmp_path)
    assert (tmp_path / ".gitignore").read_text().startswith("build/\nlogs/runs/\n")
    assert not (tmp_path / "README.md").exists()


def test_init_leaves_a_clean_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{kind}_NAME", "a")
        monkeypatch.setenv(f"GIT_{kind}_EMAIL", "a@b")
    made, new = workspace.init(tmp_path / "w")
    (made.root / "mine").touch()
    git(made.root, "add", "mine")
    assert workspace.commit_made(made, new) == ""
    assert git(made.root, "status", "--porcelain", "-uall") == "A  mine\n"
    assert git(made.root, "show", "--format=%s", "--name-only").split("\n\n")[1].split() == sorted(
        set(new) - {".git"}
    )
    assert workspace.commit_made(*workspace.init(made.root)) == ""
    (made.root / ".gitignore").write_text("build/\n")  # git knows it
    said = workspace.commit_made(*workspace.init(made.root))
    assert said == "not committed: git add .gitignore && git commit"
    assert git(made.root, "log", "--oneline").count("\n") == 1


def test_init_says_what_to_commit_where_git_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, new = workspace.init(tmp_path / "w")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    said = workspace.commit_made(made, new)
    assert said.startswith("not committed (git commit failed: ") and "git add " in said


def test_init_on_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(WorkspaceError, match="is a file"):
        workspace.init(tmp_path / "f")


def test_find_walks_up_but_not_out_of_the_repository(tmp_path: Path) -> None:
    outer, _ = workspace.init(tmp_path)
    deep = tmp_path / "specs" / "a" / "b"
    deep.mkdir(parents=True)
    assert workspace.find(deep) == outer
    git(deep, "init")
    with pytest.raises(WorkspaceError, match=r"not a workspace: it has no specs/, generated/, log"):
        workspace.find(deep)


def test_find_in_a_subdirectory_workspace(tmp_path: Path) -> None:
    git(tmp_path, "init")
    made, new = workspace.init(tmp_path / "kernels")
    assert ".git" not in new
    found = workspace.find(made.root / "logs")
    assert (found.root, found.top) == (made.root, tmp_path.resolve())


def test_find_without_a_repository(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="no git repository at or above") as caught:
        workspace.find(tmp_path)
    assert "coda-agent init" in caught.value.hint


def test_names(tmp_path: Path) -> None:
    made, _ = workspace.init(tmp_path)
    (made.specs / "my_gemm.md").write_text("x")
    assert resolve_spec("my_gemm", made) == made.specs / "my_gemm.md"
    assert resolve_spec(str(made.specs / "my_gemm.md"), made) == made.specs / "my_gemm.md"
    packaged = resolve_spec("gemm_swiglu", made)
    assert not packaged.is_relative_to(made.root)
    (made.specs / "gemm_swiglu.md").write_text("mine first")
    assert resolve_spec("gemm_swiglu", made).is_relative_to(made.root)
    with pytest.raises(WorkspaceError, match="no spec named 'my_gem'") as caught:
        resolve_spec("my_gem", made)
    assert "did you mean my_gemm" in caught.value.hint
    with pytest.raises(WorkspaceError, match="no spec file"):
        resolve_spec("nowhere/x.md", made)


def test_kernels(tmp_path: Path) -> None:
    made, _ = workspace.init(tmp_path)
    whole = Evidence(
        kernel="gemm_a", level="proved", author="composer", run="r", date="2026-11-22T00:00:00Z",
        digests={}, gates={}, passed=True, machine=Machine(device="cpu"),
    ).text()  # fmt: skip
    for name, text in (("gemm_a", whole), ("gemm_b", "{torn"), ("gemm_c", '{"schema": 1}')):
        (made.generated / name).mkdir()
        (made.generated / name / "evidence.json").write_text(text)
    (made.generated / "not_a_kernel").mkdir()
    assert [(k.name, k.level) for k in made.kernels()] == [
        ("gemm_a", "proved"),
        ("gemm_b", "damaged"),
        ("gemm_c", "damaged"),
    ]
    for name in ("gemm_b", "gemm_c"):
        with pytest.raises(WorkspaceError, match="not readable evidence") as caught:
            _ = made.kernel(name).evidence
        assert "\n" not in str(caught.value) and "generate" in caught.value.hint
    with pytest.raises(WorkspaceError) as caught:
        made.kernel("gem_a")
    assert "gemm_a" in caught.value.hint


def test_hints_for_an_unknown_name() -> None:
    names = ["ColSum", "RowSum", "silu", "swiglu"]
    assert near_matches("sum", names) == "did you mean ColSum or RowSum?"
    assert near_matches("sylu", names) == "did you mean silu or swiglu?"
    assert near_matches("gated17", ["batched", "rope"]) == "known: batched, rope"
    kernels = [
        "gated16",
        "gemm_fp8_swiglu",
        "gemm_lora",
        "gemm_rmsnorm",
        "gemm_rope",
        "gemm_swiglu",
    ]
    assert near_matches("swiglu", kernels) == "did you mean gemm_swiglu or gemm_fp8_swiglu?"
    assert near_matches("rmsnrom", kernels) == "did you mean gemm_rmsnorm?"
    assert near_matches("gemm_foo", kernels) == f"known: {', '.join(kernels)}"
    assert near_matches("zzz", names) == "known: ColSum, RowSum, silu, swiglu"
    many = [f"k{i:02}" for i in range(15)]
    assert near_matches("zzz", many) == f"known: {', '.join(many[:12])} and 3 more"
    assert near_matches("zzz", []) == ""
