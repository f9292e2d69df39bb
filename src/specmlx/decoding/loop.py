"""The round: propose, verify, accept, commit, deliver. One request is a batch of one; plain decoding has γ = 0."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx

from specmlx.cache.conversation import Conversation, Held, Observable
from specmlx.decoding import joint
from specmlx.decoding.draft_length import FixedLength
from specmlx.decoding.policy import Policies, Policy
from specmlx.decoding.round import (
    Delivery,
    OnProposal,
    Round,
    Target,
    observe,
    observe_ahead,
    propose,
    round_seconds,
)
from specmlx.decoding.stats import ACCEPT, DRAFT, OBSERVE, VERIFY, Stats, Timer
from specmlx.drafters.proposal import Drafter, DraftPolicy, Proposal

# Rounds between two emptyings of mlx's buffer cache, which grows with every new attention length.
_CLEAR_EVERY = 128


@dataclass(frozen=True)
class Token:
    """A token that leaves: its id, the target's log-probabilities `[V]`, if it was drafted, why it is the last."""

    id: int
    logprobs: mx.array
    from_draft: bool
    finish_reason: str | None = None


@dataclass(eq=False)
class Sequence:
    """A conversation that goes on, and what has to be known of its request to decode it.

    conversation: prefilled, its last prompt token pending, once it joins a batch; None before it is claimed.
    history: the ids that logits processors see, prompt and generated. owner: what `conversation.claim` gave.
    over: whether it has ended; its reader may end it by this after any token. error: what ended it, if it failed.
    began: seconds of the batch's when its decoding began.
    """

    conversation: Conversation | None
    policy: Policy
    history: list[int] = field(default_factory=list)
    stop_tokens: Collection[int] = ()
    max_tokens: int = -1
    stats: Stats = field(default_factory=Stats)
    owner: int | None = None
    over: bool = False
    error: Exception | None = None
    began: float = 0.0
    reason: str | None = field(init=False)

    def __post_init__(self):
        self.reason = self.stats.reason
        if self.conversation is not None:
            self.owner = self.conversation.claim()

    @property
    def left(self) -> int | None:
        """How many tokens it may still give; None: any number."""
        return self.max_tokens - self.stats.generation_tokens if self.max_tokens > 0 else None

    def fail(self, error: Exception) -> None:
        self.error, self.over = error, True


class Batch:
    """B sequences that decode in the same passes over the target; each has the text that it would have alone.

    Sequences that are `over` leave, and those that `join` come in, when no round is under way.
    """

    def round(self) -> Iterator[tuple[Sequence, Token | None]]:
        """Give each sequence the tokens of one round; whenever one has left, the state holds what was given.

        The next round is issued before this one is read, and dropped without trace where it is not wanted. A sequence
        that fails has its `error`, and None for a token. Raises what an evaluation raises: then none can go on.
        """
        before, self._now = self._now, time.perf_counter()
        self._away += self._now - before
        round, self._ahead = self._ahead or self.begin(), None
        ahead = self._issue_ahead(round)
        for i, (sequence, delivery) in enumerate(zip(self.sequences, self._read(round, ahead), strict=True)):
            for n, token in enumerate([] if sequence.over else delivery.tokens):
                drafted = n < delivery.accepted
                sequence.history.append(token)
                sequence.stats.deliver(from_draft=drafted)
                stop, full = token in sequence.stop_tokens, sequence.stats.generation_tokens == sequence.max_tokens
                leaving = Token(token, round.logprobs[i][n], drafted, "stop" if stop else "length" if full else None)
                begin = time.perf_counter()
                # Last of all, so that an interrupt leaves as little as can be in the state that nobody was given.
                self.held.commit(n + 1, token, i)
                self._now = time.perf_counter()
                sequence.stats.commit_seconds += self._now - begin
                sequence.stats.decode_seconds = self._now - self._away - sequence.began
                sequence.over = stop or full
                yield sequence, leaving
                self._away += time.perf_counter() - self._now
                if sequence.over:
                    break
                if sequence.conversation.owner != sequence.owner:
                    sequence.conversation.check(sequence.owner)
            if delivery.error and not sequence.over:
                sequence.fail(delivery.error)
                yield sequence, None
        self._finish(ahead)

    def issue(self, num_draft_tokens: int, after: Round | None = None) -> Round:
        """Propose, verify and accept: a round is built and sent to the device, and nothing of it is read.

        It begins where the conversations are, or `after` a round that is under way, whose tokens are not known yet.
        """
        states, anchor, policy = self._start(num_draft_tokens, after)
        proposal = self._propose(anchor, num_draft_tokens, policy)
        # Clipped so that a bad id can't read foreign memory before it is refused.
        drafts = mx.clip(proposal.tokens, 0, self.vocab_size - 1)
        rows = mx.concatenate([anchor[:, None], drafts], axis=1)
        verified = self.target.verify(states, rows, self.drafter.tap_ids if self.drafter else ())
        if self.timer:
            self.timer.lap(VERIFY, verified)
        outcome, logprobs = policy.accept(proposal.tokens, proposal.q, verified.logits)
        if self.decide:
            decided = self.decide(mx.stack([outcome.accepted, outcome.next_anchor]))
            outcome = outcome._replace(accepted=decided[0], next_anchor=decided[1])
        if self.timer:
            self.timer.lap(ACCEPT, (outcome.accepted, outcome.next_anchor, logprobs))
        observable, rows = Observable(rows, verified.features), [*map(list, logprobs)]
        round = Round(proposal, verified, outcome, observable, rows, policy.failures, ahead=after is not None)
        return round.send(self.held.states, self.held.draft_arrays())

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        num_draft_tokens: int | Callable[[int], FixedLength] | None = None,
        *,
        lookahead: bool = True,
        timer: Timer | None = None,
        decide: Callable[[mx.array], mx.array] | None = None,
        on_proposal: OnProposal | None = None,
    ):
        """num_draft_tokens: a number, or what says by B what chooses one for each round; None: the most.

        timer: waits for each step of a round. decide: makes integers the same in all processes that run the target.
        Raises ValueError for a number outside 0..drafter.max_width.
        """
        self.target, self.drafter, self.vocab_size = target, drafter, target.vocab_size
        self.timer, self.decide, self.on_proposal = timer, decide, on_proposal
        most = drafter.max_width if drafter else 0
        if not callable(num_draft_tokens):
            num_draft_tokens = FixedLength(most if num_draft_tokens is None else num_draft_tokens)
        if not 0 <= (given := num_draft_tokens(1).most) <= most:
            raise ValueError(f"num_draft_tokens is {given}: this drafter proposes 0 to {most}")
        self._lengths_of = num_draft_tokens
        self.lookahead = lookahead
        self.rounds = 0
        self.sequences: list[Sequence] = []
        self.held: Held | None = None
        self._joining: list[Sequence] = []
        self._parted: set[Sequence] = set()
        self._ahead: Round | None = None
        self._length: FixedLength | None = None
        self._chosen = 0
        # When the loop was last entered or left; seconds that its reader has had, and both when a round was last read.
        self._now, self._away = time.perf_counter(), 0.0
        self._last_read: tuple[float, float] | None = None

    def choose(self, batch: int) -> int:
        """How many tokens the next round of so many sequences would like to propose."""
        length = self._lengths_of(batch)
        if length is not self._length:
            self._length, self._chosen = length, length.choose()
        return self._chosen

    def join(self, sequences: Collection[Sequence]) -> None:
        """Take prefilled sequences in before the next round that is not under way yet."""
        self._joining += sequences

    def part(self, sequence: Sequence) -> None:
        """Give a sequence its own states again: it is in no later round."""
        self._parted.add(sequence)
        if not sequence.over:
            self._drop_ahead()
        if isinstance(self.held, joint.Joint) and sequence in self.sequences:
            observe(self.held, self.drafter)
            self.held.part(self.sequences.index(sequence))

    def settle(self) -> None:
        """Let sequences that are over go, and those that join come in, if no round is under way."""
        staying = [i for i, each in enumerate(self.sequences) if not self._leaves(each)]
        leaving = len(staying) < len(self.sequences)
        if not staying:
            self._drop_ahead()
        if self._ahead or not (leaving or self._joining):
            return
        if staying and leaving:
            observe(self.held, self.drafter)
        held = joint.keep(self.held, staying)
        joining = [sequence for sequence in self._joining if not self._leaves(sequence)]
        self._joining, self._parted = [], set()
        self.held = joint.join(held, [sequence.conversation for sequence in joining], self.drafter)
        self.sequences = [self.sequences[i] for i in staying] + joining
        for sequence in joining:
            sequence.began = self._now - self._away - sequence.stats.decode_seconds
        self._policies = Policies([sequence.policy for sequence in self.sequences])
        if self.sequences:
            self.choose(len(self.sequences))

    def _drop_ahead(self) -> None:
        if self._ahead:
            self._ahead = None
            self.held.states.abort()

    def _leaves(self, sequence: Sequence) -> bool:
        return sequence.over or sequence in self._parted

    def begin(self) -> Round:
        """A round that was not under way."""
        self.settle()
        for sequence in self.sequences:
            sequence.conversation.check(sequence.owner)
        return self.issue(self._most(self._chosen))

    def _most(self, num_draft_tokens: int, given: int = 0) -> int:
        """As many, or fewer where no sequence may give as many tokens, once all have given so many, or has room."""
        left = [sequence.left for sequence in self.sequences]
        most = num_draft_tokens if None in left else min(num_draft_tokens, max(left) - given - 1)
        rows = self.held.states.rows_left
        return most if rows is None else min(most, rows - given - 1)

    def _issue_ahead(self, round: Round) -> Round | Exception | None:
        """The next round, if it is known before this one is read. What it raises has to wait for this one's tokens."""
        chosen = self._chosen = self._length.choose()
        ahead = self.lookahead and self.held.states.looks_ahead and not self._policies.sequential
        if not ahead or self._joining or any(map(self._leaves, self.sequences)):
            return None
        if self._most(chosen, round.num_draft_tokens + 1) != chosen:
            return None
        try:
            return self.issue(chosen, after=round)
        except Exception as error:
            if self.held.states.broken:
                raise
            return error

    def _start(self, num_draft_tokens: int, after: Round | None) -> tuple:
        """Where a round starts: the states, the anchors `[B]`, and the policy."""
        held, policies = self.held, self._policies
        if self.timer:
            self.timer.start()
        positions = [len(sequence.conversation.processed) + 1 for sequence in self.sequences]
        histories = [sequence.history for sequence in self.sequences] if policies.processors else ()
        if after is None:
            observe(held, self.drafter, later=num_draft_tokens == 0)
            anchors = [sequence.conversation.pending for sequence in self.sequences]
            states, anchor = held.states, mx.array(anchors, dtype=mx.int32)
        else:
            if num_draft_tokens:
                observe_ahead(held, after.observable, after.count)
            states, anchor = held.states.ahead(after.count), after.outcome.next_anchor
            positions, histories = mx.array(positions) + after.count, after.extended(histories)
        if self.timer:
            self.timer.lap(OBSERVE, held.draft_arrays())
        limits = [(sequence.left, sequence.stop_tokens) for sequence in self.sequences] if policies.sequential else ()
        return states, anchor, policies.at(positions, histories, limits)

    def _propose(self, anchor: mx.array, num_draft_tokens: int, policy: DraftPolicy) -> Proposal:
        if not num_draft_tokens:
            return Proposal(mx.zeros((len(anchor), 0), dtype=mx.int32))
        proposal = propose(self.drafter, self.held.draft.context, anchor, num_draft_tokens, policy)
        if self.decide and proposal.tokens.size:
            proposal = replace(proposal, tokens=self.decide(proposal.tokens))
        if self.on_proposal is not None:
            proposal = self.on_proposal(proposal)
        if self.timer:
            self.timer.lap(DRAFT, (proposal.tokens, proposal.q))
        return proposal

    def _read(self, round: Round, ahead: Round | Exception | None) -> list[Delivery]:
        """The round's one look at the device: what each sequence is given."""
        if ahead is None and round.ahead:
            # Nothing goes out with it: what is lazy could not be evaluated if another thread goes on.
            mx.async_eval(self.held.draft_arrays())
        begin = time.perf_counter()
        self.held.states.evaluate(round.report)
        now = time.perf_counter()
        lengths = [len(sequence.conversation.processed) for sequence in self.sequences]
        found = round.deliveries(self.vocab_size, lengths)
        kept = []
        for i, (sequence, length) in enumerate(zip(self.sequences, lengths, strict=True)):
            if not sequence.over:
                kept += [] if i in round.failures else [found[i].accepted]
                sequence.stats.device_seconds += round.seconds + now - begin
                sequence.stats.begin_round(round.num_draft_tokens, context=length)
                sequence.stats.explain(sequence.reason, self._length.reason)
        first, *others = kept or [0]
        before, self._last_read = self._last_read, (now, self._away)
        took = before and round_seconds(now - before[0], self._away - before[1], now - begin, round.ahead)
        self._length.observed(round.num_draft_tokens, first, took, others)
        self.held.begin(round.observable if self.drafter else None)
        return found

    def _finish(self, ahead: Round | Exception | None) -> None:
        """All that a round gave is committed; the one that was issued meanwhile is opened, if it is wanted."""
        self.rounds += 1
        if ahead and not all(map(self._leaves, self.sequences)):
            if isinstance(ahead, Exception):
                raise ahead
            observe(self.held, self.drafter, later=True)
            self.held.states.open(ahead.verified)
            self._ahead = ahead
        if self.rounds % _CLEAR_EVERY == 0:
            mx.clear_cache()
        self._now = time.perf_counter()
