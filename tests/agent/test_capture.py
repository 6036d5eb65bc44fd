"""Models' layers, by their configurations."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from coda_agent.agent.capture.config import Layer, read
from coda_agent.agent.capture.pieces import pieces
from coda_agent.agent.capture.pullback import pulled_back
from coda_agent.agent.capture.steps import Captured, _Piece
from coda_agent.agent.cli import app
from coda_agent.agent.plans.cut import Kernel
from coda_agent.agent.plans.trace import record
from coda_agent.specs import load_spec
from coda_agent.specs.admission import admit

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
SMALL = LLAMA | {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 64,
}  # fmt: skip
GEMMA = SMALL | {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
GPT2 = {
    "model_type": "gpt2", "n_embd": 48, "n_head": 6, "n_inner": None, "vocab_size": 50,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
DIT = {
    "_class_name": "Transformer2DModel", "norm_type": "ada_norm_zero", "attention_bias": True,
    "attention_head_dim": 8, "num_attention_heads": 6, "activation_fn": "gelu-approximate",
    "norm_elementwise_affine": False, "cross_attention_dim": None, "out_channels": 8,
    "patch_size": 2,
}  # fmt: skip
FAMILIES = {
    "llama": SMALL | {"mlp_bias": True},
    "mistral": SMALL | {"model_type": "mistral", "head_dim": None},
    "qwen2": SMALL | {"model_type": "qwen2"},
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 8},
    "gemma2": GEMMA | {"model_type": "gemma2"},
    "gemma3": {"model_type": "gemma3", "text_config": GEMMA | {"model_type": "gemma3_text"}},
    "gpt2": GPT2,
    "dit": DIT,
}


def layer_of(about: object, folder: Path) -> Layer:
    path = folder / "tiny.json"
    path.write_text(json.dumps(about))
    return read(path)


def drawn(layer: Layer, piece: str) -> dict[str, Tensor]:
    """Its tensors in float64."""
    made = torch.Generator().manual_seed(len(piece))
    found: dict[str, Tensor] = {}
    for name, (shape, kind) in next(
        p for p in pieces(layer, 2, 5) if p.name == piece
    ).inputs.items():
        if kind == "int64":
            found[name] = torch.randint(0, layer.sizes["vocabulary"], shape, generator=made)
        else:
            found[name] = torch.randn(shape, generator=made, dtype=torch.float64) / shape[-1] ** 0.5
    return found


class Reference:
    """What models' documents say, by modules of torch; `kind` is asked at each place."""

    def __init__(self, kind: str, eps: float) -> None:
        self.kind, self.eps = kind, eps
        self.gemma = kind.startswith("gemma")

    def norm(self, x: Tensor, t: dict[str, Tensor], at: str, eps: float | None = None) -> Tensor:
        if self.kind == "gpt2":
            module = nn.LayerNorm(x.shape[-1], self.eps).double()
            module.load_state_dict({"weight": t[f"g_{at}"], "bias": t[f"offset_{at}"]})
            return module(x)
        if self.kind == "dit":
            mean = x.mean(-1, keepdim=True)
            x = (x - mean) / (x.var(-1, unbiased=False, keepdim=True) + (eps or 1e-6)).sqrt()
            return torch.stack(
                [x[b] * (1 + t[f"scale_{at}"][b]) + t[f"shift_{at}"][b] for b in range(2)]
            )
        return self.rms(x, t[f"g_{at}"])

    def rms(self, x: Tensor, g: Tensor) -> Tensor:
        module = nn.RMSNorm(x.shape[-1], self.eps).double()
        module.load_state_dict({"weight": g + 1 if self.gemma else g})
        return module(x)

    def joined(self, h: Tensor, y: Tensor, t: dict[str, Tensor], of: str) -> Tensor:
        if self.gemma:
            y = self.rms(y, t[f"g_post_{of}"])
        if self.kind == "dit":
            y = torch.stack([t[f"mix_{of}"][b] * y[b] for b in range(2)])
        return h + y

    def linear(self, x: Tensor, t: dict[str, Tensor], name: str, *, biased: bool) -> Tensor:
        assert (f"b_{name}" in t) == biased
        y = torch.einsum("bsk,nk->bsn", x, t[f"w_{name}"])
        return y + t[f"b_{name}"] if biased else y

    def layer(self, t: dict[str, Tensor]) -> list[Tensor]:
        own, plain = self.kind in ("gpt2", "dit"), self.kind in ("llama", "gpt2", "dit")
        h = self.joined(
            t["residual"], self.linear(t["attended"], t, "o", biased=own), t, "attention"
        )
        n = self.norm(h, t, "mlp", 1e-5)
        up = self.linear(n, t, "up", biased=plain)
        if own:
            up = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            gate = self.linear(n, t, "gate", biased=plain)
            up = (nn.GELU("tanh")(gate) if self.gemma else gate / (1 + (-gate).exp())) * up
        h = self.joined(h, self.linear(up, t, "down", biased=plain), t, "mlp")
        n = self.norm(h, t, "next")
        biased = own or self.kind == "qwen2"
        return [h, *(self.linear(n, t, x, biased=biased) for x in "qkv")]

    def heads(self, t: dict[str, Tensor], width: int) -> list[Tensor]:
        found: list[Tensor] = []
        for name in "qk":
            x = t[name].reshape(*t[name].shape[:-1], -1, width)
            if self.kind in ("qwen3", "gemma3"):
                x = self.rms(x, t[f"g_{name}"])
            half, turned = width // 2, torch.empty_like(x)
            for j in range(width):
                other = -x[..., j + half] if j < half else x[..., j - half]
                turned[..., j] = x[..., j] * t["cos"][:, None, j] + other * t["sin"][:, None, j]
            found.append(turned)
        return found

    def exit(self, t: dict[str, Tensor]) -> Tensor:
        down = self.linear(t["active"], t, "down", biased=self.kind in ("llama", "gpt2", "dit"))
        logits = self.norm(self.joined(t["residual"], down, t, "mlp"), t, "next")
        logits = self.linear(logits, t, "head", biased=self.kind == "dit")
        if self.kind == "dit":
            return logits
        if self.kind == "gemma2":
            logits = 30 * torch.tanh(logits / 30)
        chosen = logits.exp().gather(-1, t["target"][..., None])[..., 0]
        return -(chosen / logits.exp().sum(-1)).log().mean()


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_computes_what_its_model_does(kind: str, tmp_path: Path) -> None:
    layer = layer_of(FAMILIES[kind], tmp_path)
    reference = Reference(kind, 1e-5)
    known = {p.name: p for p in pieces(layer, 2, 5)}
    assert ("heads" in known) == (kind not in ("gpt2", "dit"))
    for name, piece in known.items():
        t = drawn(layer, name)
        expected = (
            reference.heads(t, layer.sizes["head"]) if name == "heads"
            else reference.layer(t) if name == "layer" else [reference.exit(t)]
        )  # fmt: skip
        returned = piece.function(layer, t)
        got = [returned] if isinstance(returned, Tensor) else [*returned]
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            # The loss alone is taken of float32 logits.
            tolerance = 1e-6 if one.dtype == torch.float32 else 1e-12
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The workspace and the document of a captured Llama-3 8B."""
    root = tmp_path_factory.mktemp("workspace")
    model = root / "Llama-3-8B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.chdir(root)
        assert CliRunner().invoke(app, ["init", str(root / "work")]).exit_code == 0
        patch.chdir(root / "work")
        result = CliRunner().invoke(app, ["capture", str(model), "--json"])
        assert result.exit_code == 0, result.output
        again = CliRunner().invoke(app, ["capture", str(tmp_path_factory.mktemp("no"))])
    assert "cannot be read" in again.output
    return root / "work", json.loads(result.stdout)


def step(document: dict[str, Any], piece: str, name: str) -> dict[str, Any]:
    (found,) = [s for s in document["steps"] if (s["piece"], s["name"]) == (piece, name)]
    return found


@pytest.mark.sampled(0.3)
def test_a_llama_layer_has_four_kernels_three_of_them_accepted(
    llama: tuple[Path, dict[str, Any]],
) -> None:
    _, document = llama
    forward = {
        s["name"]: (s["kernel"], s["accepted"])
        for s in document["steps"]
        if (s["piece"], s["direction"]) == ("layer", "forward") and s["kernel"]
    }
    assert forward == {
        "output": ("gemm_residual_partial_rmsnorm", True),
        "mlp": ("llama_3_8b_mlp", False),
        "down": ("gemm_residual_partial_rmsnorm", True),
        "projections": ("gemm_rmsnorm", True),
    }
    for name in ("output_bwd", "down_bwd"):
        found = step(document, "layer", name)
        assert (found["kernel"], found["accepted"]) == ("gemm_residual_partial_rmsnorm_bwd", True)
    # A training step keeps the scaled product of gate and up, and so comes to the paper's kernels.
    for name, known in (("mlp_fwd", "rmsnorm_swiglu"), ("mlp_bwd", "partial_swiglu_bwd")):
        found = step(document, "layer", name)
        assert (found["kernel"], found["accepted"]) == (f"gemm_{known}", True)
    # It keeps the logits' product too.
    assert step(document, "exit", "head_fwd")["kernel"] == "gemm_rmsnorm_partial_cross_entropy"


def test_bytes_and_seconds_are_those_of_the_tensors(llama: tuple[Path, dict[str, Any]]) -> None:
    _, document = llama
    m, d, f = 8192, 4096, 14336
    output = step(document, "layer", "output")["moved"]
    # x, the weight, the residual, g; both results and one float a row.
    assert output["bytes"] == 2 * (m * d + d * d + m * d + d) + 2 * 2 * m * d + 4 * m
    assert output["seconds"] == pytest.approx(2 * m * d * d / 990e12)
    weight = step(document, "layer", "mlp: weight")["moved"]
    assert weight["bytes"] == 2 * (m * d + m * 2 * f) + 2 * 2 * (2 * f * d)
    # Brings the gradient of n through gate and up, then that of the norm and of the residual.
    back = step(document, "layer", "output_bwd")["moved"]
    assert back["seconds"] == pytest.approx(2 * m * d * 2 * f / 990e12)
    for row in document["sums"]:
        parts = [
            s["moved"] for s in document["steps"]
            if (s["piece"], s["direction"]) == (row["piece"], row["direction"])
        ]  # fmt: skip
        assert row["plan"]["bytes"] == sum(x["bytes"] for x in parts)
        assert row["plan"]["seconds"] <= row["eager"]["seconds"] * 1.0001
    assert {(r["piece"], r["direction"]) for r in document["sums"]} == {
        (p, d) for p in ("layer", "heads", "exit") for d in ("forward", "backward")
    }


def test_the_specs_that_are_written_are_those_no_kernel_serves(
    llama: tuple[Path, dict[str, Any]],
) -> None:
    work, document = llama
    named = {s["kernel"] for s in document["steps"] if s["kernel"] and not s["accepted"]}
    assert named == {Path(p).stem for p in document["specs"]}
    for name in named:
        assert load_spec(work / "specs" / f"{name}.md").name == name


def test_a_products_gradients_are_two_products(tmp_path: Path) -> None:
    x, w = torch.empty(64, 32, device="meta"), torch.empty(48, 32, device="meta")
    graph = record(lambda x, w: torch.relu(x @ w.T), (x, w), {}, ["x", "w"])
    found = {v.called: m for v, m in pulled_back(graph.values, frozenset()).items()}
    sides = 4 * (64 * 32 + 48 * 32 + 64 * 48)
    assert (found["matmul"].bytes, found["matmul"].launches) == (2 * sides, 2)
    assert (found["relu"].bytes, found["relu"].launches) == (4 * 3 * 64 * 48, 1)
    alone = {v.called: m for v, m in pulled_back(graph.values, frozenset({"x"})).items()}
    assert alone["matmul"].bytes == sides


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is no architecture known here, expected one of llama"),
        (SMALL | {"model_type": "mixtral", "num_local_experts": 8}, "a mixture of experts"),
        (SMALL | {"hidden_act": "tan"}, "the activation is 'tan', expected one of silu"),
        (SMALL | {"rms_norm_eps": "x"}, "the norms' epsilon is 'x', expected a positive number"),
        (SMALL | {"hidden_size": None}, "hidden_size is None, expected a positive number"),
        ({"model_type": "qwen2", "hidden_act": "silu"}, "hidden_size is None"),
        (DIT | {"norm_elementwise_affine": True}, "norm_elementwise_affine is True"),
        ([1], "is no model's configuration"),
    ],
)
def test_what_is_no_such_model_is_said_in_one_line(
    about: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(about))
    result = CliRunner().invoke(app, ["capture", str(path)])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_broken_file_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    result = CliRunner().invoke(app, ["capture", str(path)])
    assert result.exit_code == 2
    assert "is not JSON" in result.output


def test_specs_of_one_name_and_other_words_are_both_kept(tmp_path: Path) -> None:
    layer = layer_of(SMALL, tmp_path)
    found = Captured()
    piece = _Piece(layer, pieces(layer, 2, 5)[0], found)
    x, w = torch.empty(64, 32, device="meta"), torch.empty(48, 32, device="meta")
    graph = record(lambda x, w_q: x @ w_q.T, (x.half(), w.half()), {}, ["x", "w_q"])
    kernel = Kernel("drawn_1", "", graph.inputs, graph.values, graph.values[-1:], lambda: ())
    assert piece._spec(kernel, "_bwd", "name: drawn_1_bwd, of drawn_1") == "tiny_projections_bwd"
    assert piece._spec(kernel, "_bwd", "name: drawn_1_bwd, of drawn_1") == "tiny_projections_bwd"
    assert piece._spec(kernel, "_bwd", "name: drawn_1_bwd") == "tiny_projections_2_bwd"
    assert found.specs == {
        "tiny_projections_bwd": "name: tiny_projections_bwd, of tiny_projections",
        "tiny_projections_2_bwd": "name: tiny_projections_2_bwd",
    }


@pytest.mark.sampled(0.3)
def test_no_spec_is_written_that_admission_refuses(tmp_path: Path) -> None:
    """A tile of float32, such as Gemma's norm of what joins the residual stream takes, is stored by
    a derived forward too."""
    layer = layer_of(GEMMA | {"model_type": "gemma2"}, tmp_path)
    found = Captured()
    _Piece(layer, pieces(layer, 2, 64)[0], found).add()
    assert len(found.specs) > 3
    for name, text in found.specs.items():
        admit(load_spec(Path(f"{name}.md"), text=text))
    forward = next(s for s in found.steps if s.name == "output_fwd")
    assert ".to(torch.float32)," in found.specs[forward.kernel]
