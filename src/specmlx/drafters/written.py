"""A drafter's config.json in the words of each publisher, from what was read of one."""

import json
from typing import Any

from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, FULL, GEMMA4, QWEN35, SLIDING, DrafterConfig
from specmlx.drafters.packaging import ARCHITECTURES, HEADS, SCALES, SELECTOR

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES += ("head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "attention_bias")


def plain_config(parsed: DrafterConfig, config: dict[str, Any]) -> dict[str, Any]:
    """A drafter's config.json that says everything by itself, in z-lab's and DeepSpec's words.

    Raises ValueError where reading it again would not give the same drafter.
    """
    architecture = "Qwen3DSparkModel" if parsed.frozen_copies else ARCHITECTURES[parsed.kind]
    architecture = {GEMMA4: "Gemma4DSparkModel", QWEN35: "Qwen35DSparkModel"}.get(parsed.family, architecture)
    nested = ["target_layer_ids", "mask_token_id", "sample_from_anchor", "rope_is_neox_style", "draft_vocab_size"]
    nested += [*SCALES, *{DFLASH: (), DFLASH2: SELECTOR}.get(parsed.kind, (*HEADS, "confidence_temperatures"))]
    windows = {window for window in parsed.windows if window}
    if len(windows) > 1:
        raise ValueError(f"the drafter's layers have windows {sorted(windows)}: one config.json can't say that")
    plain = {
        "architectures": [architecture],
        **_layers(parsed),
        "is_causal": parsed.is_causal,
        "block_size": parsed.block_size,
        "num_target_layers": parsed.num_target_layers,
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


def _layers(config: DrafterConfig) -> dict[str, Any]:
    """The fields of transformers' Qwen3Config."""
    window = next((window for window in config.windows if window), None)
    rope = {"rope_type": "default", **config.rope_scaling, "rope_theta": config.rope_theta}
    return {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in _SIZES if getattr(config, name) is not None},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_parameters": rope,
        "layer_types": [SLIDING if window else FULL for window in config.windows],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "tie_word_embeddings": False,
    }


def _header(config: DrafterConfig, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "dtype": "bfloat16",
        **_layers(config),
        "rope_theta": config.rope_theta,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
    }


def zlab_config(config: DrafterConfig) -> dict[str, Any]:
    """A config.json for a DFlash or DFlash 2 drafter as z-lab writes it."""
    nested = {"target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id}
    nested |= {name: getattr(config, name) for name in SCALES if getattr(config, name) is not None}
    if config.kind == DFLASH2:
        nested |= {name: getattr(config, name) for name in SELECTOR}
    return {
        **_header(config, ARCHITECTURES[config.kind]),
        "is_causal": config.is_causal,
        "dflash_config": nested,
    }


def deepspec_config(config: DrafterConfig, anchors: int) -> dict[str, Any]:
    """The same for a DSpark drafter as DeepSpec writes it; `anchors` is its num_anchors."""
    return {
        **_header(config, "Qwen3DSparkModel"),
        "num_anchors": anchors,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        **{name: getattr(config, name) for name in HEADS},
    }


def speculators_config(config: DrafterConfig, verifier: str, architectures: list[str]) -> dict[str, Any]:
    """The same as the speculators package writes it: tap ids count the embedding; `verifier` is the target's name."""
    names = {DFLASH: (), DFLASH2: SELECTOR, DSPARK: HEADS}[config.kind]
    temperatures = config.confidence_temperatures
    method = {"proposal_type": "greedy", "speculative_tokens": config.max_width, "verifier_accept_k": 1}
    return {
        "architectures": [ARCHITECTURES[config.kind]],
        "dtype": "bfloat16",
        "speculators_model_type": config.kind,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.is_causal is False,
        **{name: getattr(config, name) for name in names},
        **({"confidence_temperatures": list(temperatures)} if temperatures else {}),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers(config),
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }
