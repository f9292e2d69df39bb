"""One round on its way: what the drafter is shown and proposes, what goes through the device, what the host reads."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import mlx.core as mx

from specmlx.cache.conversation import Draft, Held, Observable
from specmlx.cache.layers import LayerStates, Pass
from specmlx.decoding.accept import TARGETS, Outcome
from specmlx.decoding.policy import MixedPolicy, RoundPolicy
from specmlx.drafters.proposal import Context, Drafter, Proposal

# Passes without a proposal, and rows of them, that are kept until the drafter is shown them all at once.
_PASSES, _ROWS = 64, 1024


class Target(Protocol):
    """What the loop needs of a model: the two ways to run rows. It knows nothing of layers."""

    vocab_size: int

    def prefill(
        self, states: LayerStates, tokens: mx.array, tap_ids: Sequence[int], step_size: int
    ) -> Iterator[tuple[mx.array, mx.array | None]]: ...

    def verify(self, states: LayerStates, rows: mx.array, tap_ids: Sequence[int]) -> Pass: ...


class OnProposal(Protocol):
    """Is shown each proposal and says what is verified instead. name: what tells such rounds from others."""

    name: str

    def __call__(self, proposal: Proposal) -> Proposal: ...


class Delivery(NamedTuple):
    """What a round has for one sequence: tokens that leave, how many of them were drafted, what ends it after them."""

    tokens: list[int]
    accepted: int
    error: Exception | None = None


@dataclass(eq=False)
class Round:
    """A proposal and what the target says to it, on the device.

    proposal: of γ tokens, the num_draft_tokens. verified: the pass over its T = γ + 1 rows. outcome: what is kept.
    observable: the rows and their taps. logprobs: by sequence, its T rows `[V]`, which any thread may read: evaluated.
    failures: by sequence, what callables of its own raised. ahead: whether the round before it was not read yet.
    report: `[B, 2 + γ + T]` int32, all that the host reads: accepted, next anchor, the proposal, the rows' faults.
    seconds: what handing it to the device took.
    """

    proposal: Proposal
    verified: Pass
    outcome: Outcome
    observable: Observable
    logprobs: list[list[mx.array]]
    failures: Mapping[int, Exception]
    ahead: bool
    num_draft_tokens: int = 0
    report: mx.array = field(init=False)
    seconds: float = 0.0

    def send(self, states: LayerStates, arrays: Sequence[mx.array]) -> "Round":
        """Hand the round to the device with some arrays; `states` take its pass over."""
        outcome, self.num_draft_tokens = self.outcome, self.proposal.tokens.shape[1]
        heads = (outcome.accepted[:, None], outcome.next_anchor[:, None])
        self.report = mx.concatenate([*heads, self.proposal.tokens, outcome.faults], axis=1)
        sent = (self.report, outcome.accepted, outcome.next_anchor, self.logprobs)
        begin = time.perf_counter()
        self.verified = states.dispatch(self.verified, *sent, *arrays)
        self.seconds = time.perf_counter() - begin
        return self

    @property
    def count(self) -> int | mx.array:
        """Rows that enter the state: 1 where there was no proposal, else `[B]` int32, not read."""
        return self.outcome.accepted + 1 if self.num_draft_tokens else 1

    def deliveries(self, vocab_size: int, lengths: Sequence[int]) -> list[Delivery]:
        """What there is for each sequence, once `report` is evaluated; `lengths`: rows that were in before."""
        γ, found = self.num_draft_tokens, []
        for i, (accepted, next_anchor, *rest) in enumerate(self.report.tolist()):
            drafted, faults = rest[:γ], rest[γ:]
            if error := self.failures.get(i):
                found.append(Delivery([], 0, error))
            elif outside := [token for token in drafted if not 0 <= token < vocab_size]:
                says = f"the drafter proposed token {outside[0]}: the vocabulary has {vocab_size}"
                found.append(Delivery([], 0, ValueError(says)))
            elif any(faults[: accepted + 1]):
                fine = next(n for n, fault in enumerate(faults) if fault)
                whose = "the target's logits" if faults[fine] == TARGETS else "the logits"
                after = "" if faults[fine] == TARGETS else " after the logits processors"
                says = f"{whose} for token {lengths[i] + 1 + fine} are NaN or infinite{after}"
                found.append(Delivery(drafted[:fine], accepted, RuntimeError(says)))
            else:
                found.append(Delivery([*drafted[:accepted], next_anchor], accepted))
        return found

    def extended(self, histories: Sequence[list[int]]) -> list[mx.array]:
        """Each sequence's history `[1, N + T]` and what this round delivers, whose number is unread.

        They are padded on the left with -1.
        """
        T = self.num_draft_tokens + 1
        anchor, accepted = self.outcome.next_anchor[:, None], self.outcome.accepted[:, None]
        drafted = mx.concatenate([self.proposal.tokens, anchor], axis=1)
        given = mx.where(mx.arange(T) == accepted, anchor, drafted)
        found = []
        for i, history in enumerate(histories):
            known = mx.array([[-1] * T + history], dtype=mx.int32)
            at = accepted[i : i + 1] + 1 + mx.arange(len(history) + T)
            found.append(mx.take_along_axis(mx.concatenate([known, given[i : i + 1]], axis=1), at, axis=1))
        return found


def round_seconds(seconds: float, away: float, waited: float, overlapped: bool) -> float | None:
    """What a round took of the `seconds` since the one before was read; None where that can't be told.

    away: seconds of them that whoever takes the tokens had. A round that went on meanwhile (`overlapped`) was as long
    as all of them if the host `waited` for it then, else it was over at some time before.
    """
    if not overlapped:
        return seconds - away
    return seconds if away < 0.1 * seconds or waited > 0.05 * seconds else None


def observe(held: Held, drafter: Drafter | None, later: bool = False) -> None:
    """Let the drafter see the committed rows that it has not seen; one that is new to the conversation starts here.

    With `later`, a few rows may wait until it is to propose.
    """
    # Taken out meanwhile: a context that is left half-way is not used again.
    rows, draft = held.unobserved, held.draft
    held.unobserved = held.draft = None
    if drafter is None:
        return
    lengths, count = held.lengths, held.count
    end = sum(lengths)
    missing = end - draft.known if draft is not None and draft.drafter is drafter else -1
    if missing == 0 or (
        missing == (count if isinstance(count, int) else sum(count)) and (draft.ahead or rows is not None)
    ):
        if draft.ahead:
            draft.context.settle(count if missing else 0)
            draft = Draft(drafter, draft.context, end)
        elif missing:
            draft = draft._replace(waiting=(*draft.waiting, (rows, count)))
    else:
        # It is new, or missed rows by an interrupt, and would be wrong from then on.
        draft = joined([Draft(drafter, drafter.new_context(1, start=length), length) for length in lengths])
    if not later or len(draft.waiting) >= _PASSES or draft.known - draft.end >= _ROWS:
        draft = _caught_up(draft)
    held.draft = draft


def observe_ahead(held: Held, rows: Observable, count: int | mx.array) -> None:
    """Let the drafter see the first `count` rows of the open pass (an int, or int32 `[B]`, which is not read).

    The next `observe` settles how many of them stayed.
    """
    draft, held.draft = held.draft, None
    draft = _caught_up(draft)
    _observe(draft, rows, count)
    held.draft = draft._replace(ahead=True)


def propose(
    drafter: Drafter, context: Context, anchor: mx.array, num_draft_tokens: int, policy: RoundPolicy | MixedPolicy
) -> Proposal:
    """A drafter's proposal after each sequence's anchor `[B]` int32."""
    if not isinstance(context, Separate):
        return drafter.propose(context, anchor, num_draft_tokens, policy)
    found = []
    for i, each in enumerate(context.contexts):
        alone = policy.alone(i)
        found.append(drafter.propose(each, anchor[i : i + 1], num_draft_tokens, alone))
        if alone.failures:
            policy.failures[i] = alone.failures[0]
    most = max(one.tokens.shape[1] for one in found)
    # A short proposal is made longer with tokens that the target may or may not agree with.
    tokens = [mx.pad(one.tokens, [(0, 0), (0, most - one.tokens.shape[1])]) for one in found]
    if all(one.q is None for one in found):
        return Proposal(mx.concatenate(tokens))
    vocab, q = next(one.q.shape[-1] for one in found if one.q is not None), []
    for one, padded in zip(found, tokens, strict=True):
        sampled = mx.zeros((1, 0, vocab)) if one.q is None else one.q
        # What was not sampled is the only draw from its distribution.
        certain = padded[:, sampled.shape[1] :, None] == mx.arange(vocab)
        q.append(mx.concatenate([sampled, certain.astype(mx.float32)], axis=1))
    return Proposal(mx.concatenate(tokens), mx.concatenate(q))


class Separate:
    """The contexts of a drafter that can't have several sequences in one; it is asked for each in turn."""

    def __init__(self, contexts: Sequence[Context]):
        self.contexts = list(contexts)

    def settle(self, count: int | Sequence[int]) -> None:
        """See `drafters.proposal.Context`."""
        for i, context in enumerate(self.contexts):
            context.settle(count if isinstance(count, int) else count[i])

    def arrays(self) -> list[mx.array]:
        return [x for context in self.contexts for x in context.arrays()]

    def joined(self, others: "Sequence[Context | Separate]") -> "Separate":
        """See `drafters.context.Rows`."""
        several = (each.contexts if isinstance(each, Separate) else [each] for each in others)
        return Separate(sum(several, self.contexts))

    def lanes(self, indices: Sequence[int]) -> "Context | Separate":
        """See `drafters.context.Rows`; of one sequence, its own context."""
        found = [self.contexts[i] for i in indices]
        return Separate(found) if len(found) > 1 else found[0]


def joined(drafts: Sequence[Draft]) -> Draft:
    """The drafts of several conversations, which are all caught up, as one; of one, its own."""
    if len(drafts) == 1:
        return drafts[0]
    context, *others = (draft.context for draft in drafts)
    context = context if hasattr(context, "joined") else Separate([context])
    return Draft(drafts[0].drafter, context.joined(others), sum(draft.end for draft in drafts))


def _observe(draft: Draft, rows: Observable, count: int | list[int] | mx.array) -> None:
    drafter, context, (tokens, features) = draft.drafter, draft.context, rows
    if not isinstance(context, Separate):
        drafter.observe(context, tokens, features, mx.array(count) if isinstance(count, list) else count)
        return
    for i, each in enumerate(context.contexts):
        own = count[i : i + 1] if isinstance(count, mx.array) else count if isinstance(count, int) else count[i]
        drafter.observe(each, tokens[i : i + 1], None if features is None else features[i : i + 1], own)


def _caught_up(draft: Draft) -> Draft:
    if not draft.waiting:
        return draft
    waiting = draft.waiting
    if len(waiting) > 1 and isinstance(waiting[0][1], int):
        # Shown at once, what waited is one pass for the drafter.
        tokens = mx.concatenate([rows.tokens[:, :count] for rows, count in waiting], axis=1)
        features = None
        if waiting[0][0].features is not None:
            features = mx.concatenate([rows.features[:, :count] for rows, count in waiting], axis=1)
        waiting = [(Observable(tokens, features), tokens.shape[1])]
    for rows, count in waiting:
        _observe(draft, rows, count)
    return Draft(draft.drafter, draft.context, draft.known)
