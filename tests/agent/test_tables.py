"""Tests of agent/tables.py: the same rows for a terminal, as Markdown and as data."""

from coda_agent.agent.tables import by_head, columns, markdown, shape_text


def test_rows_are_aligned_escaped_and_named() -> None:
    rows = [("kernel", "why"), ("a_b", "x | <b>\n`y`"), ("longer", "")]
    assert columns(rows).splitlines()[0] == "kernel  why"
    assert columns(rows).splitlines()[-1] == "longer"
    assert markdown(rows).splitlines() == [
        "| kernel | why |",
        "|---|---|",
        r"| a\_b | x \| &lt;b&gt; \`y\` |",
        "| longer |  |",
    ]
    assert by_head(rows)[0] == {"kernel": "a_b", "why": "x | <b>\n`y`"}


def test_equal_extents_have_a_short_name() -> None:
    assert shape_text({"K": 4096, "M": 4096, "N": 4096}) == "4096³"
    assert shape_text({"K": 8, "M": 4, "N": 2}) == "4×2×8"


def test_columns_fit_a_width_and_keep_names_whole() -> None:
    rows = [("gemm_residual_partial_rmsnorm_bwd", "level", "what it is " * 9), ("a", "", "b" * 50)]
    lines = columns(rows, 80).splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith(rows[0][0] + "  level  what")
    assert " ".join(" ".join(lines[:3]).split()).split()[2:] == ("what it is " * 9).split()
    assert columns(rows).splitlines()[0].endswith("what it is")


def test_a_table_that_no_width_holds_is_turned() -> None:
    head = [f"head {i}" for i in range(9)]
    rows = [head, *([f"cell {i} of {x}" for i in range(9)] for x in "abcdefg")]
    assert columns(rows).splitlines()[0].split("  ")[0] == "head 0" and "\n\n" not in columns(rows)
    parts = columns(rows, 80).split("\n\n")
    assert parts[0].splitlines()[1].split("  ") == ["head 1", *(f"cell 1 of {x}" for x in "abcde")]
    assert parts[1].splitlines()[8].split("  ") == ["head 8", "cell 8 of f", "cell 8 of g"]
    assert max(map(len, "\n".join(parts).splitlines())) == 71 and len(parts) == 2
    long = columns([head, ["word " * 30, *head[1:]]], 40).splitlines()
    assert long[0].startswith("head 0  word word") and max(map(len, long)) <= 40
