"""The road of `coda-agent spec`: functions as models have them, drafted into specs and composed."""

import secrets
from pathlib import Path

import pytest

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import load_spec
from coda_agent.specs.draft import Example, draft
from coda_agent.specs.source import axes_of, extracted
from tests.functions import EXAMPLES, FILES

NEXT = "in the next kernel"
PRODUCT = "give the first product as an argument"
DRAWN = "give the numbers as an argument, or let the kernel draw them by a counter"
MASK = "leave such a mask to what reads the output"
ROWS = "return the tensor and what it takes of each row"
REFUSED = {
    "int8_weight_only": "multiply in float8_e4m3fn, or bring it to the type of A before",
    "mixtral_top1_gap": ROWS,
    "palm_z_loss": NEXT,
    "token_loss": ROWS,
    "vae_conv1x1_group_norm": ROWS,
    "rms_statistic": NEXT,
    "top_expert": ROWS,
    "bert_output_with_moments": ROWS,
    "bert_self_output": "take it of the accumulator",
    "conv1x1_nchw": "of 1x1 write F.linear(x, w), with the channels last",
    "dit_modulation_six": "compute it where c is written, and give the result as the input",
    "dropout_residual_train": DRAWN,
    "fp8_relu_no_casts": "write x.float() @ w.float().T",
    "lstm_cell": "store the weight's rows so that what meets is adjacent",
    "mistral_sliding_scores": MASK,
    "reward_scalar": "pad it with rows to 16",
    "rotary_half_q": "write -1 in a view",
    "st_moe_z_loss": NEXT,
    "switch_router_jitter": DRAWN,
    "vit_head_probs": ROWS,
    "vqvae_nearest": "return what out is made of, and make it with torch",
    "bernoulli_gate": DRAWN,
    "bert_pooled": "give that part as the argument",
    "causal_softmax_stats": NEXT,
    "dynamic_fp8_rowwise": NEXT,
    "gumbel_logits": DRAWN,
    "int8_linear": "bring it to the type of A before",
    "int8_requantise": "return it as float32, and cast it with torch",
    "kl_to_reference": ROWS,
    "lm_cross_entropy": ROWS,
    "lm_mean_loss": "return what it is made of, and reduce it with torch",
    "masked_key_scores": MASK,
    "mixtral_routing": ROWS,
    "peft_lora_two_products": PRODUCT,
    "simclr_similarity": "do this with torch in the call",
    "two_layer_mlp": PRODUCT,
    "dit_modulation_three": "or split by numbers",
    "lm_loss_per_token": NEXT,
}
"""What is not composed, and the part of the refusal that says what to do."""


def example(text: str) -> tuple[str, Example]:
    """An argument of `EXAMPLES`, as `coda-agent spec --shape` takes it."""
    name, _, rest = text.partition("=")
    sizes, _, dtype = rest.partition(":")
    axes = axes_of(sizes) or ()
    return name, Example(axes, dtype or ("T" if axes else "float32"))


@pytest.mark.one_in(32)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_models_function_is_composed_as_given(name: str) -> None:
    path = Path(FILES[name])
    source = extracted(path.read_text("utf-8"), path.name, name)
    examples = dict(map(example, EXAMPLES[name].split()))
    try:
        spec = load_spec(f"{name}.md", text=draft(source, examples, name))
        text = Composer().write(spec, lambda *_: None)
    except CodaError as refusal:
        said = " ".join(filter(None, (refusal.message, refusal.hint)))
        assert REFUSED.get(name, "composed") in said
    else:
        assert check_meaning(spec, read_programs(text), seed=secrets.randbits(62)) == []


def test_how_many_are_refused() -> None:
    """A function that a refusal's hint has mended, `x_next`, is composed."""
    assert len(EXAMPLES) == 269 and len(REFUSED) == 38 and REFUSED.keys() <= EXAMPLES.keys()
    assert not any(name.endswith("_next") for name in REFUSED)
