"""The composer's trial: functions as models have them, drafted into specs and composed as given."""

from pathlib import Path

import pytest

from coda_agent.agent.authors.composer import Composer, load
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.primitives.errors import CodaError
from coda_agent.specs import load_spec
from coda_agent.specs.draft import Example, draft
from coda_agent.specs.source import axes_of, extracted
from tests.agent import model_functions

SOURCE = Path(model_functions.__file__)
REFUSED = {
    "causal_scores": "no output depends on 'q' by more than its tolerance",
    "mixtral_top1_gap": "topk: needs a whole row",
    "palm_z_loss": "return the reduction as an output and apply it in the next kernel",
    "token_loss": "needs a whole row",
    "int8_weight_only": "expected one of T, bfloat16",
} | dict.fromkeys(
    [
        "llama_gate_up",
        "llama_gate_up_fused",
        "gemma_mlp",
        "sd_geglu",
        "glu_conv",
        "qkv_projection",
        "qwen3_q_norm",
        "llama_rope",
        "lora_linear",
        "attention_scores",
        "dit_modulated",
        "dit_gated_residual",
        "vit_patch_embed",
        "vae_conv1x1_group_norm",
        "resnet_conv1x1",
        "clip_logits",
    ],
    "",
)
"""What no kernel of one product does, and a part of what is said about it."""


def example(text: str) -> tuple[str, Example]:
    """An argument of `EXAMPLES`, as `coda-agent spec new --shape` takes it."""
    name, _, rest = text.partition("=")
    sizes, _, dtype = rest.partition(":")
    axes = axes_of(sizes) or ()
    return name, Example(axes, dtype or ("T" if axes else "float32"))


@pytest.mark.parametrize("name", model_functions.EXAMPLES)
def test_a_models_function_is_composed_as_given(name: str) -> None:
    source = extracted(SOURCE.read_text("utf-8"), SOURCE.name, name)
    examples = dict(map(example, model_functions.EXAMPLES[name].split()))
    try:
        spec = load_spec(f"{name}.md", text=draft(source, examples, name))
        text = Composer().write(spec, lambda *_: None)
    except CodaError as refusal:
        said = " ".join(filter(None, (refusal.message, refusal.hint)))
        assert REFUSED.get(name, "composed") in said
    else:
        assert check_meaning(spec, load(text)) == []


def test_how_many_may_be_refused() -> None:
    assert len(model_functions.EXAMPLES) == 50
    assert len(REFUSED) <= 21
