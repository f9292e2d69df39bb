"""A drafter's contexts for B lanes: one for all where they can be joined, else one a lane, asked in turn."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from specmlx.drafters.proposal import Context, Drafter, Joinable, Proposal
from specmlx.speculation.lane_policy import LanePolicy


class LaneDrafts(Protocol):
    """What the lanes' round needs of a drafter."""

    def propose(self, anchor: mx.array, width: int, policy: LanePolicy) -> Proposal:
        """`width` tokens after each lane's anchor `[B]` int32."""

    def observe(self, tokens: mx.array, features: mx.array | None, counts: Sequence[int]) -> None:
        """Take the first counts[b] of the rows `[B, T]` that lane b has had verified."""

    def join(self, contexts: Sequence[Context]) -> None:
        """Take new lanes in, behind the others."""

    def keep(self, lanes: Sequence[int]) -> None:
        """Go on with these lanes only, by their indices."""

    def context(self, lane: int) -> Context:
        """One lane's context, to go on with alone."""

    def arrays(self) -> list[mx.array]: ...


class Together:
    """One context of B lanes: the drafter reads its weights once for all of them."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self._context: Joinable | None = None

    def propose(self, anchor: mx.array, width: int, policy: LanePolicy) -> Proposal:
        return self.drafter.propose(self._context, anchor, width, policy)

    def observe(self, tokens: mx.array, features: mx.array | None, counts: Sequence[int]) -> None:
        self.drafter.observe(self._context, tokens, features, mx.array(counts, dtype=mx.int32))
        self._context.settle(counts)

    def join(self, contexts: Sequence[Joinable]) -> None:
        first, *rest = contexts if self._context is None else [self._context, *contexts]
        self._context = first.joined(rest)

    def keep(self, lanes: Sequence[int]) -> None:
        self._context = self._context.lanes(lanes) if lanes else None

    def context(self, lane: int) -> Context:
        return self._context.lanes([lane])

    def arrays(self) -> list[mx.array]:
        return [] if self._context is None else self._context.arrays()


class Apart:
    """A context of one lane each."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.contexts: list[Context] = []

    def propose(self, anchor: mx.array, width: int, policy: LanePolicy) -> Proposal:
        found = []
        for i, context in enumerate(self.contexts):
            alone = policy.lane(i)
            found.append(self.drafter.propose(context, anchor[i : i + 1], width, alone))
            if alone.failures:
                policy.failures[i] = alone.failures[0]
        most = max(one.tokens.shape[1] for one in found)
        if all(one.q is None for one in found):
            return Proposal(mx.concatenate([_padded(one.tokens, most) for one in found]))
        vocab = next(one.q.shape[-1] for one in found if one.q is not None)
        sampled = [_points(one.tokens, vocab) if one.q is None else one.q for one in found]
        tokens = [_padded(one.tokens, most) for one in found]
        return Proposal(
            mx.concatenate(tokens),
            mx.concatenate(
                [
                    mx.concatenate([q, _points(t[:, q.shape[1] :], vocab)], axis=1)
                    for t, q in zip(tokens, sampled, strict=True)
                ]
            ),
        )

    def observe(self, tokens: mx.array, features: mx.array | None, counts: Sequence[int]) -> None:
        for i, (context, count) in enumerate(zip(self.contexts, counts, strict=True)):
            mine = None if features is None else features[i : i + 1]
            self.drafter.observe(context, tokens[i : i + 1], mine, count)

    def join(self, contexts: Sequence[Context]) -> None:
        self.contexts += contexts

    def keep(self, lanes: Sequence[int]) -> None:
        self.contexts = [self.contexts[i] for i in lanes]

    def context(self, lane: int) -> Context:
        return self.contexts[lane]

    def arrays(self) -> list[mx.array]:
        return [x for context in self.contexts for x in context.arrays()]


def lane_drafts(drafter: Drafter) -> LaneDrafts:
    """How this drafter's contexts go together."""
    return Together(drafter) if isinstance(drafter.new_context(), Joinable) else Apart(drafter)


def _padded(tokens: mx.array, width: int) -> mx.array:
    """A short proposal made longer with a token that the target may or may not agree with."""
    missing = width - tokens.shape[1]
    return mx.concatenate([tokens, mx.zeros((1, missing), dtype=mx.int32)], axis=1) if missing else tokens


def _points(tokens: mx.array, vocab: int) -> mx.array:
    """The distributions that tokens are the only draw from, `[B, S]` -> `[B, S, V]`."""
    return (tokens[..., None] == mx.arange(vocab)).astype(mx.float32)
