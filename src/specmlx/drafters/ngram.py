"""Prompt lookup: what followed the last time that the text ended as it does now. No weights, any target."""

from dataclasses import dataclass

import mlx.core as mx

from specmlx.cache.kv import STEP
from specmlx.drafters.base import MAX_WIDTH, BaseDrafter
from specmlx.drafters.context import Rows
from specmlx.drafters.proposal import DraftPolicy, Proposal


class NGramContext(Rows):
    """The tokens `[B, capacity]` of each sequence, of which `length` count; later ones may be anything."""

    def __init__(self, batch: int):
        super().__init__(batch)
        self.tokens = mx.zeros((batch, 0), dtype=mx.int32)

    def pack(self, lane: int = 0) -> dict[str, mx.array]:
        """See `Rows`."""
        return {"tokens": mx.contiguous(self.tokens[lane : lane + 1, : self.length[lane].item()])}

    def unpack(self, packed: dict[str, mx.array]) -> None:
        self.tokens = packed["tokens"]
        self.append(self.tokens.shape[1], self.tokens.shape[1])


@dataclass(eq=False)
class NGram(BaseDrafter):
    """Proposes the continuation of the latest longest match of the text's end, up to `longest` tokens (PLD, 2023).

    A continuation that reaches the end of the text goes round: a period repeats itself. Its confidence is m / (m + 1)
    after a match of m tokens, 0 without one. It is a point mass, whatever the policy. Nothing is proposed before the
    target has run a row.
    """

    max_width: int = MAX_WIDTH
    longest: int = 8
    fingerprint = "ngram"

    def new_context(self, batch: int = 1, start: int = 0) -> NGramContext:
        return NGramContext(batch)

    def _observe(self, context: NGramContext, tokens: mx.array, features: None, count: int | mx.array) -> None:
        context.tokens = _written(context, tokens)
        context.append(count, tokens.shape[1])

    def _propose(self, context: NGramContext, anchor: mx.array, slots: int, policy: DraftPolicy) -> Proposal | None:
        if context.max_length == 0:
            return None
        text = _written(context, anchor.astype(mx.int32)[:, None])
        start, matched = last_match(text, context.length + 1, self.longest)
        period = mx.maximum(context.length + 1 - start, 1)
        at = start[:, None] + mx.arange(slots, dtype=mx.int32) % period[:, None]
        confidence = mx.broadcast_to((matched / (matched + 1))[:, None], at.shape)
        return Proposal(mx.take_along_axis(text, at, axis=1), None, confidence)


def last_match(text: mx.array, length: mx.array, longest: int) -> tuple[mx.array, mx.array]:
    """Where the continuation of the best earlier match of each lane's end begins, and how long that match is.

    text: `[B, capacity]` int32; length: `[B]` int32, of which the tokens count. The longest match up to `longest`
    tokens wins, of equally long ones the latest. Returns int32 `[B]` each; without a match the second is 0.
    """
    B, capacity = text.shape
    at, back = mx.arange(capacity, dtype=mx.int32), mx.arange(longest, dtype=mx.int32)
    last = length[:, None] - 1 - back
    ends = mx.take_along_axis(text, mx.maximum(last, 0), axis=1)
    # same[b, i, k]: the token k before i is the token k before the end.
    before = at[:, None] - back
    tokens = mx.take(text, mx.maximum(before, 0).reshape(-1), axis=1).reshape(B, capacity, longest)
    same = (tokens == ends[:, None]) & (before >= 0) & (last >= 0)[:, None]
    matched = mx.cumprod(same.astype(mx.int32), axis=-1).sum(axis=-1)
    matched = mx.where(at < length[:, None] - 1, matched, -1)
    best = mx.argmax(matched * capacity + at, axis=1).astype(mx.int32)
    found = mx.take_along_axis(matched, best[:, None], axis=1)[:, 0]
    # Where there is no earlier token, the end itself.
    return mx.minimum(best + 1, length - 1), mx.maximum(found, 0).astype(mx.int32)


def _written(context: NGramContext, tokens: mx.array) -> mx.array:
    """A context's tokens with `tokens` `[B, n]` behind those that count, in a longer buffer if need be."""
    buffer, n = context.tokens, tokens.shape[1]
    if (missing := context.max_length + n - buffer.shape[1]) > 0:
        buffer = mx.pad(buffer, [(0, 0), (0, -(-missing // STEP) * STEP)])
    return mx.put_along_axis(buffer, context.length[:, None] + mx.arange(n, dtype=mx.int32), tokens, axis=1)
