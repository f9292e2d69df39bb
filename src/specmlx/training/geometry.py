"""What a new drafter looks like: defaults that fit its target, written as the publishers write theirs."""

from dataclasses import replace
from typing import Any

from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, DrafterConfig, default_taps
from specmlx.drafters.packaging import ARCHITECTURES, HEADS
from specmlx.drafters.written import zlab_config
from specmlx.targets.any_lm import LMConfig
from specmlx.targets.config import HybridConfig

KINDS = (DFLASH, DFLASH2, DSPARK)


def drafter_config(
    target: HybridConfig | LMConfig,
    kind: str,
    mask_token_id: int,
    *,
    block_size: int | None = None,
    layers: int | None = None,
    taps: tuple[int, ...] | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """A config.json for a drafter of `kind`, with nothing left to a reader's defaults.

    block_size: by default 8. layers: 5 for targets of 24 layers and more (as z-lab's), else 2. taps: layers whose
    outputs are tapped, by default as many as `layers` and at least 3, spread evenly from the second on: for targets of
    24 layers and more to the last but two, as z-lab's, else to the last but one, which the demo's drafters learn faster
    from. window: rows that every layer sees; None is all. Raises ValueError for what can't be.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    depth = target.num_hidden_layers
    block_size = 8 if block_size is None else block_size
    layers = (5 if depth >= 24 else 2) if layers is None else layers
    taps = _taps(depth, max(layers, 3)) if taps is None else taps
    for name, value, least in (("block_size", block_size, 2), ("layers", layers, 1), ("window", window, 2)):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")
    if bad := [tap for tap in taps if not 0 <= tap < depth - 1]:
        raise ValueError(f"tap {bad[0]} can't be used: the target's layers are 0 to {depth - 1}, the last is no tap")
    hidden = target.hidden_size
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel" if kind == DSPARK else ARCHITECTURES[kind]],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": target.intermediate_size or 3 * hidden,
        "num_hidden_layers": layers,
        **_attention(target),
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "num_target_layers": depth,
        "block_size": block_size,
        "is_causal": False,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * layers,
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }
    named = {"target_layer_ids": list(taps), "mask_token_id": mask_token_id}
    if kind == DSPARK:
        heads = zip(HEADS, (min(256, max(16, hidden // 4)), "vanilla", True, True), strict=True)
        return config | named | dict(heads)
    if kind == DFLASH2:
        named |= _selector(hidden)
    return config | {"dflash_config": named}


def _taps(depth: int, count: int) -> tuple[int, ...]:
    spread = default_taps(depth, count) if depth >= 24 else [1 + i * (depth - 3) // (count - 1) for i in range(count)]
    return tuple(dict.fromkeys(spread))


def _attention(target: HybridConfig | LMConfig) -> dict[str, Any]:
    """The target's heads and rope as far as its config has them."""
    if isinstance(target, HybridConfig):
        eps, theta = target.rms_norm_eps, target.rope_parameters.get("rope_theta")
    else:
        eps, theta = 1e-6, target.rope_theta
    heads = target.num_attention_heads or max(1, target.hidden_size // 64)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": target.num_key_value_heads or heads,
        "head_dim": target.head_dim or target.hidden_size // heads,
        "rms_norm_eps": eps,
        "rope_theta": theta or 10000.0,
    }


def _selector(hidden: int) -> dict[str, int]:
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16}
    return sizes | {"selector_rank": min(256, max(16, hidden // 4))}


def grown(config: DrafterConfig) -> dict[str, Any]:
    """A config.json for the DFlash 2 drafter that a DFlash drafter's trunk becomes.

    Raises ValueError where some of its layers are causal and others not, for which DFlash 2 has no word.
    """
    if len(causal := {config.causal(window) for window in config.windows}) > 1:
        raise ValueError("some of its layers are causal, others not: it can't become a dflash2 drafter")
    found = zlab_config(replace(config, kind=DFLASH2, is_causal=causal.pop(), **_selector(config.hidden_size)))
    # Trained in float32.
    return {name: value for name, value in found.items() if name != "dtype"}


def default_rate(hidden_size: int) -> float:
    """A peak learning rate: what the demo's drafters learn best with (4e-3 at 128), and the papers' at 5,120 (6e-4)."""
    return 4e-3 * (128 / hidden_size) ** 0.5


def mask_token(tokenizer: Any, vocab_size: int) -> int:
    """An ordinary row of the embedding that no text uses: one behind the tokenizer's own, else a special token's."""
    own = len(tokenizer)
    if own < vocab_size:
        return own
    special = sorted(set(tokenizer.all_special_ids))
    for name in ("<|mask|>", "[MASK]", "<mask>"):
        if (found := tokenizer.get_vocab().get(name)) is not None:
            return found
    if special:
        return special[-1]
    raise ValueError("the tokenizer has no token for the mask: give --mask-token-id an id that no text uses")
