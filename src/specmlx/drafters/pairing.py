"""Which drafter fits which target, told before any weight is read."""

from types import SimpleNamespace
from typing import Any

from specmlx.drafters.config import DrafterConfig, is_language_model
from specmlx.formats.config import read, text_of

SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def check_pair(target_config: Any, drafter_config: dict[str, Any] | DrafterConfig) -> list[str]:
    """Why a drafter can't serve a target, by their config.json (or what was read of them); empty if it can.

    A target's config has to have `SIZES`. Each reason is a line that names both values.
    """
    config = drafter_config
    if isinstance(target_config, dict):
        try:
            text = text_of(target_config)
            target_config = SimpleNamespace(**{name: read(text, name, int, above=0) for name in SIZES})
        except ValueError as error:
            return [f"the target: {error}"]
    try:
        if isinstance(config, dict):
            if is_split_mtp(config):
                return mtp_reasons(config, target_config)
            if is_language_model(config):
                return lm_reasons(config)
            config = DrafterConfig.from_dict(config)
    except ValueError as error:
        return [str(error)]
    layers, vocab = target_config.num_hidden_layers, target_config.vocab_size
    hidden, mask, depth = target_config.hidden_size, config.mask_token_id, config.num_target_layers
    # The last layer's output is never a tap: Hugging Face's hidden_states end with it normed, so nobody
    # trains on it.
    outside = [tap for tap in config.target_layer_ids if not 0 <= tap < layers - 1]
    reasons = {
        f"hidden size: the drafter's is {config.hidden_size}, the target's {hidden}": config.hidden_size != hidden,
        f"layers: the drafter wants a target of {depth}, this one has {layers}": depth not in (None, layers),
        f"taps: the drafter taps layers {outside}, the target's can be 0 to {layers - 2} (of {layers})": outside,
        f"vocabulary: the drafter's is {config.vocab_size}, the target's {vocab}": config.vocab_size != vocab,
        f"mask token: the drafter's id is {mask}, the target's vocabulary {vocab}": not 0 <= mask < vocab,
    }
    return [reason for reason, holds in reasons.items() if holds]


def is_split_mtp(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of an MTP head in a repository of its own (mlx-vlm's split)."""
    return config.get("model_type") == "qwen3_5_mtp"


def lm_reasons(config: dict[str, Any]) -> list[str]:
    """Why a language model can't be a drafter, from its config.json; if its tokens are the target's is not asked."""
    text = text_of(config)
    if "linear_attention" in read(text, "layer_types", [str], []) or "linear_num_value_heads" in text:
        return [f"{config.get('model_type')} has recurrent layers, whose state can't be trimmed: it can't be a drafter"]
    return []


def mtp_reasons(config: dict[str, Any], target_config: Any) -> list[str]:
    """Why the MTP head that a config.json (the target's or a split repository's) describes can't serve a target."""
    text = text_of(config)
    pairs = {
        what: (read(text, name, int, None), getattr(target_config, name))
        for what, name in zip(("hidden size", "layers", "vocabulary"), SIZES, strict=True)
    }
    reasons = [f"{what}: the MTP head's target has {a}, this one {b}" for what, (a, b) in pairs.items() if a != b]
    if (layers := read(text, "mtp_num_hidden_layers", int, 1)) != 1:
        reasons.append(f"mtp_num_hidden_layers is {layers}: specmlx runs heads of one layer")
    if read(text, "mtp_use_dedicated_embeddings", bool, False):
        reasons.append("mtp_use_dedicated_embeddings: an MTP head with an embedding of its own is not supported yet")
    return reasons
