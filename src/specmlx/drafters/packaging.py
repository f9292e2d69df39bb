"""config.json of the speculators package and of Gemma 4 drafters, in the words of the other publishers."""

import math
from typing import Any

GEMMA4_DSPARK = ["Gemma4DSparkModel"]
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
_KEPT = (
    "block_size",
    "mask_token_id",
    "draft_vocab_size",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_temperatures",
    "quantization",
    "quantization_config",
)


_OBJECTS = (
    "dflash_config",
    "dspark_config",
    "rope_parameters",
    "rope_scaling",
    "speculators_config",
    "transformer_layer_config",
    "text_config",
    "quantization",
    "quantization_config",
)
_NAMES = ("architectures", "layer_types")
_NUMBERS = (
    "rope_theta",
    "sliding_window",
    "max_window_layers",
    "max_position_embeddings",
    "rms_norm_eps",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "attention_value_scale",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)


def check_types(config: dict[str, Any]) -> None:
    """Raise ValueError, one line, where a known part of a config.json, at any depth of it, has the wrong type."""
    for name, value in config.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
        if value is None:
            continue
        if name in _OBJECTS and not isinstance(value, dict):
            raise ValueError(f"config.json's {name} is {value!r}: it must be an object")
        if name in _NAMES and not (isinstance(value, list) and all(isinstance(x, str) for x in value)):
            raise ValueError(f"config.json's {name} is {value!r}: it must be a list of names")
        if name in _NUMBERS and not number:
            raise ValueError(f"config.json's {name} is {value!r}: it must be a number")
        if name in ("speculators_model_type", "model_type") and not isinstance(value, str):
            raise ValueError(f"config.json's {name} is {value!r}: it must be a name")
        if name == "proposal_methods" and not (isinstance(value, list) and all(isinstance(x, dict) for x in value)):
            raise ValueError(f"config.json's {name} is {value!r}: it must be a list of objects")
        if name in _OBJECTS:
            check_types(value)


def unpacked(config: dict[str, Any]) -> dict[str, Any]:
    """A speculators config.json as z-lab and DeepSpec would have written it; any other as it is.

    Its layer ids count hidden states, of which the first is the embedding: k is the output of layer k - 1. Raises
    ValueError, one line with the question that it leaves open, where publishers' readers disagree about what it says.
    """
    kind = config.get("speculators_model_type")
    packaged = config.get("speculators_config") or {}
    if kind is None and not packaged:
        return config
    kind = kind or packaged.get("algorithm")
    if kind not in ARCHITECTURES:
        raise ValueError(f"this is a speculators package of kind {kind!r}: specmlx loads {', '.join(ARCHITECTURES)}")
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise ValueError("this speculators package has no transformer_layer_config: of what size are its layers?")
    taps = config.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, list) or not taps or not all(isinstance(tap, int) for tap in taps):
        raise ValueError(
            f"this speculators package has aux_hidden_state_layer_ids {taps!r}: which of the target's layers feed it?"
        )
    if (other := config.get("target_hidden_size")) not in (None, layers.get("hidden_size")):
        raise ValueError(
            f"target_hidden_size is {other}, the layers' hidden_size {layers.get('hidden_size')}: not supported yet"
        )
    anchored = _sample_from_anchor(config, kind)
    if config.get("markov_head_type") == "rnn" and not anchored:
        raise ValueError(
            "this speculators package has an rnn Markov head and proposes nothing from the anchor's row: "
            "does its state begin at that row or behind it? (speculators trains it from there)"
        )
    result = {**layers, **{name: config[name] for name in _KEPT if name in config}}
    result |= {
        "architectures": [ARCHITECTURES[kind]],
        "target_layer_ids": [tap - 1 for tap in taps],
        "sample_from_anchor": anchored,
        "is_causal": _is_causal(config, kind),
    }
    return result


def gemma4_words(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of DeepSpec's drafters for Gemma 4 as others write theirs; any other as it is.

    It is a copy of the target's; all layers attend as the target's full-attention layers do. Raises ValueError for
    what DeepSpec has not either.
    """
    if config.get("architectures") != GEMMA4_DSPARK:
        return config
    others = {
        "enable_moe_block": config.get("enable_moe_block"),
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input"),
        "num_kv_shared_layers": config.get("num_kv_shared_layers"),
        "hidden_activation": config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh",
    }
    if found := [name for name, value in others.items() if value]:
        raise ValueError(f"this Gemma 4 drafter has {found[0]} {config[found[0]]!r}: not supported yet")
    rope = (config.get("rope_parameters") or {}).get("full_attention")
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters has full_attention {rope!r}: how are a Gemma 4 drafter's rows turned?")
    check_types(rope)
    kv_heads = "num_global_key_value_heads" if config.get("attention_k_eq_v") else "num_key_value_heads"
    scale = math.sqrt(size) if type(size := config.get("hidden_size")) is int and size > 0 else None
    return config | {
        "head_dim": config.get("global_head_dim"),
        "num_key_value_heads": config.get(kv_heads),
        "rope_parameters": rope,
        "input_embedding_scale": config.get("input_embedding_scale") or scale,
    }


def _sample_from_anchor(config: dict[str, Any], kind: str) -> bool:
    """Whether the anchor's row proposes: by the proposal count, else by the config's own word, else by the kind."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count, block, said = (
        methods[0].get("speculative_tokens"),
        config.get("block_size"),
        config.get("sample_from_anchor"),
    )
    counted = {0: True, 1: False}.get(block - count) if isinstance(count, int) and isinstance(block, int) else None
    if None not in (counted, said) and counted != said:
        raise ValueError(
            f"sample_from_anchor is {said} but {count} tokens are proposed from blocks of {block}: "
            "does the anchor's row propose a token?"
        )
    known = said if counted is None else counted
    if known is None and kind == "dspark":
        raise ValueError(
            "this speculators package has neither sample_from_anchor nor a proposal count that tells: "
            "does the anchor's row propose a token? (speculators says yes, vLLM no)"
        )
    return bool(known)


def _is_causal(config: dict[str, Any], kind: str) -> bool | None:
    """False where sliding layers are bidirectional like full ones; None where they are causal."""
    bidirectional = config.get("sliding_window_non_causal")
    if bidirectional is None:
        types = config["transformer_layer_config"].get("layer_types") or []
        if kind != "dflash2" and "sliding_attention" in types:
            raise ValueError(
                "this speculators package has sliding layers but no sliding_window_non_causal: "
                "do rows of a block see the rows after them? (speculators says no, vLLM yes)"
            )
        bidirectional = True
    return False if bidirectional else None
