"""Weights that others quantized: AWQ's codes mean what they say, and what can't be read is named."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from any_lm_kit import SIZES, random_lm
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config
from publishers import as_published, tensor, write_safetensors
from rig import TINY, tiny, tokens

from specmlx.loading.inspect import inspect_path
from specmlx.loading.load import load
from specmlx.targets.checkpoint import load_target

SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}
INT4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
# AutoAWQ's order of the eight codes in a word.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
UNREAD = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "old bitsandbytes": {"load_in_8bit": True},
    "awq in 8 bits": AWQ | {"bits": 8},
    "awq of another layout": AWQ | {"version": "gemv"},
    "auto-round": {"quant_method": "auto-round", "bits": 4},
    "hqq": {"quant_method": "hqq"},
    "no method": {"bits": 4},
    "no name": {"quant_method": 4},
    "int4 of compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"} | INT4,
    "int4 in a mix": {"quant_method": "compressed-tensors", "format": "mixed-precision"} | INT4,
}


def words(codes: np.ndarray) -> np.ndarray:
    """Codes `[K, N]` as int32 words `[K, N / 8]`, as AutoAWQ packs them."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i, column in enumerate(ORDER):
        packed |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return packed.view(np.int32)


def awq(weights: dict[str, np.ndarray], rng) -> tuple[dict, dict[str, np.ndarray]]:
    """A file's tensors with the MLPs in AWQ, and the weights float16 that they mean."""
    tensors, dense = {}, {}
    for name, value in weights.items():
        if ".mlp." not in name:
            dense[name] = np.float16(value)
            tensors[name] = tensor("F16", dense[name])
            continue
        stem, (N, K) = name.removesuffix(".weight"), value.shape
        codes, zeros = rng.integers(0, 16, (K, N)), rng.integers(0, 16, (K // 32, N))
        scales = np.float16(rng.uniform(0.005, 0.01, (K // 32, N)))
        parts = {"qweight": ("I32", words(codes)), "qzeros": ("I32", words(zeros)), "scales": ("F16", scales)}
        tensors |= {f"{stem}.{part}": tensor(*made) for part, made in parts.items()}
        dense[name] = ((codes - zeros.repeat(32, 0)) * np.float32(scales).repeat(32, 0)).T
    return tensors, dense


def hybrid() -> tuple[dict[str, np.ndarray], dict]:
    return as_published(tiny(0, **SMALL)), TINY | SMALL


def llama() -> tuple[dict[str, np.ndarray], dict]:
    weights = {name: np.array(value) for name, value in tree_flatten(random_lm("llama").parameters())}
    return weights, {"model_type": "llama", **SIZES}


def logits(path: Path) -> np.ndarray:
    model, _ = load_target(path, dtype=mx.float32)
    return np.array(model.verify(model.new_states(), tokens(1, 6)).logits)


@pytest.mark.parametrize("model", [hybrid, llama])
def test_awq_gives_the_logits_of_the_weights_that_its_codes_mean(model, tmp_path):
    weights, config = model()
    tensors, dense = awq(weights, np.random.default_rng(0))
    for name, files, changes in (
        ("packed", tensors, {"quantization_config": AWQ}),
        ("dense", {name: tensor("F32", np.float32(w)) for name, w in dense.items()}, {}),
    ):
        (tmp_path / name).mkdir()
        write_safetensors(tmp_path / name / "model.safetensors", files)
        save_config(config | changes, tmp_path / name / "config.json")
    got, want = logits(tmp_path / "packed"), logits(tmp_path / "dense")
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * np.abs(want).max())
    assert not inspect_path(tmp_path / "packed").questions


@pytest.mark.parametrize("case", UNREAD)
@pytest.mark.parametrize("nested", [False, True], ids=["outside", "in text_config"])
def test_a_quantization_that_can_not_be_read_is_named_before_a_weight_is_read(case, nested, tmp_path):
    text = {key: value for key, value in (TINY | SMALL).items() if key != "model_type"}
    part = {"text_config": text | {"quantization_config": UNREAD[case]}} if nested else text
    whole = {"model_type": "qwen3_5"} | part | ({} if nested else {"quantization_config": UNREAD[case]})
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError) as error:
        load(str(tmp_path))
    message = str(error.value).replace(str(tmp_path), "")
    method = UNREAD[case].get("quant_method", "bitsandbytes" if "load_in_8bit" in UNREAD[case] else "quant_method")
    assert str(method) in message and "\n" not in message and len(message) <= 200, message
    assert "mlx conversion" in message or case == "no name"
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"model.embed_tokens.weight": mx.zeros((2, 2))})
    assert any(str(method) in line for line in inspect_path(tmp_path).questions)


def test_a_model_of_mlx_lms_that_reads_no_int4_names_the_quantization(tmp_path):
    weights, config = llama()
    scheme = UNREAD["int4 of compressed-tensors"]
    weights["model.layers.0.mlp.up_proj.weight_packed"] = weights.pop("model.layers.0.mlp.up_proj.weight")
    write_safetensors(tmp_path / "model.safetensors", {n: tensor("F32", w) for n, w in weights.items()})
    save_config(config | {"quantization_config": scheme}, tmp_path / "config.json")
    with pytest.raises(ValueError, match="quantized by 'compressed-tensors', format 'pack-quantized'"):
        load_target(tmp_path)
