"""Mistakes that authors make are named by the edit that undoes them; programs and specs are here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from coda_agent.agent.judge.meaning import check_meaning, meaning_fault
from coda_agent.agent.judge.records import RefusedTile
from coda_agent.agent.judge.replaying import expression
from coda_agent.evals.judge import by_hand
from coda_agent.primitives import ColVector, Tile, epilogue, erf, exp, maximum, tanh
from coda_agent.primitives.inspect import describe
from tests.agent.judge.test_meaning import findings, spec_of
from tests.written import spec

# The reference, a wrong program, the fault's name, and what the sentence holds.
MISTAKES = [
    ("F.elu(z) * r", "where(greater(acc, 0.0), acc, exp(minimum(acc, 0.0))) * r", "wrong_operation", "should be `expm1"),
    ("(z + 2.0) * r", "acc * r", "missing_term", r"`acc \+ 2` is due"),
    ("torch.erf(z) * r", "tanh(acc) * r", "wrong_operation", r"`tanh\(acc\)` should be `erf\(acc\)`"),
    ("z.clamp(-128, 127) * r", "clamp(acc, -128.0, 128.0) * r", "wrong_constant", "128 in .* should be 127"),
    ("torch.sigmoid(z * r)", "sigmoid(acc) * r", "misplaced", "`acc · r`"),
    ("torch.sigmoid(z) * r", "sigmoid(acc * r)", "misplaced", r"`sigmoid\(acc\) · r`|not in"),
    ("z * r + 1.0", "r + acc + 1.0", "wrong_operation", r"`r \+ acc` should be `r · acc`"),
    ("r - z", "r + acc", "wrong_sign", "- is due"),
    ("z * r", "where(greater(row_index(acc), 20.0), acc, acc * r)", "extra_term", r"the condition of `where\(.*` is too much: `acc · r` is due"),
    ("z * r", "minimum(acc, 1.0) * r", "extra_term", r"a bound of `minimum\(acc, 1\)` is too much: `acc` is due"),
    ("z * r", "clamp(acc * r, -3.0, 3.0)", "extra_term", r"a bound of .* is too much: `acc · r` is due"),
    ("torch.sigmoid(z) * r + torch.sigmoid(-z)", "maximum(sigmoid(acc), 0.01) * r + maximum(sigmoid(-acc), 0.01)", "wrong_constant", "the constant 0.01 in .* is too large: it is met"),
    ("F.softplus(z) * r", "where(greater(acc, 6.0), acc, softplus(acc)) * r", "extra_term", r"the condition of `where\(.*` is too much: `softplus\(acc\)` is due"),
    ("torch.where(z > r, -torch.inf, z).unflatten(1, (-1, 4)).amax(2).repeat_interleave(4, 1)", "group_max(where(greater(acc, r), -1e4, acc), 4)", "wrong_constant", r"the constant -10000 in .* should be -inf"),
    ("z * r", "acc * r * r", "doubled_operand", "`r` enters twice"),
    ("z * r", "2.5 * acc * r", "constant_factor", "`2.5` is too much"),
    ("torch.relu(z) + r", "maximum(acc, 0.5) + r", "wrong_constant", "0.5 .* should be 0"),
    ("torch.round(z * 4.0) * r", "floor(acc * 4.0) * r", "wrong_operation", r"should be `round_even\(acc · 4\)`"),
    ("torch.log1p(z * z) * r", "log(1.0 + acc * acc) * r", "cancellation", "digits are lost"),
    ("torch.exp(z * 4.0 - r) * r", "exp(acc * 4.0 - r)", "missing_operand", "`r` is left out"),
    ("F.softplus(z) * r", "log(1.0 + exp(acc)) * r", "cancellation", r"the rounding of `1 \+ exp\(acc\)`"),
    ("z * r - z.unflatten(1, (-1, 8)).amax(2).repeat_interleave(8, 1)", "acc * r - group_max(acc, 16)", "wrong_constant", r"should be `group_max\(acc, 8\)`"),
    ("z * r * z.unflatten(1, (-1, 2, 2)).flip(2).flatten(1)", "acc * r * exchange(acc, 4)", "wrong_constant", r"should be `exchange\(acc, 2\)`"),
    ("r - z.unflatten(1, (-1, 4)).sum(2).repeat_interleave(4, 1)", "r - group_max(acc, 4)", "wrong_operation", r"should be `group_sum\(acc, 4\)`"),
    ("torch.atan2(z, r - 1.0)", "atan(acc / (r - 1.0))", "wrong_operation", r"should be `atan2\(acc, r - 1\)`"),
    ("r - z.unflatten(1, (-1, 8)).mean(2).repeat_interleave(8, 1)", "r - group_mean(acc, 16)", "wrong_constant", "is the mean of 16: that of 8 is due"),
    ("torch.log(z * z) + torch.log(r)", "log(acc * acc + 1e-4) + log(r + 1e-4)", "wrong_constant", "the constant 0.0001 is too much where it is added"),
    ("z * r + z.flip(0).flip(0) * z", "acc * rsqrt(r) * r + acc * acc * rsqrt(r)", "extra_term", r"the factor `rsqrt\(r\)` is too much"),
    ("z * r", "acc * absolute(r)", "doubled_operand", r"`absolute` is too much in `absolute\(r\)`"),
    ("z * r", "where(greater_equal(column_index(acc), 8000.0), acc, acc * r)", "extra_term", r"the condition of `where\([^+]*8000\)[^+]*` is too much"),
    ("torch.atan2(z, r)", "1.5707963267948966 - atan(r * (1.0 / acc))", "wrong_function", "wrong where `acc` is negative, and only there"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "fault", "says"), MISTAKES)
def test_a_mistake_is_named(right: str, wrong: str, fault: str, says: str) -> None:
    (finding,) = findings(spec_of(right), wrong)
    assert finding.where["fault"] == fault, finding.message
    assert re.search(says, finding.message.rpartition("; ")[2]), finding.message


def test_an_operand_in_the_place_of_another_is_named() -> None:
    made = spec(
        "z = (A @ B.T).float(); return {'O': (z * s[:, None] - (r * r * s)[:, None]).to(A.dtype)}",
        {"r": "{shape: [M], dtype: float32}", "s": "{shape: [M], dtype: float32}"},
        name="k", header="types: {T: [bfloat16]}\ncheck_shapes: [{M: 33, N: 48, K: 16}]\n",
    )  # fmt: skip

    @epilogue(O=Tile)
    def k(acc: Any, r: ColVector, s: ColVector) -> Any:
        return {"O": acc * r - r * r * s}

    (finding,) = check_meaning(made, {"k": k}, seed=3)
    assert finding.where["fault"] == "missing_operand"
    assert "`s` is due where `r` stands, in `acc · r`" in finding.message


def test_what_is_approximated_is_told_from_what_is_rounded_or_wrong() -> None:
    # Winitzki's formula for the inverse of the error function, off by 2e-3 at most.
    square = "log(1.0 - 0.81 * tanh(acc) * tanh(acc))"
    first = f"(4.330747 + 0.5 * {square})"
    nearly = f"copysign(sqrt(sqrt({first} * {first} - {square} / 0.147) - {first}), acc) * r"
    spec = spec_of("torch.erfinv(0.9 * torch.tanh(z)) * r", stored="float32")
    (finding,) = findings(spec, nearly, seed=5)
    assert finding.where["fault"] == "approximated"
    assert finding.message.endswith(
        'The program lacks what the reference calls: `ptx("erfinv", …)`, whose instructions may be off'
        " by 2^-9. To 2.4e-07 of each element it has to be the function"
    )
    (finding,) = findings(spec, f"to_bfloat16({nearly[:-4]}) * r", seed=5)
    assert finding.where["fault"] != "approximated", finding.message  # it jumps
    (finding,) = findings(
        spec_of("torch.exp(z) * r + torch.cos(z) * 0.001"), "exp(acc) * r", seed=5
    )
    assert finding.where["fault"] == "approximated" and "calls: `cos`." in finding.message


def test_a_threshold_is_not_blamed_for_a_branch_that_is_approximated() -> None:
    """Four terms of erfc's series beyond 6. Where the other branch is taken up to 12, float64 is
    right, and float32 is not."""
    x, y = "minimum(acc, 12.0)", "maximum(acc, 1.0)"
    q = f"(1.0 / ({y} * {y}))"
    series = f"0.5641895835477563 / {y} * (1.0 + {q} * (-0.5 + {q} * (0.75 - 1.875 * {q})))"
    (finding,) = findings(
        spec_of("torch.special.erfcx(z) * r", stored="float32"),
        f"where(greater(acc, 6.0), {series}, exp({x} * {x}) * erfc({x})) * r",
        seed=3,
    )
    assert finding.where["fault"] == "approximated", finding.message
    assert finding.where["there"]["acc"] > 6


def test_nothing_is_named_where_no_single_edit_is_enough() -> None:
    (finding,) = findings(spec_of("torch.sin(z) * r + torch.cos(z)"), "acc * r * 0.5 + 1.0 / r")
    assert finding.where["fault"] == "wrong_function"
    assert "no simple fault explains it" in finding.message


def test_a_value_of_which_nothing_should_be_left_is_no_factor() -> None:
    for seed in (9, 10, 26):  # on which a fit had found 10^-16 times acc
        (finding,) = findings(spec_of("z * 0.0 + 1.0 + r"), "exp(acc) + r", seed=seed)
        assert finding.where["fault"] != "constant_factor", finding.message


def test_a_finding_holds_what_the_program_reads_and_its_neighbours() -> None:
    (finding,) = findings(spec_of("z * r"), "acc + r")
    where = finding.where
    acc, r = where["there"]["acc"], where["there"]["r"]
    assert where["got"] == pytest.approx(acc + r)
    assert where["expected"] == pytest.approx(acc * r)
    rows = {row: (got, expected) for row, got, expected in where["rows"]}
    assert len(rows) == 4
    assert rows[where["row"]] == (where["got"], where["expected"])
    about = {"program": "k", "dtype": "bfloat16", "tile": "128x128"}
    kept = RefusedTile.of(finding.model_copy(update={"where": where | about}))
    assert not {"there", "rows"} & set(kept.where)


def test_an_expression_is_written_as_an_author_would() -> None:
    @epilogue(O=Tile)
    def k(acc, C: Tile):
        return {"O": maximum(erf(acc - C) * 2.0, tanh(exp(-acc)))}

    root = k.graph.outputs["O"]
    assert expression(k.graph, root, 80) == "maximum(erf(acc - C) · 2, tanh(exp(-acc)))"
    assert expression(k.graph, root, 20) == "maximum(…, …)"
    assert "erf" in describe(k.graph)


def test_a_sample_of_the_set_is_named() -> None:
    right = by_hand.right_programs(by_hand.AUTHORS)
    assert len(right) >= 15
    every = by_hand.written(by_hand.AUTHORS, right)
    assert len(every) >= 60 and len({m.program.digest for m in every}) == len(every)
    named = 0
    for m in every[::8]:
        found = meaning_fault(m.wrong.spec, m.wrong.program, m.wrong.binding, 1)
        assert found is not None
        said = found[0].message.rpartition("; ")[2]
        named += found[0].where["fault"] in m.faults and re.search(m.says, said) is not None
    assert named >= len(every[::8]) - 1
