"""The round: propose, verify, accept, commit; and the loop over rounds, which plain decoding shares at width 0."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from specmlx.drafters.proposal import Drafter
from specmlx.speculation.drafting import observe
from specmlx.speculation.policy import Policy
from specmlx.speculation.prefill import Prefiller, prefill
from specmlx.speculation.round import Round, Verifier, issue
from specmlx.speculation.stats import Stats
from specmlx.speculation.width import FixedWidth, Widths
from specmlx.state.conversation import Conversation

# Rounds between two emptyings of mlx's buffer cache, which grows with every new attention length.
_CLEAR_EVERY = 128


class Target(Prefiller, Verifier, Protocol):
    """What the loop needs of a model: the two ways to run rows. It knows nothing of layers."""


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
    width: int | Widths | None = None,
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
    lookahead: bool = True,
) -> Iterator[Token]:
    """Tokens that continue the conversation after `prompt`, `width` drafted ones verified in each pass over the target.

    `width` is a number, None for the drafter's most, or what chooses round by round (see `speculation.width`).

    Whenever a token has left, the conversation holds exactly what the user was given, so it may be dropped there and
    taken over by another request. `cached` are ids of the prompt that the conversation holds already: logits processors
    see them too. Prefill calls `at_mark` once it has as many rows as one of `marks` says.
    With `lookahead`, the next round is issued to the device before this one is read, and is dropped without trace where
    it turns out not to be wanted.
    Raises ValueError for an empty prompt, a width outside 0..drafter.max_width, max_tokens of 0 and proposals outside
    the vocabulary; RuntimeError, with the position, for logits that are NaN or infinite.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    if max_tokens == 0:
        raise ValueError("max_tokens is 0: it must be at least 1, or -1 for no limit")
    widths = _widths(width, drafter)
    stats = Stats() if stats is None else stats
    owner = conversation.claim() if owner is None else owner
    clock = time.perf_counter()

    width = widths.choose()
    for step in prefill(target, conversation, prompt, drafter, prefill_step_size, marks, at_mark, later=width == 0):
        if progress:
            progress(step, len(prompt))
        conversation.check(owner)
    if progress:
        progress(len(prompt), len(prompt))
    history = [*cached, *prompt]
    now = time.perf_counter()
    stats.prefill_seconds += now - clock
    clock = now

    looks_ahead = lookahead and conversation.states.looks_ahead and not policy.sequential

    def left(width: int, given: int, room: int | None = None) -> int:
        """The width of a round behind so many tokens, whose pass has no more rows than there is `room` for."""
        most = width if max_tokens < 0 else min(width, max_tokens - given - 1)
        return most if room is None else min(most, room - 1)

    def following(round: Round, width: int) -> Round | Exception | None:
        """The next round, if it is known before this one is read. What it raises has to wait for this one's tokens."""
        if not looks_ahead or left(width, stats.generation_tokens + round.width + 1) != width:
            return None
        room = conversation.states.room
        if room is not None and room < round.width + width + 2:
            return None
        try:
            return issue(target, conversation, policy, drafter, width, history, after=round)
        except Exception as error:
            if conversation.states.broken:
                raise
            return error

    ahead, read_at, away, reason = None, None, 0.0, stats.reason
    while True:
        conversation.check(owner)
        width_now = left(width, stats.generation_tokens, conversation.states.room)
        overlapped = ahead is not None
        round = ahead or issue(target, conversation, policy, drafter, width_now, history, stop_tokens)
        width = widths.choose()
        ahead = following(round, width)
        if ahead is None:
            # Nothing goes out with it: what is lazy could not be evaluated if another thread goes on.
            mx.async_eval(conversation.draft_arrays())
        waiting = time.perf_counter()
        (read,) = round.read(conversation.states)
        before, read_at = read_at, time.perf_counter()
        stats.device_seconds += round.sent + read_at - waiting
        given, accepted = read.tokens(target.vocab_size), read.accepted
        taken = before and round_seconds(read_at - before, away, read_at - waiting, overlapped)
        widths.observed(round.width, accepted, taken)
        away = 0.0
        stats.begin_round(round.width, context=len(conversation.processed))
        stats.explain(reason, widths.reason)

        for n, token in enumerate(given):
            read.check(n, len(conversation.processed) + 1)
            history.append(token)
            stats.deliver(from_draft=n < accepted)
            finish = finish_reason(token, stop_tokens, stats.generation_tokens, max_tokens)
            leaving = Token(token, round.logprobs[0][n], n < accepted, finish)
            now = time.perf_counter()
            # Last of all, so that an interrupt leaves as little as can be in the conversation that nobody was given.
            conversation.unobserved = round.observable if drafter else None
            conversation.commit(n + 1, token)
            left_at = time.perf_counter()
            stats.committed(now - clock, left_at - now)
            yield leaving
            clock = time.perf_counter()
            away += clock - left_at
            if finish:
                return
            conversation.check(owner)
        if isinstance(ahead, Exception):
            raise ahead
        if ahead:
            observe(conversation, drafter, later=True)
            conversation.states.open(ahead.verified)
        if stats.rounds % _CLEAR_EVERY == 0:
            mx.clear_cache()


def _widths(width: int | Widths | None, drafter: Drafter | None) -> Widths:
    most = drafter.max_width if drafter else 0
    widths = FixedWidth(width) if isinstance(width, int) else width or FixedWidth(most)
    if not 0 <= widths.most <= most:
        raise ValueError(f"num_draft_tokens is {widths.most}: this drafter proposes 0 to {most}")
    return widths


def round_seconds(seconds: float, away: float, waited: float, overlapped: bool) -> float | None:
    """What a round took of the `seconds` since the one before was read; None where that can't be told.

    away: seconds of them that whoever takes the tokens had. A round that went on meanwhile (`overlapped`) was as long
    as all of them if the host `waited` for it then, else it was over at some time before.
    """
    if not overlapped:
        return seconds - away
    return seconds if away < 0.1 * seconds or waited > 0.05 * seconds else None


def finish_reason(token: int, stop_tokens: Collection[int], given: int, max_tokens: int) -> str | None:
    """Why `token`, the last of `given`, is the end; None where it is not."""
    if token in stop_tokens:
        return "stop"
    return "length" if given == max_tokens else None
