"""A drafter's config.json in the words of each publisher, from what was read of one."""

import json
from typing import Any

from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, FULL, GEMMA4, QWEN35, SLIDING, DrafterConfig
from specmlx.drafters.packaging import ARCHITECTURES, HEADS, SCALES, SELECTOR

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES += ("head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "attention_bias")
_INPUTS = ("target_layer_ids", "mask_token_id")
# The fields of a kind's own parts.
_OWN = {DFLASH: (), DFLASH2: SELECTOR, DSPARK: (*HEADS, "confidence_temperatures")}


def plain_config(parsed: DrafterConfig, config: dict[str, Any]) -> dict[str, Any]:
    """A drafter's config.json that says everything by itself, in z-lab's and DeepSpec's words.

    Raises ValueError where reading it again would not give the same drafter.
    """
    architecture = "Qwen3DSparkModel" if parsed.frozen_copies else ARCHITECTURES[parsed.kind]
    architecture = {GEMMA4: "Gemma4DSparkModel", QWEN35: "Qwen35DSparkModel"}.get(parsed.family, architecture)
    nested = [*_INPUTS, "sample_from_anchor", "rope_is_neox_style", "draft_vocab_size", *SCALES, *_OWN[parsed.kind]]
    windows = {window for window in parsed.windows if window}
    if len(windows) > 1:
        raise ValueError(f"the drafter's layers have windows {sorted(windows)}: one config.json can't say that")
    plain = {
        "architectures": [architecture],
        **_layers(parsed),
        **_fields(parsed, "is_causal", "block_size", "num_target_layers"),
        "dflash_config": {name: getattr(parsed, name) for name in nested},
        **{key: config[key] for key in ("quantization", "quantization_config") if config.get(key)},
    }
    if parsed.family == QWEN35:
        plain["enable_qwen35_gated_q_proj"] = parsed.gated_attention
        plain["rope_parameters"]["partial_rotary_factor"] = (parsed.rope_dims or parsed.head_dim) / parsed.head_dim
    if parsed.family == GEMMA4:
        plain |= {"attention_k_eq_v": parsed.attention_k_eq_v, "global_head_dim": parsed.head_dim}
        plain |= {"num_global_key_value_heads": parsed.num_key_value_heads}
        plain["rope_parameters"] = {"full_attention": plain["rope_parameters"]}
    plain = json.loads(json.dumps({key: value for key, value in plain.items() if value is not None}))
    again = vars(DrafterConfig.from_dict(plain))
    # The rope is spelt out in the plain one, so it has keys more.
    if lost := [name for name in again if name != "rope_scaling" and again[name] != getattr(parsed, name)]:
        raise ValueError(f"the drafter's {', '.join(lost)} can't be said in a plain config.json")
    return plain


def publishers_config(config: DrafterConfig, anchors: int = 0) -> dict[str, Any]:
    """A config.json as z-lab writes it for DFlash and DFlash 2, DeepSpec for DSpark; `anchors` is its num_anchors."""
    spark = config.kind == DSPARK
    header = {"architectures": ["Qwen3DSparkModel" if spark else ARCHITECTURES[config.kind]], "dtype": "bfloat16"}
    header |= _layers(config) | _fields(config, "rope_theta", "num_target_layers", "block_size")
    if spark:
        return header | {"num_anchors": anchors} | _fields(config, *_INPUTS, *HEADS)
    nested = _fields(config, *_INPUTS, *SCALES, *_OWN[config.kind])
    return header | {"is_causal": config.is_causal, "dflash_config": nested}


def speculators_config(config: DrafterConfig, verifier: str, architectures: list[str]) -> dict[str, Any]:
    """The same as the speculators package writes it: tap ids count the embedding; `verifier` is the target's name."""
    method = {"proposal_type": "greedy", "speculative_tokens": config.max_width, "verifier_accept_k": 1}
    return {
        "architectures": [ARCHITECTURES[config.kind]],
        "dtype": "bfloat16",
        "speculators_model_type": config.kind,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        **_fields(config, "block_size", "mask_token_id", "sample_from_anchor", *_OWN[config.kind]),
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "sliding_window_non_causal": config.is_causal is False,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers(config),
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }


def _fields(config: DrafterConfig, *names: str) -> dict[str, Any]:
    """Those of the fields that aren't None, as JSON has them."""
    found = {name: getattr(config, name) for name in names}
    return {name: [*x] if isinstance(x, tuple) else x for name, x in found.items() if x is not None}


def _layers(config: DrafterConfig) -> dict[str, Any]:
    """The fields of transformers' Qwen3Config."""
    window = next((window for window in config.windows if window), None)
    return {
        "model_type": "qwen3",
        **_fields(config, *_SIZES),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", **config.rope_scaling, "rope_theta": config.rope_theta},
        "layer_types": [SLIDING if window else FULL for window in config.windows],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "tie_word_embeddings": False,
    }
