"""The composer's trial: functions as models have them, drafted into specs and composed as given.

When the second fifty were first tried, 38 were composed; mends of general use made it 45.
"""

from pathlib import Path

import pytest

from coda_agent.agent.authors.composer import Composer, load
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.primitives.errors import CodaError
from coda_agent.specs import load_spec
from coda_agent.specs.draft import Example, draft
from coda_agent.specs.source import axes_of, extracted
from tests.agent import model_functions, more_model_functions

EXAMPLES = model_functions.EXAMPLES | more_model_functions.EXAMPLES
SOURCES = {name: model_functions.__file__ for name in model_functions.EXAMPLES} | {
    name: more_model_functions.__file__ for name in more_model_functions.EXAMPLES
}
ROWS = "return the tensor and what it takes of each row"
REFUSED = {
    # Of the first fifty.
    "causal_scores": "leave such a mask to what reads the output",
    "int8_weight_only": "multiply in float8_e4m3fn, or bring it to the type of A before",
    "lora_linear": "fold the factor into the weight once",
    "mixtral_top1_gap": ROWS,
    "palm_z_loss": "return the reduction as an output and apply it in the next kernel",
    "resnet_conv1x1": "return it as the product has it",
    "token_loss": ROWS,
    "vae_conv1x1_group_norm": ROWS,
    # Of the second fifty.
    "flux_single_block_out": "give the first product as an argument",
    "rms_statistic": "return the reduction as an output and apply it in the next kernel",
    "top_expert": ROWS,
}
"""What is not composed, and the part of the refusal that says what to do."""


def example(text: str) -> tuple[str, Example]:
    """An argument of `EXAMPLES`, as `coda-agent spec new --shape` takes it."""
    name, _, rest = text.partition("=")
    sizes, _, dtype = rest.partition(":")
    axes = axes_of(sizes) or ()
    return name, Example(axes, dtype or ("T" if axes else "float32"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_models_function_is_composed_as_given(name: str) -> None:
    path = Path(SOURCES[name])
    source = extracted(path.read_text("utf-8"), path.name, name)
    examples = dict(map(example, EXAMPLES[name].split()))
    try:
        spec = load_spec(f"{name}.md", text=draft(source, examples, name))
        text = Composer().write(spec, lambda *_: None)
    except CodaError as refusal:
        said = " ".join(filter(None, (refusal.message, refusal.hint)))
        assert REFUSED.get(name, "composed") in said
    else:
        assert check_meaning(spec, load(text)) == []


def test_how_many_are_refused() -> None:
    assert len(EXAMPLES) == 100
    assert len(REFUSED.keys() & model_functions.EXAMPLES.keys()) <= 7
    assert len(REFUSED.keys() & more_model_functions.EXAMPLES.keys()) <= 3
