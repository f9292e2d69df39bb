"""How long a conversation may get: what doesn't fit is refused, never cut."""

import warnings
from typing import Any

from specmlx.targets.any_lm import AnyLM
from specmlx.targets.hybrid import Model


def context_limit(model: Model | AnyLM, *max_kv_sizes: int | None) -> tuple[int, str] | None:
    """The most tokens that a conversation with the model may have, and what says so; None where nothing does.

    Raises ValueError for a `max_kv_size` below 1 or beyond what the model was made for.
    """
    made_for = None if isinstance(model, AnyLM) else model.config.max_position_embeddings
    limit = None if made_for is None else (made_for, "the model's max_position_embeddings")
    for size in max_kv_sizes:
        if size is None:
            continue
        if size < 1:
            raise ValueError(f"max_kv_size is {size}: it must be at least 1")
        if made_for is not None and size > made_for:
            raise ValueError(f"max_kv_size is {size}: the model has max_position_embeddings {made_for}")
        if limit is None or size < limit[0]:
            limit = size, "max_kv_size"
    return limit


def tokens_left(limit: tuple[int, str] | None, tokens: int) -> int | None:
    """How many tokens an answer may have behind so many. Raises ValueError where there is no place for one."""
    if limit is None:
        return None
    most, what = limit
    if tokens >= most:
        raise ValueError(
            f"the conversation has {tokens} tokens with this prompt: {most - 1} leave place for an answer ({what})"
        )
    return most - tokens


def warn_if_full(limit: tuple[int, str], last: Any) -> None:
    """Say that an answer ended because the conversation is full, where its last response is of that kind."""
    if last.finish_reason == "length":
        most, what = limit
        warnings.warn(f"the answer ends here: the conversation has {most} tokens ({what})", stacklevel=4)
