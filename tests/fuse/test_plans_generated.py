"""Plans of functions written at random: whatever the composer refuses, what is left is right.

Here a composer refuses by chance, which costs no drafts; `coda-agent score-judge plans` asks the
real one.
"""

import random
from collections.abc import Mapping

import pytest

from coda_agent.evals.judge import plans
from coda_agent.evals.judge.plans import Written, fault, function, planned, tensors, tried
from coda_agent.fuse.cut import BESIDE
from coda_agent.fuse.trace import Value
from coda_agent.primitives.errors import ProgramError


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("seed", range(60))
def test_a_plan_is_right_whatever_the_composer_refuses(seed: int) -> None:
    text, args, chance = function(seed), tensors(seed), random.Random(seed)

    def compose(text: str, inputs: Mapping[str, Value], a: str) -> Written:
        lines = text.splitlines()
        if chance.random() < 0.4:
            at = chance.randrange(5, len(lines) + 1)
            raise ProgramError(f"plan:{at}: `{lines[at - 1].strip()}`: refused by chance")
        return Written(text)

    assert fault(text, args, planned(text, args, compose)) == "", text


TILES = """
{x} * F.silu(h0) | {x} + (h0 * r).tanh() | {x} * torch.sigmoid(h0) * h0 | {x} * (F.silu(x) + h0)
{x} + F.linear(F.silu(h0), v) | {x} * (F.silu(h0) * r) | F.linear({x}, w) * F.silu(h0)
"""


@pytest.mark.sampled(0.5)
def test_what_several_products_take_is_right_wherever_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "ELEMENTWISE", f"{plans.ELEMENTWISE.strip()}\n{TILES.strip()}")
    fired = 0
    for seed in range(200, 260):
        text, args = function(seed), tensors(seed)
        chance = random.Random(seed)

        def compose(text: str, *_: object, chance: random.Random = chance) -> Written:
            if chance.random() < 0.3:
                raise ProgramError("refused by chance")
            return Written(text)

        plan = planned(text, args, compose)
        fired += BESIDE in [note.rule for note in plan.notes]
        assert fault(text, args, plan) == "", text
    assert fired > 10


def test_a_wrong_kernel_is_found() -> None:
    text, args = function(3), tensors(3)
    plan = planned(text, args, lambda text, *_: Written(text))
    assert fault(text, args, plan) == ""
    kernel = plan.kernels[0]
    kernel.made = Written(kernel.text.replace("F.linear(x, w)", "F.linear(x, -w)"))
    assert "off by" in fault(text, args, plan)


def test_a_sum_that_is_zero_is_right_within_the_rounding_of_its_terms() -> None:
    assert tried(2, 400)["layer"] == "right"


def test_a_function_by_the_real_composer() -> None:
    assert [tried(1, number)["layer"] for number in range(3)] == ["right"] * 3
