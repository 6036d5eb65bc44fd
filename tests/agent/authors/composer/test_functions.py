"""Functions as models have them, read as graphs: composed with the function's numbers, or refused.

Of the 269 the road by a drafted spec refuses 38.
"""

from typing import Any

import pytest
import torch

from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.subgraph import compose_graph
from coda_agent.specs.source import axes_of
from tests.agent.authors.composer.test_subgraph import run, traced
from tests.functions import EXAMPLES, FUNCTIONS

ROW = "uses a row reduction again|needs a whole row"
RANDOM = "draws random numbers"
SECOND = "second GEMM"
REFUSED = {
    "bernoulli_gate": RANDOM,
    "bert_output_with_moments": ROW,
    "bert_self_output": ROW,
    "causal_softmax_stats": ROW,
    "conv1x1_nchw": "has no product",
    "dropout_residual_train": RANDOM,
    "dynamic_fp8_rowwise": ROW,
    "gumbel_logits": RANDOM,
    "int8_requantise": "casts to torch.int8",
    "kl_to_reference": ROW,
    "lm_cross_entropy": "a size as a number",
    "lm_loss_per_token": ROW,
    "lm_mean_loss": ROW,
    "lora_merged_forward": "add the products of A alike",
    "lstm_cell": "moves values between rows or columns",
    "mixtral_routing": "a size as a number",
    "mixtral_top1_gap": "a size as a number",
    "palm_z_loss": ROW,
    "peft_lora_two_products": SECOND,
    "reward_scalar": "are alike",
    "rms_statistic": ROW,
    "st_moe_z_loss": ROW,
    "switch_router_jitter": RANDOM,
    "token_loss": "a size as a number",
    "top_expert": ROW,
    "two_layer_mlp": SECOND,
    "vae_conv1x1_group_norm": "is no elementwise operation",
    "vit_head_probs": ROW,
    "vqvae_nearest": ROW,
}
"""What no single kernel computes, and the reason that its refusal gives."""
EIGHT = {"fp8", "kv_cache"}
"""Parts of names of what is stored in 8 bits: there the last of three or four bits may differ."""


def drawn(text: str) -> dict[str, torch.Tensor]:
    """Arguments of a function: of about 1 in size, positive where a root may be taken."""
    generator = torch.Generator().manual_seed(0)
    args: dict[str, torch.Tensor] = {}
    for part in text.split():
        name, _, rest = part.partition("=")
        sizes, _, dtype = rest.partition(":")
        shape = [int(axis) for axis in axes_of(sizes) or ()]
        if dtype.startswith("int"):
            args[name] = torch.randint(0, 8, shape, generator=generator)
        else:
            args[name] = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    return args


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_models_function_is_composed_as_a_graph(name: str) -> None:
    args = drawn(EXAMPLES[name])
    numbers = {x: 7 for x in args if x in ("seed", "offset")}
    names = [x for x in args if x not in numbers]
    tensors = tuple(args[x] for x in names)

    def function(*given: torch.Tensor) -> Any:
        return FUNCTIONS[name](**dict(zip(names, given, strict=True)), **numbers)

    graph = traced(torch.func.functionalize(function), tensors)
    if name in REFUSED:
        with pytest.raises(Refusal, match=REFUSED[name]):
            compose_graph(graph)
        return
    composition = compose_graph(graph)
    expected = function(*tensors)
    expected = [*expected] if isinstance(expected, tuple | list) else [expected]
    near = 0.05 if any(part in name for part in EIGHT) else 1e-5
    for got, value in zip(run(composition, graph, tensors), expected, strict=True):
        value = value.double()
        scale = float(value[value.isfinite()].abs().max())
        torch.testing.assert_close(got, value, rtol=near, atol=near * scale)
