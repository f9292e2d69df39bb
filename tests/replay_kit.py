"""Recorded rounds of another implementation, given to our drafters."""

import mlx.core as mx
from drafter_kit import Greedy


def replay(drafter, expected, observe):
    """Every round's proposal and logits; `observe` hands the round's committed rows to the drafter."""
    features = expected["features"].astype(mx.float32)[None]
    context, start, rounds = drafter.new_context(), 0, []
    for rows, anchor in zip(expected["rows"].tolist(), expected["anchors"].tolist(), strict=True):
        observe(context, features, start, rows)
        start += rows
        greedy = Greedy()
        proposal = drafter.propose(context, mx.array([anchor], dtype=mx.int32), drafter.max_width, greedy)
        rounds.append((proposal, greedy.logits))
    return rounds


def observe_rows(drafter):
    def observe(context, features, start, rows):
        tokens = mx.zeros((1, rows), dtype=mx.int32)
        drafter.observe(context, tokens, features[:, start : start + rows], rows)

    return observe


def observe_verified(drafter):
    """As the loop does: a whole block's rows, rejected ones not even finite, the count unread."""

    def observe(context, features, start, rows):
        block = features[:, start : start + rows]
        rejected = mx.full((1, 12, features.shape[2]), float("nan"))
        block = mx.concatenate([block, rejected], axis=1)
        count = mx.array([rows], dtype=mx.int32) + mx.zeros((1,), dtype=mx.int32)
        drafter.observe(context, mx.zeros(block.shape[:2], dtype=mx.int32), block, count)

    return observe
