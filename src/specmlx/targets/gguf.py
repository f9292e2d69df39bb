"""Qwen3.5-family targets in GGUF files: llama.cpp's names and order of heads, mapped to mlx-lm's."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.formats.gguf import GGUF, read_gguf
from specmlx.formats.gguf_blocks import GROUP, to_mlx
from specmlx.targets.config import HybridConfig
from specmlx.targets.hybrid import Model

MODEL_TYPES = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}
# Keys of config.json by what they are called behind the architecture's name.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
_DENSE_KEYS = {"intermediate_size": "feed_forward_length"}
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}


def gguf_files(path: Path) -> list[Path]:
    """The GGUF files of a model: the file itself with its other parts, or the one of a directory without safetensors.

    Raises ValueError where a directory has several models.
    """
    if path.is_dir():
        files = [] if any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))
    else:
        files = [path] if path.suffix == ".gguf" else []
    if files and (part := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", files[0].name)):
        parts = [files[0].with_name(f"{part[1]}-{i:05}-of-{part[2]}.gguf") for i in range(1, int(part[2]) + 1)]
        files = [*parts, *(file for file in files if file not in parts)] if path.is_dir() else parts
        if len(files) == len(parts):
            return parts
    if len(files) > 1:
        raise ValueError(f"{path} has several models ({', '.join(file.name for file in files[:3])} …): name one file")
    return files


def config_of(file: GGUF, vocab_size: int, tied: bool) -> dict[str, Any]:
    """The config.json that a file's metadata amount to. Raises ValueError for another architecture or a missing key."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ValueError(f"{file.path} is a {str(arch)[:80]!r}: of GGUF files, specmlx reads {known} (Qwen3.5)")
    keys = _KEYS | (_EXPERT_KEYS if arch == "qwen35moe" else _DENSE_KEYS)
    wanted = [f"{arch}.{key}" for key in (*keys.values(), "block_count", "ssm.inner_size")]
    if missing := [key for key in wanted if key not in file.metadata]:
        raise ValueError(f"{file.path} lacks {', '.join(missing)}")
    config = {name: file.metadata[f"{arch}.{key}"] for name, key in keys.items()}

    def number(key: str, default: float) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    numbers = {**config, "block_count": number("block_count", 0), "inner_size": number("ssm.inner_size", 0)}
    if bad := [key for key, value in numbers.items() if type(value) not in (int, float) or not value > 0]:
        raise ValueError(f"{file.path}: {bad[0]} is {str(numbers[bad[0]])[:80]}: it must be a positive number")
    return config | {
        "model_type": MODEL_TYPES[arch],
        "num_hidden_layers": number("block_count", 0) - number("nextn_predict_layers", 0),
        "linear_value_head_dim": number("ssm.inner_size", 0) // config["linear_num_value_heads"],
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "rope_parameters": {
            "type": "default",
            "rope_theta": number("rope.freq_base", 1e7),
            "partial_rotary_factor": number("rope.dimension_count", config["head_dim"] // 4) / config["head_dim"],
        },
    }


def load_gguf(files: list[Path]) -> tuple[Model, dict[str, Any]]:
    """The model of GGUF files and the config that they amount to; packed where mlx has an exact layout.

    Scales are float32, and so is everything that the model computes, unless it is cast. Raises ValueError in one line
    for a file that is not whole, another architecture, a tensor's type that can't be held exactly, and missing tensors.
    """
    parts = []
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing: it is a part of {files[0].name}")
        parts.append(read_gguf(file))
    tensors = {name: part for part in parts for name in part.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{files[0]} has no tensor token_embd.weight: it is no whole language model")
    vocab_size = tensors["token_embd.weight"].tensors["token_embd.weight"].shape[0]
    config = config_of(parts[0], vocab_size, tied="output.weight" not in tensors)
    model = Model(HybridConfig.from_dict(config))
    weights = {}
    for name, part in tensors.items():
        info = part.tensors[name]
        try:
            if (place := _place(name, config["num_hidden_layers"])) is not None:
                weights |= _named(place, to_mlx(info.kind, part.blocks(name), info.shape), model.config)
        except ValueError as error:
            raise ValueError(f"{part.path}: {name}: {error}") from None
    try:
        _quantize(model, weights)
        model.load_weights(list(weights.items()))
    except ValueError as error:
        raise ValueError(f"can't load the weights of {files[0]}: {' '.join(str(error).split())[:400]}") from None
    model.set_dtype(mx.float32)
    if any(name.endswith(".scales") for name in weights):
        # mlx_lm tells the bits of each layer by its shapes.
        config["quantization"] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    return model, config


def _place(name: str, layers: int) -> str | None:
    """Where a tensor goes, without the last part of its name; None for the layers of an MTP head."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+?)(\.weight|\.bias)?", name):
        index, part, _ = match.groups()
        if int(index) >= layers:
            return None
        if part in ("ssm_a", "ssm_dt"):
            return f"model.layers.{index}.linear_attn.{'A_log' if part == 'ssm_a' else 'dt_bias'}"
        if part in _LAYER:
            return f"model.layers.{index}.{_LAYER[part]}"
    elif name.endswith(".weight") and name.removesuffix(".weight") in _TOP:
        return _TOP[name.removesuffix(".weight")]
    raise ValueError("a Qwen3.5 model has no such tensor")


def _named(place: str, layer: dict[str, mx.array], config: HybridConfig) -> dict[str, mx.array]:
    """A tensor's parameters under mlx-lm's names, value heads by their key head and not in turns."""
    Hk, Hv, Dv = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    keys = 2 * Hk * config.linear_key_head_dim
    name = place.rpartition("linear_attn.")[2] if "linear_attn." in place else ""
    place = f"language_model.{place}"
    if name in ("A_log", "dt_bias"):
        value = layer["weight"].reshape(-1)
        return {place: _by_key_head(mx.log(-value) if name == "A_log" else value, 0, Hk, Hv, 1)}
    if name in ("in_proj_qkv", "conv1d"):
        layer = {k: mx.concatenate([x[:keys], _by_key_head(x[keys:], 0, Hk, Hv, Dv)]) for k, x in layer.items()}
    elif name in ("in_proj_z", "in_proj_a", "in_proj_b"):
        layer = {k: _by_key_head(x, 0, Hk, Hv, Dv if name == "in_proj_z" else 1) for k, x in layer.items()}
    elif name == "out_proj":
        layer = {k: _by_key_head(x, 1, Hk, Hv, x.shape[1] // Hv) for k, x in layer.items()}
    if name == "conv1d":
        layer = {"weight": layer["weight"][..., None]}
    if place.endswith("shared_expert_gate"):
        # A matrix of one row, without that axis in the file.
        layer = {key: value.reshape(1, -1) for key, value in layer.items()}
    return {f"{place}.{key}": value for key, value in layer.items()}


def _by_key_head(x: mx.array, axis: int, Hk: int, Hv: int, size: int) -> mx.array:
    """llama.cpp keeps the value heads in turns, one of each key head; here all of a key head come together."""
    if x.shape[axis] != Hv * size:
        raise ValueError(f"a tensor of {list(x.shape)} does not have {Hv} value heads")
    turns = mx.unflatten(x, axis, (Hv // Hk, Hk, size)).swapaxes(axis, axis + 1)
    return turns.flatten(axis, axis + 2)


def _quantize(model: Model, weights: dict[str, mx.array]) -> None:
    def layout(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        if not hasattr(module, "to_quantized"):
            raise ValueError(f"{path} is packed: a {type(module).__name__} can't be")
        bits = weights[f"{path}.weight"].shape[-1] * 32 // (weights[f"{path}.scales"].shape[-1] * GROUP)
        return {"group_size": GROUP, "bits": bits}

    nn.quantize(model, group_size=GROUP, bits=4, class_predicate=layout)
