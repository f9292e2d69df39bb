"""Many requests in one pass over the target: B lanes, each with its own state, policy and accepted count."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from specmlx.drafters.proposal import Drafter, Proposal
from specmlx.speculation.drafting import observe
from specmlx.speculation.lane_drafting import LaneDrafts, lane_drafts
from specmlx.speculation.lane_policy import LanePolicy, grouped
from specmlx.speculation.lane_width import LaneWidths
from specmlx.speculation.loop import Target, Token, finish_reason
from specmlx.speculation.policy import Policy
from specmlx.speculation.round import Delivery, check
from specmlx.speculation.stats import Stats
from specmlx.state.conversation import Conversation, Draft
from specmlx.state.layers import LayerStates


@dataclass(eq=False)
class Lane:
    """One request in a batch.

    conversation: prefilled, its last prompt token pending; its states are the batch's while the lane is in it.
    history: the ids that logits processors see, prompt and generated. deliver: gets every token as it leaves; what it
    returns as true ends the lane there. error: what ended the lane, if it failed.
    """

    conversation: Conversation
    policy: Policy
    history: list[int]
    deliver: Callable[[Token], bool]
    stop_tokens: Collection[int] = ()
    max_tokens: int = -1
    stats: Stats = field(default_factory=Stats)
    error: Exception | None = None
    reason: str | None = field(init=False)

    def __post_init__(self):
        self.reason = self.stats.reason

    @property
    def left(self) -> int | None:
        """How many tokens it may still give; None: any number."""
        return self.max_tokens - self.stats.generation_tokens if self.max_tokens > 0 else None


class Lanes:
    """The lanes that decode together, `width` drafted tokens a lane in each pass; None: the drafter's most.

    A lane's text is what it would be alone: its rows are computed by the same operations in the same order, its noise
    depends on its own seed and positions. A lane that fails leaves alone; a failed evaluation ends them all.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, width: int | LaneWidths | None = None):
        self.target = target
        self.drafter = drafter if width != 0 else None
        self.widths = width if isinstance(width, LaneWidths) and drafter else None
        most = drafter.max_width if drafter else 0
        self.width = width if isinstance(width, int) and drafter else most
        self.lanes: list[Lane] = []
        self.rounds = 0
        self._states: LayerStates | None = None
        self._drafts: LaneDrafts | None = None
        self._groups = []

    def join(self, lanes: Sequence[Lane]) -> None:
        """Take prefilled lanes in; the drafter of each is this one's or starts at the lane's length."""
        if not lanes:
            return
        parts = [lane.conversation.states for lane in lanes]
        states = LayerStates.merged(parts if self._states is None else [self._states, *parts])
        if self.drafter is not None:
            drafts = self._drafts or lane_drafts(self.drafter)
            for lane in lanes:
                observe(lane.conversation, self.drafter)
            drafts.join([lane.conversation.draft.context for lane in lanes])
            self._drafts = drafts
        mx.eval([x for layer in states.layers if layer is not None for x in layer if isinstance(x, mx.array)])
        self._states = states
        for lane in lanes:
            # They are in the batch's now: not kept twice.
            conversation = lane.conversation
            conversation.states, conversation.draft, conversation.unobserved = LayerStates([]), None, None
        self.lanes += lanes
        self._groups = grouped([lane.policy for lane in self.lanes])

    def leave(self, gone: Collection[Lane], keep: bool = False) -> None:
        """Let lanes go; with `keep` their conversations get their states back, and can go on alone."""
        gone = [lane for lane in self.lanes if lane in gone]
        if not gone:
            return
        stay = [i for i, lane in enumerate(self.lanes) if lane not in gone]
        if keep:
            for lane in gone:
                i = self.lanes.index(lane)
                states = self._states.lanes([i], len(lane.conversation.processed))
                states.start = len(lane.conversation.processed)
                lane.conversation.states = states
                context = None if self._drafts is None else self._drafts.context(i)
                lane.conversation.draft = context and Draft(self.drafter, context, states.start)
        self.lanes = [self.lanes[i] for i in stay]
        self._states = self._states.lanes(stay, self._longest()) if stay else None
        if self._drafts is not None:
            self._drafts.keep(stay)
        self._groups = grouped([lane.policy for lane in self.lanes])

    def round(self) -> list[Lane]:
        """One pass for all lanes: tokens are delivered; the lanes that are done are returned, and still in the batch.

        Raises what an evaluation raises: then no lane can go on.
        """
        clock = time.perf_counter()
        lanes, states, limit = self.lanes, self._states, self._limit()
        width = min(self.width, limit)
        if self.widths is not None:
            width = self.widths.choose(len(lanes), limit if limit < self.width else None)
        positions = mx.array([len(lane.conversation.processed) + 1 for lane in lanes], dtype=mx.int32)
        limits = [(lane.left, lane.stop_tokens) for lane in lanes]
        policy = LanePolicy(self._groups, positions, [lane.history for lane in lanes], limits)
        anchor = mx.array([lane.conversation.pending for lane in lanes], dtype=mx.int32)
        proposal = Proposal(mx.zeros((len(lanes), 0), dtype=mx.int32))
        if width:
            proposal = self._drafts.propose(anchor, width, policy)
        taps = self.drafter.tap_ids if self.drafter else ()
        drafts = self._drafts.arrays() if self._drafts else []
        round = check(self.target, states, anchor, proposal, policy, taps, drafts)
        read = round.read(states)
        self.rounds += 1

        done, counts = [], []
        seconds = time.perf_counter() - clock
        if self.widths is not None and limit >= self.width:
            kept = [each.accepted for i, each in enumerate(read) if i not in policy.failures]
            self.widths.observed(len(lanes), width, kept or [0], seconds)
        for i, lane in enumerate(lanes):
            lane.stats.decode_seconds += seconds
            lane.stats.begin_round(round.width, context=len(lane.conversation.processed))
            if self.widths is not None:
                lane.stats.explain(lane.reason, self.widths.of(len(self.lanes)).reason)
            count, over = 0, True
            if i in policy.failures:
                lane.error = policy.failures[i]
            else:
                count, over = self._deliver(lane, read[i], round.logprobs[i])
            counts.append(count)
            if over:
                done.append(lane)
        states.commit(counts)
        # All that they know is how many rows each pass let in at most.
        states.bound = self._longest()
        if self._drafts is not None:
            self._drafts.observe(*round.observable, counts)
        return done

    def _longest(self) -> int:
        """How many rows the longest lane has."""
        return max(len(lane.conversation.processed) for lane in self.lanes)

    def _limit(self) -> int:
        """No lane needs more rows than the most tokens that any of them may still give, nor has room for more."""
        most = [self.width]
        left = [lane.left for lane in self.lanes if lane.left is not None]
        if len(left) == len(self.lanes):
            most.append(max(left) - 1)
        if (room := self._states.room) is not None:
            most.append(room - 1)
        return min(most)

    def _deliver(self, lane: Lane, read: Delivery, logprobs: list[mx.array]) -> tuple[int, bool]:
        """Give a lane its tokens: how many rows enter its state, and whether it is over."""
        conversation, n = lane.conversation, 0
        try:
            for token in read.tokens(self.target.vocab_size):
                read.check(n, len(conversation.processed) + 1)
                lane.history.append(token)
                drafted = n < read.accepted
                lane.stats.deliver(from_draft=drafted)
                finish = finish_reason(token, lane.stop_tokens, lane.stats.generation_tokens, lane.max_tokens)
                conversation.processed.append(conversation.pending)
                conversation.pending = token
                n += 1
                if lane.deliver(Token(token, logprobs[n - 1], drafted, finish)) or finish:
                    return n, True
        except Exception as error:
            lane.error = error
            return n, True
        return n, False
