"""Every causal model of transformers that builds from a tiny configuration: right by kernels, or left
with a reason.

Both sides run in float32, the kernels by the interpreter: in bfloat16 a router that picks another
expert is as far off as a wrong formula.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coda_agent.layers import apply_coda_kernels
from coda_agent.runtime.function import exact
from tests.layers.tiny import SIZES, distance, results, spread, tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of a hundred families' own code
OTHER_NAMES: dict[str, Any] = {
    **dict.fromkeys(("n_embd", "d_model", "dim", "n_inner", "ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "attention_hidden_size"), 64),
    **dict.fromkeys(("n_layer", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_head", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("n_positions", "n_ctx"), 128),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state", "rotary_dim"), 8),
    "expand": 2,
    "mamba_d_head": 32,
}
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 64),
    "num_experts_per_tok": 2,
}
NOT_NEUTRAL: dict[str, Any] = {
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "logit_scale": 0.25,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 4.0,
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "resid_pdrop", "residual_dropout"), 0.1
    ),
}
"""What hides a difference at its default."""
KINDS = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
SLOW = {"falcon_h1"}
"""Takes 8 s, as all others 25."""
MASK = torch.ones(2, 24, dtype=torch.int64)
MASK[1, -5:] = 0


@cache
def build(kind: str) -> Any:
    """Return a family's small model that runs; None where no configuration of ours gives one."""
    try:
        own = AutoConfig.for_model(kind)
        more = {k: v for k, v in {**NOT_NEUTRAL, **OTHER_NAMES}.items() if hasattr(own, k)}
    except Exception:  # needs a package, or arguments
        return None
    plain = {k: v for k, v in SIZES.items() if k != "head_dim"}
    for sizes in (
        {**SIZES, **EXPERTS, **more},
        {**plain, **EXPERTS, **more},
        {**SIZES, **more},
        SIZES,
    ):
        try:
            config = AutoConfig.for_model(kind, **sizes)
            config._attn_implementation = "eager"
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > 3_000_000:
                continue
            torch.manual_seed(0)
            model = spread(AutoModelForCausalLM.from_config(config)).bfloat16()
            results(copy.deepcopy(model), attention_mask=MASK)
        except Exception:  # of the family's own code
            continue
        return model
    return None


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def test_a_family_is_right_or_left(kind: str) -> None:
    model = copy.deepcopy(build(kind))
    if model is None:
        return  # `test_most_families_are_built` counts them
    theirs = results(copy.deepcopy(model).float(), attention_mask=MASK)
    try:
        report = apply_coda_kernels(model)
    except TypeError as error:
        assert "expected a causal language model of Llama's structure" in str(error)
        return
    token = exact.set(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = results(model.float(), attention_mask=MASK)
    exact.reset(token)
    assert max(distance(ours, theirs).values()) < 1e-3, report
    assert not [w for w in caught if "runs by the model's own code" in str(w.message)]
    assert all(report.left.values())


def test_most_families_are_built() -> None:
    kinds = {*KINDS} - SLOW
    built = [kind for kind in kinds if build(kind) is not None]
    assert len(built) > 0.6 * len(KINDS)
    assert {"granite", "smollm3", "hunyuan_v1_dense", "gemma3_text"} <= {*built}


def test_what_is_left_says_by_how_much() -> None:
    report = apply_coda_kernels(tiny("granite", residual_multiplier=0.22, logits_scaling=8.0))
    assert not report.replaced
    assert report.left["layers.0"].startswith("its own code gives another result (by ")
    assert report.left["lm_head"].startswith("its own loss is another (by ")


def test_layers_are_proved_one_by_one() -> None:
    report = apply_coda_kernels(tiny("smollm3", num_hidden_layers=4))
    rotated, plain = "norm + QKV + RoPE", "norm + QKV (RoPE is the model's)"
    kinds = [report.replaced[f"layers.{i}"].partition(", ")[0] for i in range(4)]
    assert kinds == [rotated, rotated, rotated, plain]
