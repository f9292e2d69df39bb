"""Samplers and logits processors that specmlx did not make: one row after the other, as plain decoding would.

They may carry state, so they see accepted rows only, once each and in order. The target's token is drawn with
them and compared with the proposal, which leaves its distribution as it is. Each row is read on the host.
"""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx

from specmlx.decoding.accept import Outcome
from specmlx.decoding.processors import Tokens


def accept_rows(
    tokens: mx.array,
    logits: mx.array,
    history: Tokens | None,
    processors: Sequence[Callable[[mx.array, mx.array], mx.array]],
    draw: Callable[[int, int, mx.array], mx.array],
) -> tuple[Outcome, mx.array]:
    """Keep the proposal while it equals the drawn tokens; see `RoundPolicy.accept` for the shapes.

    The outcome's faults are 1 where no token can be drawn from a row.

    Args:
        draw: (lane, row, logprobs [1, V]) -> the target's token, one element.

    Raises ValueError if a processor doesn't return [1, V] or a sampler a token of the vocabulary.
    """
    accepted, anchors, faults, logprobs = [], [], [], []
    for lane, drafted in enumerate(tokens.tolist()):
        past = _lane(history, lane) if processors else None
        kept = []
        for row in range(len(drafted) + 1):
            # An array of its own, since mlx-lm's processors assign in place.
            scores = logits[lane, row : row + 1]
            for number, processor in enumerate(processors):
                seen = mx.concatenate([past, mx.array(drafted[:row], dtype=mx.int32)])
                scores = _checked(processor(seen, scores), scores.shape, number)
            total = mx.logsumexp(scores, keepdims=True)
            kept.append(scores - total)
            token = _drawn(draw, lane, row, kept[-1], total)
            if row == len(drafted) or token != drafted[row]:
                break
        faults.append([0] * row + [int(token is None)] + [0] * (len(drafted) - row))
        missing = mx.full((len(drafted) - row, logits.shape[-1]), mx.nan, dtype=kept[0].dtype)
        logprobs.append(mx.concatenate([*kept, missing]))
        accepted.append(row)
        anchors.append(token or 0)
    outcome = Outcome(*(mx.array(each, dtype=mx.int32) for each in (accepted, anchors, faults)))
    return outcome, mx.stack(logprobs)


def _lane(history, lane):
    """The tokens of one lane without their padding, [N] int32."""
    history = mx.array(history, dtype=mx.int32)
    if history.ndim == 1:
        return history
    return mx.array([token for token in history[lane].tolist() if token >= 0], dtype=mx.int32)


def _checked(scores, shape, number):
    if not isinstance(scores, mx.array) or scores.shape != shape:
        got = scores.shape if isinstance(scores, mx.array) else type(scores).__name__
        raise ValueError(f"logits_processors[{number}] must return the logits, an array of shape {shape}: got {got}")
    return scores


def _drawn(draw, lane, row, logprobs, total):
    """The token of a row; None where its logits, whose logsumexp is `total`, leave none."""
    try:
        token = _token(draw(lane, row, logprobs), logprobs.shape[-1])
    # What a sampler says to NaN would hide where it comes from.
    except Exception:
        if math.isfinite(total.item()):
            raise
        return None
    # The draw has waited for it.
    return token if math.isfinite(total.item()) else None


def _token(drawn, vocab):
    if not isinstance(drawn, mx.array) or drawn.size != 1 or mx.issubdtype(drawn.dtype, mx.floating):
        raise ValueError(f"sampler must return one token id for each row, got {drawn!r}")
    token = drawn.item()
    if not 0 <= token < vocab:
        raise ValueError(f"sampler must return a token of the vocabulary 0..{vocab - 1}, got {token}")
    return token
