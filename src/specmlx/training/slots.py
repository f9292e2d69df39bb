"""The slots of many anchors' proposals: what each should guess, which count, and how far a guess gets."""

from typing import NamedTuple

import mlx.core as mx


class Slots(NamedTuple):
    """Slots `[B, N, S]` of anchors `[B, N]`.

    rows: the target's row that predicts the slot's token; labels, previous: that token and the one before it in the
    data; supervised: 1.0 as far as the answer goes without a break; real: which anchors there are.
    """

    rows: mx.array
    labels: mx.array
    previous: mx.array
    supervised: mx.array
    real: mx.array


def slots_of(tokens: mx.array, weights: mx.array, anchors: mx.array, count: int) -> Slots:
    """The `count` slots behind each anchor (-1 for none) of tokens `[B, L + 1]` with weights `[B, L]`."""
    L, real = weights.shape[1], anchors >= 0
    # Row a predicts the first slot, whose token stands at a + 1.
    rows = mx.maximum(anchors, 0)[..., None] + mx.arange(count, dtype=mx.int32)
    inside = mx.minimum(rows, L - 1)
    supervised = (mx.take_along_axis(weights[:, None], inside, axis=2) == 1) & (rows < L) & real[..., None]
    return Slots(
        inside,
        mx.take_along_axis(tokens[:, None], inside + 1, axis=2),
        mx.take_along_axis(tokens[:, None], inside, axis=2),
        mx.cumprod(supervised.astype(mx.float32), axis=-1),
        real,
    )


def normalised(logits: mx.array) -> mx.array:
    """Log-probabilities `[..., V]` of logits `[..., V]`."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def log_rows(logits: mx.array, rows: mx.array) -> mx.array:
    """Log-probabilities `[B, N, S, V]` of the rows `[B, N, S]` of logits `[B, L, V]`."""
    found = mx.take_along_axis(logits, rows.reshape(len(rows), -1)[..., None], axis=1)
    return normalised(found.reshape(*rows.shape, -1))


def weighted_mean(values: mx.array, weights: mx.array) -> mx.array:
    return (values * weights).sum() / mx.maximum(weights.sum(), 1e-6)


def acceptance_length(hits: mx.array, slots: Slots) -> mx.array:
    """1 plus the mean count of leading slots that hit, of supervised slots."""
    leading = mx.cumprod(hits.astype(mx.float32) * slots.supervised, axis=-1).sum(axis=-1)
    return 1 + (leading * slots.real).sum() / mx.maximum(slots.real.sum(), 1)
