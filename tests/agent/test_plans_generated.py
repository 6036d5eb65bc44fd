"""Plans of functions written at random: whatever the composer refuses, what is left is right.

Here a composer refuses by chance, which costs no drafts; `coda-agent score-judge plans` asks the
real one.
"""

import random
from collections.abc import Mapping

import pytest

from coda_agent.agent.plans.trace import Value
from coda_agent.evals.judge.plans import Written, fault, function, planned, tensors, tried
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
