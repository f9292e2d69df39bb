"""The config.json that a GGUF file's metadata amount to: llama.cpp's keys in Hugging Face's words."""

import math
import re
from typing import Any

from specmlx.formats.config import shown
from specmlx.formats.gguf import GGUF
from specmlx.formats.gguf_blocks import to_mlx
from specmlx.targets.config import FULL, LINEAR

HYBRIDS = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}
# These run by mlx-lm's own classes.
PLAIN = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
FACTORS = "rope_freqs.weight"
# Keys of config.json by what they are called behind the architecture's name.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_HYBRID_KEYS = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_DENSE_KEYS = {"intermediate_size": "feed_forward_length"}
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
# Would change what a plain model computes, and mlx-lm's class knows nothing of it.
_FOREIGN = (
    "expert_count",
    "attention.scale",
    "attention.temperature_scale",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_YARN = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier")
_SCALING = ("type", "factor", "original_context_length", "finetuned", "attn_factor", *_YARN)


def config_of(parts: list[GGUF]) -> dict[str, Any]:
    """The config.json of a model's files, which need not be there as a whole beyond their headers.

    Raises ValueError, one line that names the file and the key, for another architecture, a missing key, a value that
    can't be, layers that are not all there, and a rope that has no counterpart in a config.json.
    """
    path, metadata = parts[0].path, parts[0].metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in HYBRIDS | PLAIN:
        known = ", ".join(HYBRIDS | PLAIN)
        raise ValueError(f"{path} is a {str(arch)[:80]!r}: of GGUF files, specmlx reads {known}")
    tensors = {name: part for part in parts for name in part.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path} has no tensor token_embd.weight: it is no whole language model")
    try:
        return _config(_Keys(metadata, arch), tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def blocks(names: Any) -> tuple[list[int], list[int]]:
    """The numbers of the blocks `blk.N.*` among tensors' names: the trunk's, and those of an MTP head (`nextn.*`)."""
    found = [match for match in (re.match(r"blk\.(\d{1,6})\.(nextn\.)?", name) for name in names) if match]
    heads = {int(match[1]) for match in found if match[2]}
    return sorted({int(match[1]) for match in found} - heads), sorted(heads)


class _Keys:
    """A file's metadata by what keys are called behind the architecture's name, each checked when it is asked for."""

    def __init__(self, metadata: dict[str, Any], arch: str):
        self.metadata, self.arch = metadata, arch

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")

    def size(self, key: str, default: int | None = None) -> int:
        return self._checked(key, default, (int,), 1 << 28, "a positive integer")

    def number(self, key: str, default: float | None = None) -> float:
        return self._checked(key, default, (int, float), math.inf, "a positive number")

    def refused(self, key: str, why: str) -> ValueError:
        return ValueError(f"{self.arch}.{key} is {shown(self.get(key))}{why}")

    def _checked(self, key: str, default: Any, kinds: tuple[type, ...], most: float, what: str) -> Any:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise ValueError(f"it lacks {self.arch}.{key}")
        if type(value) not in kinds or not 0 < value < most:
            raise self.refused(key, f": it must be {what}")
        return value


def _config(keys: _Keys, tensors: dict[str, GGUF]) -> dict[str, Any]:
    hybrid = keys.arch in HYBRIDS
    names = _KEYS | (_HYBRID_KEYS if hybrid else {}) | (_EXPERT_KEYS if keys.arch == "qwen35moe" else _DENSE_KEYS)
    config: dict[str, Any] = {
        name: keys.number(key) if name == "rms_norm_eps" else keys.size(key) for name, key in names.items()
    }
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", keys.size("attention.head_count_kv", heads))
    config.setdefault("head_dim", keys.size("attention.key_length", max(config["hidden_size"] // heads, 1)))
    if keys.size("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise keys.refused("attention.value_length", f", its key_length {config['head_dim']}: they must be the same")
    layers, mtp = _layers(keys, tensors)
    config |= {
        "model_type": (HYBRIDS | PLAIN)[keys.arch],
        "num_hidden_layers": layers,
        "vocab_size": tensors["token_embd.weight"].tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": _ends(keys.metadata),
    }
    if mtp:
        config["mtp_num_hidden_layers"] = mtp
    return config | (_hybrid if hybrid else _plain)(keys, config, tensors)


def _layers(keys: _Keys, tensors: dict[str, GGUF]) -> tuple[int, int]:
    """How many layers the trunk has and the MTP head: `nextn.*` tells them apart, block_count may count both."""
    trunk, heads = blocks(tensors)
    n, declared = keys.size("block_count"), keys.get("nextn_predict_layers") or 0
    if type(declared) is not int or declared < 0:
        raise keys.refused("nextn_predict_layers", ": it must be a number of layers")
    if not trunk and heads:
        raise ValueError("it has no layers but those of an MTP head: name the whole model's file")
    if trunk != [*range(len(trunk))] or heads != [*range(len(trunk), len(trunk) + len(heads))]:
        raise ValueError(f"its layers are not all there: {len(trunk) + len(heads)} of {max(trunk + heads) + 1}")
    if len(trunk) not in (n, n - max(declared, len(heads))):
        raise keys.refused("block_count", f", but there are tensors of {len(trunk)} layers: it may be cut")
    return len(trunk), len(heads)


def _ends(metadata: dict[str, Any]) -> list[int] | None:
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(i for i in ids if type(i) is int and i >= 0)) or None


def _hybrid(keys: _Keys, config: dict[str, Any], tensors: dict[str, GGUF]) -> dict[str, Any]:
    dims, turned = config["head_dim"], keys.size("rope.dimension_count")
    if int(dims * (turned / dims)) != turned or turned % 2 or turned > dims:
        raise keys.refused("rope.dimension_count", f": of {dims} values of a head that can't be")
    values, inner = config["linear_num_value_heads"], keys.size("ssm.inner_size")
    if inner % values:
        raise keys.refused("ssm.inner_size", f": it must be a multiple of {values} heads")
    theta, scaling = _rope(keys, turned, config["max_position_embeddings"], tensors)
    found = {
        "linear_value_head_dim": inner // values,
        "full_attention_interval": keys.size("full_attention_interval", 4),
        "rope_parameters": scaling | {"rope_theta": theta, "partial_rotary_factor": turned / dims},
    }
    if (recurrent := keys.get("attention.recurrent_layers")) is not None:
        if not isinstance(recurrent, list) or len(recurrent) < config["num_hidden_layers"]:
            raise keys.refused("attention.recurrent_layers", ": it must say of each layer whether it is recurrent")
        found["layer_types"] = [LINEAR if value else FULL for value in recurrent[: config["num_hidden_layers"]]]
    return found


def _plain(keys: _Keys, config: dict[str, Any], tensors: dict[str, GGUF]) -> dict[str, Any]:
    if foreign := next((key for key in _FOREIGN if keys.get(key) not in (None, 0, 1)), None):
        raise keys.refused(foreign, f": the {keys.arch} models that specmlx reads have none")
    if keys.get("attention.causal") is False:
        raise keys.refused("attention.causal", ": it is no model that writes text")
    if keys.size("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise keys.refused("rope.dimension_count", f": heads have {config['head_dim']} values, and all must be turned")
    theta, scaling = _rope(keys, config["head_dim"], config["max_position_embeddings"], tensors)
    found: dict[str, Any] = {"rope_theta": theta}
    if scaling["rope_type"] != "default":
        found["rope_scaling"] = scaling
    if keys.arch == "llama":
        found |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    return found


def _rope(keys: _Keys, dims: int, positions: int, tensors: dict[str, GGUF]) -> tuple[float, dict[str, Any]]:
    """The base of the rope, and its scaling as transformers has it; defaults are llama.cpp's."""
    prefix = f"{keys.arch}.rope.scaling."
    given = [key.removeprefix(prefix) for key in keys.metadata if key.startswith(prefix)]
    if unknown := next((key for key in given if key not in _SCALING), None):
        raise keys.refused(f"rope.scaling.{unknown}", ": specmlx knows no such scaling")
    old = keys.number("rope.scale_linear", 1.0) if keys.get("rope.scale_linear") else 1.0
    factor = keys.number("rope.scaling.factor") if keys.get("rope.scaling.factor") else old
    kind = keys.get("rope.scaling.type") if "type" in given else "linear"
    if kind not in ("none", "linear", "yarn"):
        raise keys.refused("rope.scaling.type", ": specmlx reads none, linear and yarn")
    if kind == "yarn":
        scaling = _yarn(keys, factor, positions)
    else:
        if stray := next((key for key in given if key in _YARN), None):
            raise keys.refused(f"rope.scaling.{stray}", f", but rope.scaling.type {kind}: there it means nothing")
        if keys.number("rope.scaling.attn_factor", 1.0) != 1:
            raise keys.refused("rope.scaling.attn_factor", f", but rope.scaling.type {kind}: specmlx reads it of yarn")
        scaling = {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}
    if FACTORS in tensors:
        scaling = _factored(tensors[FACTORS], dims, scaling, positions)
    return keys.number("rope.freq_base", 10000.0), {"rope_type": "default"} | scaling


def _yarn(keys: _Keys, factor: float, positions: int) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071) with what cos and sin are multiplied by as transformers' attention_factor.

    llama.cpp's converter writes transformers' attention_factor as yarn_attn_factor, and mscale_all_dim, to an mscale
    of 1, as yarn_log_multiplier; attn_factor comes on top of either.
    """

    def key(name: str) -> str:
        return f"rope.scaling.{name}"

    extrapolated, multiplier = keys.get(key("yarn_ext_factor")), keys.get(key("yarn_log_multiplier"))
    if extrapolated is not None and extrapolated != 1 and not (isinstance(extrapolated, float) and extrapolated < 0):
        raise keys.refused(key("yarn_ext_factor"), ": specmlx knows YaRN with 1 only")
    if multiplier and keys.get(key("yarn_attn_factor")) is not None:
        raise keys.refused(key("yarn_log_multiplier"), ", and there is a yarn_attn_factor too: which of them counts?")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    whole = mscale(1) / mscale(keys.number(key("yarn_log_multiplier"))) if multiplier else mscale(1)
    whole = keys.number(key("yarn_attn_factor"), whole) * keys.number(key("attn_factor"), 1.0)
    # mlx-lm reads no attention_factor: its own is 1 + mscale / 10 ln(factor), over the same of mscale_all_dim.
    own = {}
    if factor > 1 and keys.arch in PLAIN:
        own = {"mscale": (whole - 1) / (0.1 * math.log(factor)), "mscale_all_dim": 0}
    return own | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size(key("original_context_length"), positions),
        "attention_factor": whole,
        "beta_fast": keys.number(key("yarn_beta_fast"), 32.0),
        "beta_slow": keys.number(key("yarn_beta_slow"), 1.0),
    }


def _factored(file: GGUF, dims: int, scaling: dict[str, Any], positions: int) -> dict[str, Any]:
    """What a frequency is divided by, one number each (llama3's rope in llama.cpp's files), as longrope's two lists."""
    info = file.tensors[FACTORS]
    if info.kind not in ("F32", "F16", "BF16") or info.shape != (dims // 2,):
        raise ValueError(f"{FACTORS} is a {info.kind} of {list(info.shape)}: {dims // 2} floats would fit")
    factors = [float(x) for x in to_mlx(info.kind, file.blocks(FACTORS), info.shape)["weight"].tolist()]
    if not all(0 < x < math.inf for x in factors):
        raise ValueError(f"{FACTORS} has a factor that is not a positive number")
    if all(x == 1 for x in factors):
        return scaling
    if scaling.get("rope_type") == "yarn":
        raise ValueError(f"it has {FACTORS} and rope.scaling.type yarn: specmlx can't apply both")
    factors = [scaling.get("factor", 1.0) * x for x in factors]
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": positions,
        "attention_factor": 1.0,
    }
