"""What a new drafter looks like: defaults that fit its target, written as the publishers write theirs."""

from dataclasses import replace
from typing import Any

from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, DrafterConfig, default_taps
from specmlx.drafters.packaging import ARCHITECTURES, HEADS
from specmlx.drafters.written import publishers_config
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
    depth, hidden = target.num_hidden_layers, target.hidden_size
    block_size = 8 if block_size is None else block_size
    layers = (5 if depth >= 24 else 2) if layers is None else layers
    if taps is None:
        n = max(layers, 3)
        spread = default_taps(depth, n) if depth >= 24 else [1 + i * (depth - 3) // (n - 1) for i in range(n)]
        taps = tuple(dict.fromkeys(spread))
    for name, value, least in (("block_size", block_size, 2), ("layers", layers, 1), ("window", window, 2)):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")
    if bad := [tap for tap in taps if not 0 <= tap < depth - 1]:
        raise ValueError(f"tap {bad[0]} can't be used: the target's layers are 0 to {depth - 1}, the last is no tap")
    # The target's heads and rope as far as its config has them.
    heads = target.num_attention_heads or max(1, hidden // 64)
    hybrid = isinstance(target, HybridConfig)
    theta = target.rope_parameters.get("rope_theta") if hybrid else target.rope_theta
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel" if kind == DSPARK else ARCHITECTURES[kind]],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": target.intermediate_size or 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": target.num_key_value_heads or heads,
        "head_dim": target.head_dim or hidden // heads,
        "rms_norm_eps": target.rms_norm_eps if hybrid else 1e-6,
        "rope_theta": theta or 10000.0,
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
        return config | named | dict(zip(HEADS, (_rank(hidden), "vanilla", True, True), strict=True))
    return config | {"dflash_config": named | (_selector(hidden) if kind == DFLASH2 else {})}


def _rank(hidden: int) -> int:
    return min(256, max(16, hidden // 4))


def _selector(hidden: int) -> dict[str, int]:
    return {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16, "selector_rank": _rank(hidden)}


def grown(config: DrafterConfig) -> dict[str, Any]:
    """A config.json for the DFlash 2 drafter that a DFlash drafter's trunk becomes.

    Raises ValueError where some of its layers are causal and others not, for which DFlash 2 has no word.
    """
    if len(causal := {config.causal(window) for window in config.windows}) > 1:
        raise ValueError("some of its layers are causal, others not: it can't become a dflash2 drafter")
    found = publishers_config(replace(config, kind=DFLASH2, is_causal=causal.pop(), **_selector(config.hidden_size)))
    # Trained in float32.
    del found["dtype"]
    return found


def default_rate(hidden_size: int) -> float:
    """A peak learning rate: what the demo's drafters learn best with (4e-3 at 128), and the papers' at 5,120 (6e-4)."""
    return 4e-3 * (128 / hidden_size) ** 0.5


def mask_token(tokenizer: Any, vocab_size: int) -> int:
    """An ordinary row of the embedding that no text uses: one behind the tokenizer's own, else a special token's."""
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    for name in ("<|mask|>", "[MASK]", "<mask>"):
        if (found := tokenizer.get_vocab().get(name)) is not None:
            return found
    if special := tokenizer.all_special_ids:
        return max(special)
    raise ValueError("the tokenizer has no token for the mask: give --mask-token-id an id that no text uses")
