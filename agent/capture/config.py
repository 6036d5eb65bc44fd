"""What a Hugging Face configuration says of a layer. Families differ by data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coda_agent.agent.configuration import configuration, widths
from coda_agent.primitives.errors import CodaError

QKV, MLP, OUTPUT = frozenset("qkv"), frozenset({"gate", "up", "down"}), frozenset("o")
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu-approximate": "gelu_tanh",
}  # fmt: skip
_EXPERTS = re.compile(r"num_(local_)?experts|n_routed_experts|moe_\w+")


@dataclass(frozen=True)
class Family:
    """What models of one kind have in common.

    Attributes:
        norm: "rms"; "one_plus", whose weight is 1 + g; "layer"; or "modulated", a layer norm whose
            scale and shift a condition gives.
        gated: Whether the MLP multiplies by a gate.
        rotary, head_norms: Whether queries and keys are rotated, and normalised before that.
        post_norms: Whether what joins the residual stream is normalised first.
        biased: Projections that have a bias.
        optional: Projections that have one where a key of the configuration is true.
        keys: What the configuration calls the keys that Llama has.
        defaults: Of keys that the configuration may lack.
        required: Values that keys must have where they are there.
    """

    norm: str = "rms"
    gated: bool = True
    rotary: bool = True
    head_norms: bool = False
    post_norms: bool = False
    biased: frozenset[str] = frozenset()
    optional: Mapping[str, frozenset[str]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    required: Mapping[str, object] = field(default_factory=dict)


_ATTENTION = {"attention_bias": QKV | OUTPUT}
_GEMMA: dict[str, object] = {
    "hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
FAMILIES = {
    "llama": Family(optional={**_ATTENTION, "mlp_bias": MLP}, defaults={"rms_norm_eps": 1e-6}),
    "mistral": Family(defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8}),
    "qwen2": Family(biased=QKV, defaults={"rms_norm_eps": 1e-6}),
    "qwen3": Family(
        head_norms=True, optional=_ATTENTION, defaults={"rms_norm_eps": 1e-6, "head_dim": 128}
    ),
    "gemma2": Family(
        norm="one_plus", post_norms=True, optional=_ATTENTION,
        keys={"hidden_activation": "hidden_act"},
        defaults=_GEMMA | {"vocab_size": 256000, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Family(
        norm="one_plus", post_norms=True, head_norms=True, optional=_ATTENTION,
        keys={"hidden_activation": "hidden_act"}, defaults=_GEMMA | {"vocab_size": 262208},
    ),
    "gpt2": Family(
        norm="layer", gated=False, rotary=False, biased=QKV | OUTPUT | MLP,
        keys={
            "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner":
            "intermediate_size", "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5},
        required={"add_cross_attention": False},
    ),
    "dit": Family(
        norm="modulated", gated=False, rotary=False, biased=OUTPUT | MLP | {"head"},
        optional={"attention_bias": QKV},
        keys={
            "attention_head_dim": "head_dim", "activation_fn": "hidden_act",
            "norm_eps": "rms_norm_eps",
        },
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": None},
        required={"norm_elementwise_affine": False, "cross_attention_dim": None},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A Transformer's layer, attention left out.

    Attributes:
        name: The model's, as specs are named.
        family: What its kind of model has.
        sizes: Widths, as `configuration.widths` names them.
        biased: Projections that have a bias, among q, k, v, o, gate, up, down and head.
        activation: Of the MLP: silu, relu, gelu or gelu_tanh.
        epsilon: Of its norms.
        soft_cap: Logits are this times tanh of their quotient by it; None without.
    """

    name: str
    family: Family
    sizes: Mapping[str, int]
    biased: frozenset[str]
    activation: str
    epsilon: float
    soft_cap: float | None


def read(path: Path) -> Layer:
    """The layer of a configuration.

    Args:
        path: A Hugging Face config.json, or the folder of one.

    Raises:
        CodaError: it cannot be read, lacks something, or is of a model that is not known here.
    """
    return layer_of(configuration(path), path)


def layer_of(about: Mapping[str, Any], path: Path) -> Layer:
    """The layer of a configuration that is read already; raises as `read`, and says `path`."""
    kind = str(about.get("model_type", "")).removesuffix("_text")
    if about.get("norm_type") == "ada_norm_zero":
        kind = "dit"
    if experts := [k for k, v in about.items() if _EXPERTS.fullmatch(k) and v not in (None, 0, 1)]:
        raise CodaError(f"{path}: {experts[0]} says that the MLP is a mixture of experts",
                        hint="its products are grouped, and no kernel here is")  # fmt: skip
    if kind not in FAMILIES:
        said = about.get("model_type") or about.get("_class_name")
        raise CodaError(
            f"{path}: {said!r} is no architecture known here, expected one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    known = dict(about)
    for own, wanted in family.keys.items():
        if about.get(own) is not None:
            known[wanted] = about[own]
    known = {**family.defaults, **known}
    if odd := [k for k, v in family.required.items() if k in about and about[k] != v]:
        expected = family.required[odd[0]]
        raise CodaError(f"{path}: {odd[0]} is {about[odd[0]]!r}, expected {expected!r}")
    _complete(kind, known)
    activation, epsilon = known.get("hidden_act"), known.get("rms_norm_eps")
    if activation not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATIONS)
        raise CodaError(f"{path}: the activation is {activation!r}, expected one of {names}")
    if not isinstance(epsilon, float | int) or epsilon <= 0:
        raise CodaError(f"{path}: the norms' epsilon is {epsilon!r}, expected a positive number")
    optional = [names for key, names in family.optional.items() if known.get(key)]
    cap = known.get("final_logit_softcapping")
    folder = path if path.is_dir() else path.parent if path.name == "config.json" else None
    name = re.sub(r"[^a-z0-9]+", "_", (folder.resolve().name if folder else path.stem).lower())
    return Layer(
        name=f"{kind}_{name}".strip("_") if not name[:1].isalpha() else name.strip("_"),
        family=family,
        sizes=widths(known, path),
        biased=family.biased.union(*optional),
        activation=_ACTIVATIONS[activation],
        epsilon=float(epsilon),
        soft_cap=float(cap) if cap else None,
    )


def _complete(kind: str, known: dict[str, Any]) -> None:
    """Sets what follows from other keys."""
    if kind == "dit":
        heads, head = known.get("num_attention_heads"), known.get("head_dim")
        channels, patch = known.get("out_channels"), known.get("patch_size")
        if isinstance(heads, int) and isinstance(head, int):
            known["hidden_size"] = heads * head
        if isinstance(channels, int) and isinstance(patch, int):
            known["vocab_size"] = channels * patch * patch
    hidden = known.get("hidden_size")
    if kind in ("dit", "gpt2") and isinstance(hidden, int):
        known.setdefault("intermediate_size", 4 * hidden)
