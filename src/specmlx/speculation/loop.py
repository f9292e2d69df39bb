"""The round: propose, verify, accept, commit; and the loop over rounds, which plain decoding shares at width 0."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from specmlx.drafters.proposal import Drafter, Proposal, Windowed
from specmlx.speculation.policy import Policy
from specmlx.speculation.stats import Stats
from specmlx.state.conversation import Conversation, Draft, Observable
from specmlx.state.layers import LayerStates, Pass
from specmlx.state.prefix import spans

# Rounds between two emptyings of mlx's buffer cache, which grows with every new attention length.
_CLEAR_EVERY = 128


class Target(Protocol):
    """What the loop needs of a model: the two ways to run rows. It knows nothing of layers."""

    vocab_size: int

    def prefill(
        self, states: LayerStates, tokens: mx.array, tap_ids: Sequence[int], step_size: int
    ) -> Iterator[tuple[mx.array, mx.array | None]]: ...

    def verify(self, states: LayerStates, rows: mx.array, tap_ids: Sequence[int]) -> Pass: ...


@dataclass(frozen=True)
class Token:
    """A token that leaves: its id, the target's log-probabilities `[V]`, if it was drafted, why it is the last."""

    id: int
    logprobs: mx.array
    from_draft: bool
    finish_reason: str | None = None


def generate_tokens(
    target: Target,
    conversation: Conversation,
    prompt: Sequence[int],
    policy: Policy,
    drafter: Drafter | None = None,
    width: int | None = None,
    *,
    stop_tokens: Collection[int] = (),
    max_tokens: int = -1,
    prefill_step_size: int = 2048,
    progress: Callable[[int, int], None] | None = None,
    stats: Stats | None = None,
    owner: int | None = None,
    cached: Sequence[int] = (),
    marks: Collection[int] = (),
    at_mark: Callable[[Conversation], None] | None = None,
) -> Iterator[Token]:
    """Tokens that continue the conversation after `prompt`, `width` drafted ones verified in each pass over the target.

    Whenever a token has left, the conversation holds exactly what the user was given, so it may be dropped there and
    taken over by another request. `cached` are ids of the prompt that the conversation holds already: logits processors
    see them too. Prefill calls `at_mark` once it has as many rows as one of `marks` says (on the grid).
    Raises ValueError for an empty prompt, a width outside 0..drafter.max_width, max_tokens of 0 and proposals outside
    the vocabulary; RuntimeError, with the position, for logits that are NaN or +inf.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    if max_tokens == 0:
        raise ValueError("max_tokens is 0: it must be at least 1, or -1 for no limit")
    width = _checked_width(width, drafter)
    stats = Stats() if stats is None else stats
    owner = conversation.claim() if owner is None else owner
    taps = drafter.tap_ids if drafter else ()
    clock = time.perf_counter()

    for step in _prefill(target, conversation, prompt, drafter, prefill_step_size, marks, at_mark):
        if progress:
            progress(step, len(prompt))
    if progress:
        progress(len(prompt), len(prompt))
    history = [*cached, *prompt]
    now = time.perf_counter()
    stats.prefill_seconds += now - clock
    clock = now

    while True:
        conversation.check(owner)
        budget = width if max_tokens < 0 else min(width, max_tokens - stats.generation_tokens - 1)
        round_policy = policy.at(len(conversation.processed) + 1, history if policy.processors else None)
        proposal = _propose(conversation, drafter, budget, round_policy)
        if policy.sequential:
            proposal = _until_stop(proposal, stop_tokens)
        # Clipped so that a bad id can't read foreign memory before it is refused.
        drafts = mx.clip(proposal.tokens, 0, target.vocab_size - 1)
        rows = mx.concatenate([mx.array([[conversation.pending]], dtype=mx.int32), drafts], axis=1)
        verified = target.verify(conversation.states, rows, taps)
        outcome, logprobs = round_policy.accept(proposal.tokens, proposal.q, verified.logits, history)
        bad = mx.any(mx.isnan(verified.logits) | (verified.logits == mx.inf), axis=-1)
        outputs = [outcome.accepted, outcome.next_anchor, logprobs, bad, proposal.tokens]
        conversation.states.evaluate(outputs, conversation.draft_arrays())
        drafted = _checked(proposal, target.vocab_size)
        accepted, bad_rows = outcome.accepted.item(), bad[0].tolist()
        given = [*drafted[:accepted], outcome.next_anchor.item()]
        stats.begin_round(len(drafted), context=len(conversation.processed))

        for n, token in enumerate(given):
            if bad_rows[n]:
                where = len(conversation.processed) + 1
                raise RuntimeError(f"the target's logits for token {where} are NaN or infinite")
            history.append(token)
            stats.deliver(from_draft=n < accepted)
            finish = _finish(token, stop_tokens, stats.generation_tokens, max_tokens)
            leaving = Token(token, logprobs[0, n], n < accepted, finish)
            stats.decode_seconds += time.perf_counter() - clock
            # Last of all, so that an interrupt leaves as little as can be in the conversation that nobody was given.
            conversation.unobserved = Observable(rows, verified.features) if drafter else None
            conversation.commit(n + 1, token)
            yield leaving
            clock = time.perf_counter()
            if finish:
                return
            conversation.check(owner)
        if stats.rounds % _CLEAR_EVERY == 0:
            mx.clear_cache()


def _prefill(
    target: Target,
    conversation: Conversation,
    prompt: Sequence[int],
    drafter: Drafter | None,
    step_size: int,
    marks: Collection[int],
    at_mark: Callable[[Conversation], None] | None,
) -> Iterator[int]:
    """Run everything before the prompt's last token, which is the first anchor; yields how much of the prompt is in."""
    observe(conversation, drafter)
    before = [] if conversation.pending is None else [conversation.pending]
    ids = [*before, *prompt[:-1]]
    start = conversation.states.length
    window = drafter.window if isinstance(drafter, Windowed) else None
    yield 0
    try:
        conversation.processed += ids
        at = start
        for stop, observed in spans(start, start + len(ids), marks, window):
            watching = drafter if observed else None
            if watching:
                observe(conversation, drafter)
            rows = mx.array([ids[at - start : stop - start]], dtype=mx.int32)
            taps = watching.tap_ids if watching else ()
            for tokens, features in target.prefill(conversation.states, rows, taps, step_size):
                conversation.prefilled(at)
                if watching:
                    conversation.unobserved = Observable(tokens, features)
                    observe(conversation, drafter)
                    mx.eval(conversation.draft_arrays())
                at += tokens.shape[1]
                yield at - start - len(before)
            if at_mark and stop in marks:
                at_mark(conversation)
    finally:
        conversation.settle()
    conversation.pending = prompt[-1]


def observe(conversation: Conversation, drafter: Drafter | None) -> None:
    """Let the drafter see the committed rows that it has not seen; one that is new to the conversation starts here."""
    rows, conversation.unobserved = conversation.unobserved, None
    draft = conversation.draft
    if drafter is None:
        conversation.draft = None
        return
    end = conversation.states.length
    count = 0 if rows is None else conversation.states.count
    # A context that missed rows, by an interrupt or a failure half-way, would be wrong from then on.
    if draft is None or draft.drafter is not drafter or draft.end + count != end:
        context = drafter.new_context(1, start=end)
    else:
        context = draft.context
        if count:
            drafter.observe(context, rows.tokens, rows.features, count)
    conversation.draft = Draft(drafter, context, end)


def _propose(conversation: Conversation, drafter: Drafter | None, width: int, policy) -> Proposal:
    observe(conversation, drafter)
    if drafter is None or width == 0:
        return Proposal(mx.zeros((1, 0), dtype=mx.int32))
    anchor = mx.array([conversation.pending], dtype=mx.int32)
    return drafter.propose(conversation.draft.context, anchor, width, policy)


def _until_stop(proposal: Proposal, stop_tokens: Collection[int]) -> Proposal:
    """The proposal up to a stop token: callables of the user's see no row behind one, as in plain decoding."""
    drafted = proposal.tokens[0].tolist()
    keep = next((i for i, token in enumerate(drafted) if token in stop_tokens), len(drafted))
    return Proposal(proposal.tokens[:, :keep])


def _checked_width(width: int | None, drafter: Drafter | None) -> int:
    most = drafter.max_width if drafter else 0
    width = most if width is None else width
    if not 0 <= width <= most:
        raise ValueError(f"num_draft_tokens is {width}: this drafter proposes 0 to {most}")
    return width


def _checked(proposal: Proposal, vocab_size: int) -> list[int]:
    drafted = proposal.tokens[0].tolist()
    if outside := [token for token in drafted if not 0 <= token < vocab_size]:
        raise ValueError(f"the drafter proposed token {outside[0]}: the vocabulary has {vocab_size}")
    return drafted


def _finish(token: int, stop_tokens: Collection[int], given: int, max_tokens: int) -> str | None:
    if token in stop_tokens:
        return "stop"
    return "length" if given == max_tokens else None
