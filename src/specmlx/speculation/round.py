"""One round on its way through the device: issued without a look at it, then read at once."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

from specmlx.drafters.proposal import Drafter, Proposal
from specmlx.speculation.accept import TARGETS, Outcome
from specmlx.speculation.drafting import observe, observe_ahead
from specmlx.speculation.policy import Policy
from specmlx.state.conversation import Conversation, Observable
from specmlx.state.layers import LayerStates, Pass


class Verifier(Protocol):
    """What a round needs of a model."""

    vocab_size: int

    def verify(self, states: LayerStates, rows: mx.array, tap_ids: Sequence[int]) -> Pass: ...


class Delivery(NamedTuple):
    """What the host reads of one lane's round: the proposal, how much of it is kept, what follows, its rows' faults."""

    drafted: list[int]
    accepted: int
    next_anchor: int
    faults: list[int]

    def tokens(self, vocab_size: int) -> list[int]:
        """The tokens that leave. Raises ValueError for a proposal outside the vocabulary."""
        if outside := [token for token in self.drafted if not 0 <= token < vocab_size]:
            raise ValueError(f"the drafter proposed token {outside[0]}: the vocabulary has {vocab_size}")
        return [*self.drafted[: self.accepted], self.next_anchor]

    def check(self, row: int, position: int) -> None:
        """Raises RuntimeError where the row of a token, which would be at `position`, has a fault."""
        if self.faults[row] == TARGETS:
            raise RuntimeError(f"the target's logits for token {position} are NaN or infinite")
        if self.faults[row]:
            raise RuntimeError(f"the logits for token {position} are NaN or infinite after the logits processors")


class Acceptance(Protocol):
    """What decides about a proposal, for all lanes."""

    def accept(self, tokens: mx.array, q: mx.array | None, logits: mx.array) -> tuple[Outcome, mx.array]: ...


@dataclass(frozen=True)
class Round:
    """A proposal and what the target says to it, on the device.

    proposal: of γ tokens. verified: the pass over its T = γ + 1 rows. outcome: what is kept.
    observable: the rows and their taps. logprobs: by lane, its T rows `[V]`, which any thread may read: evaluated.
    report: `[B, 2 + γ + T]` int32, all that the host reads: accepted, next anchor, the proposal, the rows' faults.
    sent: seconds that handing it to the device took.
    """

    proposal: Proposal
    verified: Pass
    outcome: Outcome
    observable: Observable
    logprobs: list[list[mx.array]]
    report: mx.array
    sent: float = 0.0

    @property
    def width(self) -> int:
        return self.proposal.tokens.shape[1]

    @property
    def count(self) -> int | mx.array:
        """Rows that enter the state: 1 where there was no proposal, else `[B]` int32, not read."""
        return self.outcome.accepted + 1 if self.width else 1

    def read(self, states: LayerStates) -> list[Delivery]:
        """Wait for the round, and get what it has for each lane."""
        states.evaluate(self.report)
        width = self.width
        return [
            Delivery(rest[:width], accepted, next_anchor, rest[width:])
            for accepted, next_anchor, *rest in self.report.tolist()
        ]


def issue(
    target: Verifier,
    conversation: Conversation,
    policy: Policy,
    drafter: Drafter | None,
    width: int,
    history: list[int],
    stop_tokens: Collection[int] = (),
    after: Round | None = None,
) -> Round:
    """Build a round and send it to the device.

    history: the ids up to the anchor. after: the round before, of which nothing was read; history ends before it.
    Unless it is dropped, the new round's `verified` is opened once the rows of the one before are committed.
    """
    states, position = conversation.states, len(conversation.processed) + 1
    if after is None:
        observe(conversation, drafter, later=width == 0)
        anchor = mx.array([conversation.pending], dtype=mx.int32)
    else:
        if width:
            observe_ahead(conversation, after.observable, after.count)
        states, position, anchor = states.ahead(after.count), position + after.count, after.outcome.next_anchor
    if policy.processors:
        history = history if after is None else _extended(history, after)
    round_policy = policy.at(position, history if policy.processors else None)
    proposal = Proposal(mx.zeros((1, 0), dtype=mx.int32))
    if width:
        proposal = drafter.propose(conversation.draft.context, anchor, width, round_policy)
        if policy.sequential:
            proposal = _until_stop(proposal, stop_tokens)
    taps = drafter.tap_ids if drafter else ()
    return check(target, states, anchor, proposal, round_policy, taps, conversation.draft_arrays(), conversation.states)


def check(
    target: Verifier,
    states: LayerStates,
    anchor: mx.array,
    proposal: Proposal,
    policy: Acceptance,
    tap_ids: Sequence[int],
    evaluated: Sequence[mx.array] = (),
    owner: LayerStates | None = None,
) -> Round:
    """Verify a proposal after the anchors `[B]`, and send it all to the device, with the arrays `evaluated`.

    owner: the states that the pass belongs to, where it starts from others that are ahead of them.
    """
    # Clipped so that a bad id can't read foreign memory before it is refused.
    drafts = mx.clip(proposal.tokens, 0, target.vocab_size - 1)
    rows = mx.concatenate([anchor[:, None], drafts], axis=1)
    verified = target.verify(states, rows, tap_ids)
    outcome, logprobs = policy.accept(proposal.tokens, proposal.q, verified.logits)
    heads = (outcome.accepted[:, None], outcome.next_anchor[:, None])
    report = mx.concatenate([*heads, proposal.tokens, outcome.faults], axis=1)
    observable = Observable(rows, verified.features)
    scores = [list(lane) for lane in logprobs]
    outputs = [report, outcome.accepted, outcome.next_anchor, scores, *evaluated]
    begin = time.perf_counter()
    verified = (states if owner is None else owner).dispatch(verified, *outputs)
    return Round(proposal, verified, outcome, observable, scores, report, time.perf_counter() - begin)


def _extended(history: list[int], after: Round) -> mx.array:
    """`[B, N + T]` the history and what a round delivers, whose number is unread: padded on the left with -1."""
    T = after.width + 1
    anchor, accepted = after.outcome.next_anchor[:, None], after.outcome.accepted[:, None]
    drafted = mx.concatenate([after.proposal.tokens, anchor], axis=1)
    given = mx.where(mx.arange(T) == accepted, anchor, drafted)
    B = given.shape[0]
    known = mx.broadcast_to(mx.array([-1] * T + history, dtype=mx.int32), (B, T + len(history)))
    at = accepted + 1 + mx.arange(len(history) + T)
    return mx.take_along_axis(mx.concatenate([known, given], axis=1), at, axis=1)


def _until_stop(proposal: Proposal, stop_tokens: Collection[int]) -> Proposal:
    """The proposal up to a stop token: callables of the user's see no row behind one, as in plain decoding."""
    drafted = proposal.tokens[0].tolist()
    keep = next((i for i, token in enumerate(drafted) if token in stop_tokens), len(drafted))
    return Proposal(proposal.tokens[:, :keep])
