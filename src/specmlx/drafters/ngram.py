"""Prompt lookup: what followed the last time that the text ended as it does now. No weights, any target."""

from collections.abc import Sequence

import mlx.core as mx

from specmlx.drafters.proposal import DraftPolicy, Proposal

MAX_WIDTH, LONGEST = 7, 8
"""γ, and how many of the last tokens are compared."""
_STEP = 256


class NGramContext:
    """The tokens `[B, capacity]` of each lane, of which `length` count; later ones may be anything."""

    def __init__(self, batch: int):
        self.tokens = mx.zeros((batch, 0), dtype=mx.int32)
        self.length = mx.zeros((batch,), dtype=mx.int32)
        self.max_length = 0
        # Length and max_length before the last observation.
        self.before = (self.length, 0)

    def append(self, tokens: mx.array, count: int | mx.array) -> None:
        B, n = tokens.shape
        self.tokens = write(self.tokens, tokens, self.length, self.max_length)
        self.before = (self.length, self.max_length)
        self.length, self.max_length = self.length + count, self.max_length + n

    def settle(self, count: int | Sequence[int]) -> None:
        """See `drafters.proposal.Context`."""
        length, max_length = self.before
        most = count if isinstance(count, int) else max(count)
        self.length, self.max_length = length + mx.array(count, dtype=mx.int32), max_length + most

    def arrays(self) -> list[mx.array]:
        return [self.tokens, self.length]

    def joined(self, others: "Sequence[NGramContext]") -> "NGramContext":
        """See `drafters.proposal.Joinable`."""
        contexts = [self, *others]
        joined = NGramContext(0)
        joined.max_length = max(context.max_length for context in contexts)
        padded = [
            mx.pad(c.tokens[:, : joined.max_length], [(0, 0), (0, _missing(c, joined.max_length))]) for c in contexts
        ]
        joined.tokens = mx.concatenate(padded)
        joined.length = mx.concatenate([context.length for context in contexts])
        joined.before = (joined.length, joined.max_length)
        return joined

    def lanes(self, indices: Sequence[int]) -> "NGramContext":
        at = mx.array(indices, dtype=mx.int32)
        some = NGramContext(0)
        some.tokens, some.length, some.max_length = self.tokens[at], self.length[at], self.max_length
        some.before = (some.length, some.max_length)
        return some

    def pack(self, lane: int = 0) -> dict[str, mx.array]:
        """See `Packable`."""
        return {"tokens": mx.contiguous(self.tokens[lane : lane + 1, : self.length[lane].item()])}

    def unpack(self, packed: dict[str, mx.array]) -> None:
        self.tokens = packed["tokens"]
        self.max_length = self.tokens.shape[1]
        self.length = mx.array([self.max_length], dtype=mx.int32)
        self.before = (self.length, self.max_length)


class NGram:
    """Proposes the continuation of the latest longest match of the text's end, up to `longest` tokens (PLD, 2023).

    A continuation that reaches the end of the text goes round: a period repeats itself. Its confidence is m / (m + 1)
    after a match of m tokens, 0 without one. Nothing is proposed before the target has run a row.
    """

    tap_ids: tuple[int, ...] = ()
    fingerprint = "ngram"

    def __init__(self, max_width: int = MAX_WIDTH, longest: int = LONGEST):
        self.max_width = max_width
        self.longest = longest

    def new_context(self, batch: int = 1, start: int = 0) -> NGramContext:
        return NGramContext(batch)

    def observe(
        self, context: NGramContext, tokens: mx.array, features: mx.array | None, count: int | mx.array
    ) -> None:
        """See `Drafter.observe`; only the tokens are looked at. Raises ValueError for an int `count` outside 0..n."""
        n = tokens.shape[1]
        if isinstance(count, int):
            if not 0 <= count <= n:
                raise ValueError(f"can't observe {count} rows: there are {n}")
            tokens = tokens[:, :count]
        if tokens.shape[1]:
            context.append(tokens, count)

    def propose(self, context: NGramContext, anchor: mx.array, width: int, policy: DraftPolicy) -> Proposal:
        """See `Drafter.propose`. The proposal is a point mass, whatever the policy."""
        if not 0 <= width <= self.max_width:
            raise ValueError(f"width {width} is outside 0..{self.max_width}, this drafter's range")
        anchor = anchor.astype(mx.int32)[:, None]
        if width == 0 or context.max_length == 0:
            return Proposal(mx.zeros((len(anchor), 0), dtype=mx.int32))
        text = write(context.tokens, anchor, context.length, context.max_length)
        start, matched = last_match(text, context.length + 1, self.longest)
        period = mx.maximum(context.length + 1 - start, 1)
        at = start[:, None] + mx.arange(width, dtype=mx.int32) % period[:, None]
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


def write(buffer: mx.array, tokens: mx.array, start: mx.array, max_length: int) -> mx.array:
    """The buffer `[B, capacity]`, grown if need be, with tokens `[B, n]` at `start` `[B]`, at most `max_length`."""
    B, n = tokens.shape
    if (missing := max_length + n - buffer.shape[1]) > 0:
        buffer = mx.pad(buffer, [(0, 0), (0, -(-missing // _STEP) * _STEP)])
    return mx.put_along_axis(buffer, start[:, None] + mx.arange(n, dtype=mx.int32), tokens, axis=1)


def _missing(context: NGramContext, max_length: int) -> int:
    return max_length - min(context.tokens.shape[1], max_length)
