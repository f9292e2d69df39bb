"""Next-token training of a small hybrid target."""

import mlx.core as mx
import mlx.nn as nn

from specmlx.targets.hybrid import Model


def next_token_loss(model: Model, tokens: mx.array, weights: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    """Weighted mean cross-entropy of tokens `[B, L + 1]`, weights `[B, L]`; and the share of weight 1 that is right."""
    hidden, _ = model.features(tokens[:, :-1])
    logits = model.lm_head(hidden)
    labels = tokens[:, 1:]
    losses = nn.losses.cross_entropy(logits, labels, reduction="none")
    answers = weights == 1
    right = ((mx.argmax(logits, axis=-1) == labels) & answers).sum() / mx.maximum(answers.sum(), 1)
    return (losses * weights).sum() / weights.sum(), {"right": right}
