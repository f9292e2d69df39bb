"""What a drafter is, and what it hands to the verify pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mlx.core as mx


@dataclass(frozen=True)
class Proposal:
    """γ guessed tokens after the anchor.

    tokens: `[B, γ]` int32.
    q: `[B, γ, V]` float32, the distribution that each token was sampled from, given the ones before it; None
        where nothing was sampled (greedy, coupled): a point mass.
    confidence: `[B, γ]` float32, the drafter's own estimate of acceptance by slot; None where it has none.
    """

    tokens: mx.array
    q: mx.array | None = None
    confidence: mx.array | None = None


@dataclass(frozen=True)
class Draws:
    """Draws by argmax(scale * logits + noise), which is softmax(scale * logits) where the noise is Gumbel's.

    noise: `[B, S, V]` float32, or None: the argmax. sampled: whether the proposal has to say its q.
    """

    noise: mx.array | None = None
    scale: float = 1.0
    sampled: bool = False

    def at(self, ids: mx.array) -> mx.array | None:
        """The noise of some ids, `[B, S, K]` or `[K]`."""
        if self.noise is None:
            return None
        return mx.take_along_axis(self.noise, ids, axis=-1) if ids.ndim > 1 else self.noise[..., ids]

    def q(self, logits: mx.array) -> mx.array:
        """What was sampled from, `[B, S, V]` float32, by the logits that were drawn from."""
        return mx.softmax(logits.astype(mx.float32) * self.scale, axis=-1)


def among(scores: mx.array, ids: mx.array, vocab: int, elsewhere: float = -mx.inf) -> mx.array:
    """Values `[B, S, K]` at their ids in `[B, S, V]`."""
    everywhere = mx.full((*ids.shape[:-1], vocab), elsewhere, dtype=scores.dtype)
    return mx.put_along_axis(everywhere, ids, scores, axis=-1)


class DraftPolicy(Protocol):
    """How a drafter turns its logits into tokens; `decoding.policy` has the implementations.

    greedy: whether `draft` is the argmax of the logits and nothing else. Then a drafter whose slots depend on one
        another may choose the whole path itself.
    """

    greedy: bool

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        """Tokens `[B, S]` int32, and q `[B, S, V]` float32 or None, by logits `[B, S, V]`.

        They are of the slots `slot`..`slot + S - 1`; slot 0 is the first token after the anchor.
        """

    def draws(self, lanes: int, slots: int, vocab: int) -> Draws | None:
        """How the first slots are drawn in fewer steps; None where more is done to the logits than that."""

    def draft_among(self, scores: mx.array, ids: mx.array, slot: int, vocab: int) -> tuple[mx.array, mx.array | None]:
        """As `draft`, for logits that are `scores` at `ids`, both `[B, S, K]`, and -inf elsewhere."""
        return self.draft(among(scores, ids, vocab), slot)


class Context(Protocol):
    """What a drafter keeps of one request.

    It may have `pack` and `unpack`, with which snapshots of a conversation keep it, and `joined` and `lanes`, where it
    can hold several sequences (see `drafters.context.Rows`).
    """

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate for the context to stand on its own, in another thread or many rounds on."""

    def settle(self, count: int | Sequence[int]) -> None:
        """Keep `count` rows (by sequence, if they differ) of the last `observe`, and forget the others.

        For a count that was unread at the time, and is known now, or has become less. May be repeated. Lazy.
        """


@runtime_checkable
class Drafter(Protocol):
    """Guesses tokens from the target's tapped layers. It holds weights only: a request's state is its context.

    tap_ids: 0-based layers of the target whose output (the residual stream after the layer) is tapped, in order.
    max_width: the most tokens that one proposal has.

    It may have a `fingerprint`, which tells its weights from others' in another process too (see
    `formats.module_weights`), and a `window`: no more than so many rows before the anchor are read (None: all).
    """

    tap_ids: tuple[int, ...]
    max_width: int

    def new_context(self, batch: int = 1, start: int = 0) -> Context:
        """An empty context; `start` is the absolute position of the first row that it will observe."""

    def propose(self, context: Context, anchor: mx.array, num_draft_tokens: int, policy: DraftPolicy) -> Proposal:
        """`num_draft_tokens` after the anchor `[B]` int32, which stands right after the rows observed. Lazy."""

    def observe(self, context: Context, tokens: mx.array, features: mx.array, count: int | mx.array) -> None:
        """Take rows that the target has processed: tokens `[B, n]` int32 and their taps `[B, n, F]`. Lazy.

        Rows 0..count-1 enter the context; `count` is an int, or int32 `[B]`, possibly unread on the device.
        Later rows may hold anything, NaN too.
        """
