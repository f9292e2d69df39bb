"""How long a conversation may get: what doesn't fit is refused, never cut."""

import math

import mlx.core as mx

from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import usable_memory
from specmlx.formats.values import check
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.config import FULL
from specmlx.targets.hybrid import Model


def context_limit(model: Model | AnyLM, *max_kv_sizes: int | None) -> tuple[float, str]:
    """The most tokens that a conversation with the model may have, and what says so; math.inf where nothing does.

    Raises ValueError for a `max_kv_size` below 1 or beyond what the model was made for.
    """
    made_for, what = math.inf, "max_position_embeddings"
    if not isinstance(model, AnyLM) and model.config.max_length is not None:
        made_for = model.config.max_length
        what = what if made_for == model.config.max_position_embeddings else "length by rope_parameters"
    limit = made_for, f"the model's {what}"
    for size in (check("max_kv_size", size) for size in max_kv_sizes):
        if size is not None and size > made_for:
            raise ValueError(f"max_kv_size is {size}: the model's {what} is {made_for}")
        if size is not None and size < limit[0]:
            limit = size, "max_kv_size"
    return limit


def tokens_left(limit: tuple[float, str], tokens: int) -> float:
    """How many tokens an answer may have after so many. Raises ValueError where there is no place for one."""
    most, what = limit
    if tokens >= most:
        raise ValueError(
            f"the conversation has {tokens} tokens with this prompt: an answer needs at most {most - 1} ({what})"
        )
    return most - tokens


def check_memory(model: Model | AnyLM, tokens: int, kv_format: KVFormat | None = None) -> None:
    """Raises ValueError where the keys and values of so many new tokens are more than the memory that is left.

    Told before anything runs: an allocation that fails would end the process on the CPU. mlx-lm's models allocate by
    themselves, and are not looked at. A format that the heads can't have raises too.
    """
    if isinstance(model, AnyLM):
        return
    config = model.config
    if kv_format is not None:
        kv_format.check(config.head_dim)
    row = mx.zeros((1, model.kv_heads, 1, config.head_dim), dtype=model.dtype)
    parts = [row] if kv_format is None else kv_format.quantized(row)
    needed = tokens * 2 * config.layer_types.count(FULL) * sum(part.nbytes for part in parts)
    left = usable_memory() - mx.get_active_memory()
    if needed > left:
        raise ValueError(
            f"{tokens} more tokens need {needed / 1e9:.1f} GB for keys and values, {left / 1e9:.1f} GB "
            "are left: make it shorter, or keep them in fewer bits (kv_bits)"
        )
