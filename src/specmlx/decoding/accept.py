"""What a round keeps of a proposal, and how samplers and logits processors that specmlx did not make decide on it.

They are asked one row after the other, as in plain decoding. They may carry state, so they see accepted rows only, once
each and in order. The target's token is drawn with them and compared with the proposal, which leaves its distribution
as it is. Each row is read on the host.

Shapes: B sequences, γ proposed tokens (γ >= 0), T = γ + 1 verified rows, V tokens in the vocabulary. Row t of the
target stands after proposal token t; row γ, after the whole proposal, is reached when all are accepted.
"""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import mlx.core as mx

from specmlx.decoding.processors import Tokens

# What is wrong with the logits of a row: the target's own are NaN or +inf, or what the processors made of them is.
TARGETS, PROCESSED = 1, 2


Limit = tuple[int | None, Collection[int]]
"""How many tokens a sequence may still give, None for any number, and the tokens that end it."""


class Outcome(NamedTuple):
    """What one round delivers: `accepted` [B] int32 leading proposal tokens, then `next_anchor` [B] int32.

    faults: [B, γ + 1] int32, what is wrong with each row's logits, 0 where nothing is. A row with a fault has no token.
    """

    accepted: mx.array
    next_anchor: mx.array
    faults: mx.array | None = None


def accept_rows(
    policy: Any, tokens: mx.array, logits: mx.array, history: Tokens | None, indices: mx.array, limit: Limit
) -> tuple[tuple[mx.array, mx.array], mx.array, mx.array]:
    """Keep one sequence's proposal while it equals the drawn tokens; see `RoundPolicy.accept` for the shapes.

    No row after the sequence's end by `limit` is run. Returns (accepted, next anchor), the log-probabilities, and the
    faults, which are 1 where no token can be drawn from a row.

    Raises ValueError if a processor doesn't return [1, V] or a sampler a token of the vocabulary.
    """
    drafted, (left, ends), kept = tokens[0].tolist(), limit, []
    last = len(drafted) if left is None else min(len(drafted), left - 1)
    processors = policy.processors if policy.foreign_processors else ()
    past = mx.array(history, dtype=mx.int32) if processors else None
    for row in range(last + 1):
        # An array of its own, since mlx-lm's processors assign in place.
        scores = logits[0, row : row + 1]
        for number, processor in enumerate(processors):
            seen = mx.concatenate([past, mx.array(drafted[:row], dtype=mx.int32)])
            scores = _checked(policy.call(processor, seen, scores), scores.shape, number)
        total = mx.logsumexp(scores, keepdims=True)
        kept.append(scores - total)
        token = _drawn(policy, kept[-1], total, indices[:, row : row + 1])
        if row == last or token != drafted[row] or token in ends:
            break
    missing = len(drafted) - row
    faults = mx.array([[0] * row + [int(token is None)] + [0] * missing])
    logprobs = mx.concatenate([*kept, mx.full((missing, logits.shape[-1]), mx.nan, dtype=kept[0].dtype)])
    return (mx.array([row]), mx.array([token or 0])), logprobs[None], faults


def _checked(scores: Any, shape: tuple[int, ...], number: int) -> mx.array:
    if not isinstance(scores, mx.array) or scores.shape != shape:
        got = scores.shape if isinstance(scores, mx.array) else type(scores).__name__
        raise ValueError(f"logits_processors[{number}] must return the logits, an array of shape {shape}: got {got}")
    return scores


def _drawn(policy: Any, logprobs: mx.array, total: mx.array, index: mx.array) -> int | None:
    """The token of a row; None where its logits, whose logsumexp is `total`, leave none."""
    try:
        if policy.rule == "sampler-match":
            drawn = policy.call(policy.sampler, logprobs)
        else:
            scores, noise = policy.scores(logprobs[None], index)
            drawn = mx.argmax(scores if noise is None else scores + noise, axis=-1)
        if not isinstance(drawn, mx.array) or drawn.size != 1 or mx.issubdtype(drawn.dtype, mx.floating):
            raise ValueError(f"sampler must return one token id for each row, got {drawn!r}")
        token, vocab = drawn.item(), logprobs.shape[-1]
        if not 0 <= token < vocab:
            raise ValueError(f"sampler must return a token of the vocabulary 0..{vocab - 1}, got {token}")
    # What a sampler says to NaN would hide where it comes from.
    except Exception:
        if math.isfinite(total.item()):
            raise
        return None
    # The draw has waited for it.
    return token if math.isfinite(total.item()) else None
