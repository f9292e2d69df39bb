"""config.json of the speculators package and of Gemma 4 drafters, in the words of the other publishers."""

import math
from typing import Any

from specmlx.formats.config import MOST, read, shown

GEMMA4_DSPARK = ["Gemma4DSparkModel"]
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
# Fields of DFlash 2's selector and convolutions, of DSpark's heads, and of scaled embeddings and logits.
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_THIS = "this speculators package has"
_KEPT = ("block_size", "mask_token_id", "draft_vocab_size", *SELECTOR, *HEADS, "confidence_temperatures")
_KEPT += ("quantization", "quantization_config")


def unpacked(config: dict[str, Any]) -> dict[str, Any]:
    """A speculators config.json as z-lab and DeepSpec would have written it; any other as it is.

    Its layer ids count hidden states, of which the first is the embedding: k is the output of layer k - 1. Raises
    ValueError, one line with the question that it leaves open, where publishers' readers disagree about what it says.
    """
    kind = read(config, "speculators_model_type", str, None)
    packaged = read(config, "speculators_config", dict, {})
    if kind is None and not packaged:
        return config
    if (kind := kind or read(packaged, "algorithm", str)) not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"this is a speculators package of kind {shown(kind)}: specmlx loads {known}")
    if not (layers := read(config, "transformer_layer_config", dict, {})):
        raise ValueError(f"{_THIS} no transformer_layer_config: of what size are its layers?")
    if not (taps := read(config, "aux_hidden_state_layer_ids", [int], [])):
        raise ValueError(f"{_THIS} aux_hidden_state_layer_ids {taps}: which of the target's layers feed it?")
    hidden = read(layers, "hidden_size", int)
    if (other := read(config, "target_hidden_size", int, hidden)) != hidden:
        raise ValueError(f"target_hidden_size is {other}, the layers' hidden_size {hidden}: not supported yet")
    anchored = _sample_from_anchor(config, kind)
    if config.get("markov_head_type") == "rnn" and not anchored:
        raise ValueError(
            f"{_THIS} an rnn Markov head and proposes nothing from the anchor's row: "
            "does its state begin at that row or behind it? (speculators trains it from there)"
        )
    bidirectional = read(config, "sliding_window_non_causal", bool, None)
    if bidirectional is None and kind != "dflash2" and "sliding_attention" in read(layers, "layer_types", [str], []):
        raise ValueError(
            f"{_THIS} sliding layers but no sliding_window_non_causal: "
            "do rows of a block see the rows after them? (speculators says no, vLLM yes)"
        )
    return {
        **layers,
        **{name: config[name] for name in _KEPT if name in config},
        "architectures": [ARCHITECTURES[kind]],
        "target_layer_ids": [tap - 1 for tap in taps],
        "sample_from_anchor": anchored,
        # False where sliding layers are bidirectional like full ones; None where they are causal.
        "is_causal": None if bidirectional is False else False,
    }


def gemma4_words(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of DeepSpec's drafters for Gemma 4 as others write theirs; any other as it is.

    It is a copy of the target's; all layers attend as the target's full-attention layers do. Raises ValueError for
    what DeepSpec has not either.
    """
    if config.get("architectures") != GEMMA4_DSPARK:
        return config
    gelu, others = "gelu_pytorch_tanh", ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers")
    found = [name for name in others if config.get(name)]
    if found or config.get("hidden_activation", gelu) != gelu:
        found.append("hidden_activation")
        raise ValueError(f"this Gemma 4 drafter has {found[0]} {shown(config[found[0]])}: not supported yet")
    if (rope := read(read(config, "rope_parameters", dict, {}), "full_attention", dict, None)) is None:
        raise ValueError("rope_parameters has full_attention None: how are a Gemma 4 drafter's rows turned?")
    k_eq_v = read(config, "attention_k_eq_v", bool, False)
    scale = math.sqrt(read(config, "hidden_size", int, above=0, most=MOST))
    return config | {
        "head_dim": config.get("global_head_dim"),
        "num_key_value_heads": config.get("num_global_key_value_heads" if k_eq_v else "num_key_value_heads"),
        "rope_parameters": rope,
        "rope_scaling": None,
        "input_embedding_scale": read(config, "input_embedding_scale", float, scale) or scale,
    }


def _sample_from_anchor(config: dict[str, Any], kind: str) -> bool:
    """Whether the anchor's row proposes: by the proposal count, else by the config's own word, else by the kind."""
    methods = read(read(config, "speculators_config", dict, {}), "proposal_methods", [dict], []) or [{}]
    count, block = read(methods[0], "speculative_tokens", int, None), read(config, "block_size", int, None)
    said, question = read(config, "sample_from_anchor", bool, None), "does the anchor's row propose a token?"
    counted = None if None in (count, block) else {0: True, 1: False}.get(block - count)
    if None not in (counted, said) and counted != said:
        raise ValueError(
            f"sample_from_anchor is {said} but {count} tokens are proposed from blocks of {block}: {question}"
        )
    known = said if counted is None else counted
    if known is None and kind == "dspark":
        said = "neither sample_from_anchor nor a proposal count that tells"
        raise ValueError(f"{_THIS} {said}: {question} (speculators says yes, vLLM no)")
    return bool(known)
