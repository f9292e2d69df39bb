"""PEFT's adapters: the logits of W + scale B A merged in NumPy, and what can't be loaded named."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from any_lm_kit import SIZES, random_lm
from mlx_lm.utils import quantize_model, save_config, save_model
from publishers import as_published, modelopt, tensor, write_safetensors
from rig import TINY, mlx_lm_twin, tiny, tokens

from specmlx.loading.load import load
from specmlx.targets.checkpoint import load_target

SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}
IDS = tokens(1, 6)
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": "all-linear"}
# Layers of the hybrid that are adapted, by Hugging Face's names.
HYBRID = ["layers.0.linear_attn.in_proj_qkv", "layers.0.linear_attn.out_proj", "layers.0.mlp.gate_proj"]
HYBRID += ["layers.1.self_attn.q_proj", "layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"]
LLAMA = ["layers.0.self_attn.q_proj", "layers.3.self_attn.v_proj", "layers.2.mlp.up_proj"]


def hybrid(path: Path, bits: int | None = None) -> None:
    config = json.loads(json.dumps(TINY | SMALL))
    model = mlx_lm_twin(tiny(0, **config), **config)
    if bits:
        model, config = quantize_model(model, config, 32, bits)
    save_model(path, model)
    save_config(config, path / "config.json")


def packed(path: Path) -> None:
    hybrid(path, bits=4)


def fp8(path: Path) -> None:
    tensors, _ = modelopt(as_published(tiny(0, **SMALL)), np.random.default_rng(0))
    write_safetensors(path / "model.safetensors", tensors)
    save_config(TINY | SMALL | {"quantization_config": {"quant_method": "modelopt"}}, path / "config.json")


def llama(path: Path) -> None:
    save_model(path, random_lm("llama"))
    save_config({"model_type": "llama", **SIZES}, path / "config.json")


def layer_of(model, name: str) -> nn.Module:
    found = getattr(model, "lm", model).model
    for part in name.split("."):
        found = found[int(part)] if part.isdigit() else found[part]
    return found


def dense(layer: nn.Module) -> np.ndarray:
    """W float64 `[N, K]`, read through the layer itself: what it makes of the identity."""
    K = layer.weight.shape[-1] * (1 if isinstance(layer, nn.Linear) else 32 // layer.bits)
    return np.array(layer(mx.eye(K)).T, np.float64)


def write_adapter(path: Path, model, names: list[str], rng, front: str, ranks: dict[str, int], **changes):
    """An adapter of random matrices, and the deltas B A `[N, K]` and magnitudes `[N]` that it holds."""
    path.mkdir(exist_ok=True)
    weights, deltas, magnitudes = {}, {}, {}
    for name in names:
        N, K = dense(layer_of(model, name)).shape
        rank = ranks.get(name.rpartition(".")[2], 4)
        A, B = rng.normal(size=(rank, K)) * 0.2, rng.normal(size=(N, rank)) * 0.2
        weights |= {f"{front}{name}.lora_A.weight": A, f"{front}{name}.lora_B.weight": B}
        deltas[name] = B.astype(np.float32).astype(float) @ A.astype(np.float32).astype(float)
        if changes.get("use_dora"):
            magnitudes[name] = rng.uniform(0.5, 2, N)
            weights[f"{front}{name}.lora_magnitude_vector"] = magnitudes[name]
    write_safetensors(
        path / "adapter_model.safetensors", {name: tensor("F32", np.float32(w)) for name, w in weights.items()}
    )
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return deltas, magnitudes


def merge(model, deltas, magnitudes, scales: dict[str, float]) -> None:
    """Put W + scale B A in the place of each adapted layer, its rows scaled to their magnitudes for DoRA."""
    for name, delta in deltas.items():
        parent, last = layer_of(model, name.rpartition(".")[0]), name.rpartition(".")[2]
        W = dense(parent[last]) + scales.get(last, scales[""]) * delta
        if name in magnitudes:
            W *= (magnitudes[name] / np.linalg.norm(W, axis=1))[:, None]
        linear = nn.Linear(1, 1, bias=False)
        linear.weight = mx.array(W.astype(np.float32))
        parent[last] = linear


def logits(model) -> np.ndarray:
    return np.array(model.verify(model.new_states(), IDS).logits.astype(mx.float32))


PLAIN = "base_model.model.model."
NESTED = "base_model.model.model.language_model."
RANKED = {
    "rank_pattern": {"down_proj": 8, "^model.layers.1.self_attn.q_proj": 2},
    "alpha_pattern": {"o_proj|up_proj": 1},
}
CASES = {
    "lora": (hybrid, HYBRID, PLAIN, {}, {}, {"": 6 / 4}),
    "names of a composite model": (hybrid, HYBRID, NESTED, {}, {}, {"": 6 / 4}),
    "mlx-lm's front": (hybrid, HYBRID, "base_model.model.language_model.model.", {}, {}, {"": 6 / 4}),
    "defaults": (hybrid, HYBRID[:1], PLAIN, {"r": None, "lora_alpha": None}, {"in_proj_qkv": 8}, {"": 8 / 8}),
    "rslora": (hybrid, HYBRID, PLAIN, {"use_rslora": True}, {}, {"": 6 / 4**0.5}),
    "ranks and alphas": (
        hybrid,
        HYBRID,
        PLAIN,
        RANKED,
        {"down_proj": 8, "q_proj": 2},
        {"": 6 / 4, "down_proj": 6 / 8, "q_proj": 6 / 2, "o_proj": 1 / 4},
    ),
    "dora": (hybrid, HYBRID, NESTED, {"use_dora": True}, {}, {"": 6 / 4}),
    "4 bits": (packed, HYBRID, PLAIN, {}, {}, {"": 6 / 4}),
    "4 bits, dora": (packed, HYBRID, PLAIN, {"use_dora": True}, {}, {"": 6 / 4}),
    "fp8 and nvfp4": (fp8, HYBRID, NESTED, {}, {}, {"": 6 / 4}),
    "llama": (llama, LLAMA, PLAIN, {}, {}, {"": 6 / 4}),
    "llama, dora": (llama, LLAMA, PLAIN, {"use_dora": True, "use_rslora": True}, {}, {"": 6 / 4**0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_gives_the_logits_of_its_merged_weights(case, tmp_path):
    write, names, front, changes, ranks, scales = CASES[case]
    write(tmp_path)
    merged, _ = load_target(tmp_path, dtype=mx.float32)
    plain, rng = logits(merged), np.random.default_rng(2)
    held = write_adapter(tmp_path / "adapter", merged, names, rng, front, ranks, **changes)
    merge(merged, *held, scales)
    model, _ = load_target(tmp_path, dtype=mx.float32, adapter_path=str(tmp_path / "adapter"))
    got, want = logits(model), logits(merged)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
    assert np.abs(want - plain).max() > 0.05 * np.abs(plain).max()


A, B = f"{PLAIN}{HYBRID[3]}.lora_A.weight", f"{PLAIN}{HYBRID[3]}.lora_B.weight"
WRONG = {
    "loha": ({"peft_type": "LOHA"}, {}, "peft_type 'LOHA': specmlx loads LORA"),
    "ia3": ({"peft_type": "IA3"}, {}, "peft_type 'IA3'"),
    "no kind": ({"peft_type": None}, {}, "peft_type None"),
    "biases": ({"bias": "all"}, {}, "bias 'all'"),
    "lora's bias": ({"lora_bias": True}, {}, "lora_bias True"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save ['lm_head']"),
    "tokens": ({"trainable_token_indices": [1, 2]}, {}, "trainable_token_indices [1, 2]"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, {}, "target_parameters ['mlp.experts.gate"),
    "more layers": ({"layer_replication": [[0, 2], [1, 2]]}, {}, "layer_replication"),
    "changed weights": ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights 'pissa_niter_4'"),
    "quantized": ({"use_qalora": True}, {}, "use_qalora True"),
    "what is new": ({"kasa_config": {"beta": 1}}, {}, "kasa_config {'beta': 1}"),
    "rank": ({"r": "4"}, {}, "r is '4': it must be a positive integer"),
    "alpha": ({"lora_alpha": None, "alpha_pattern": {"q_proj": "x"}}, {}, "q_proj is 'x'"),
    "no rank": ({"rank_pattern": {"q_proj": 0}}, {}, "q_proj is 0: it must be a positive integer"),
    "pattern": ({"rank_pattern": {"(": 4}}, {}, "'(' is no regular expression"),
    "endless pattern": ({"rank_pattern": {"(a*)*b": 4}}, {}, "'(a*)*b' is too complex"),
    "another rank": ({"r": 8}, {}, "lora_A is mlx.core.float32 [4, 64], should be [8, 64]"),
    "another model": ({}, {B: mx.zeros((77, 4))}, "lora_B is mlx.core.float32 [77, 4], should be [256, 4]"),
    "magnitudes": ({"use_dora": True}, {}, "has lora_A, lora_B, should have lora_A, lora_B, lora_magnitude_vector"),
    "half": ({}, {B: None}, "has lora_A, should have lora_A, lora_B"),
    "no layer": (
        {},
        {f"{PLAIN}layers.9.mlp.up_proj.lora_A.weight": mx.zeros((4, 4))},
        "adapts model.layers.9.mlp.up_proj",
    ),
    "embeddings": ({}, {f"{PLAIN}embed_tokens.lora_embedding_A": mx.zeros((4, 4))}, "embed_tokens.lora_embedding_A"),
    "a whole head": ({}, {"base_model.model.lm_head.weight": mx.zeros((4, 4))}, "lm_head.weight, which is no LoRA"),
    "nothing": ({}, {A: None, B: None}, "has no tensors"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    hybrid(path)
    return path


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_can_not_be_loaded_is_named_in_one_line(case, folder, tmp_path):
    changes, tensors, word = WRONG[case]
    weights = {A: mx.zeros((4, 64)), B: mx.zeros((256, 4))} | tensors
    weights = {name: value for name, value in weights.items() if value is not None}
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), weights)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ValueError) as error:
        load_target(folder, adapter_path=str(tmp_path))
    text = str(error.value).replace(str(tmp_path), "")
    assert word in text and "\n" not in text and len(text) <= 200, text


def test_an_adapter_is_refused_before_the_models_weights_are_read(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"peft_type": "LOHA"}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="LOHA"):
        load(str(tmp_path), adapter_path=str(tmp_path))


def test_of_adapter_files_those_count_that_are_the_adapters(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    weights = {A: mx.ones((4, 64)), B: mx.ones((256, 4))}
    (tmp_path / "adapter_model.bin").write_bytes(b"torch")
    with pytest.raises(ValueError, match=r"no \*\.safetensors but adapter_model.bin"):
        load_target(folder, adapter_path=str(tmp_path))
    for i, name in enumerate(weights):
        mx.save_safetensors(str(tmp_path / f"adapter_model-0000{i + 1}-of-00002.safetensors"), {name: weights[name]})
    mx.save_safetensors(str(tmp_path / "optimizer.safetensors"), {"step": mx.zeros(1)})
    model, _ = load_target(folder, adapter_path=str(tmp_path))
    assert mx.array_equal(layer_of(model, HYBRID[3]).lora_a, weights[A].T).item()
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), {A: weights[A]})
    with pytest.raises(
        ValueError, match=r"lora_A.weight is in adapter_model-00001-of-00002.safetensors and in adapter_"
    ):
        load_target(folder, adapter_path=str(tmp_path))
