"""One decision for several processes: what they share the target's layers for has to take the same way everywhere.

Sums are the same bits in all of them, but drafters and clocks are each process's own: proposals, what is kept of them
and the width are therefore the first process's, sent to the others.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.drafters.proposal import Drafter, DraftPolicy, Draws, Fingerprinted, Proposal, Windowed
from specmlx.speculation.accept import Outcome
from specmlx.speculation.noise import Noise
from specmlx.speculation.policy import Policy, RoundPolicy
from specmlx.speculation.processors import Processor
from specmlx.speculation.sampling import Sampler
from specmlx.speculation.width import AutoWidth
from specmlx.state.conversation import Conversation
from specmlx.state.quantized_kv import KVFormat

ASKED = ("prompt", "sampling", "drafter", "width", "stop", "limits")
"""What processes compare before they generate."""


def from_first(group: mx.distributed.Group, x: mx.array) -> mx.array:
    """The first process's integers, in all processes. Lazy.

    Every process builds the same graph, since the collectives in it have to run in the same order.
    """
    return mx.distributed.all_sum(mx.where(group.rank() == 0, x, mx.zeros_like(x)), group=group)


def shared(
    group: mx.distributed.Group, conversation: Conversation, drafter: Drafter | None, policy: Policy
) -> "tuple[SharedDrafter | None, SharedPolicy]":
    """A request's drafter and policy for all processes; the drafter that the conversation has already, if it has it."""
    if policy.seed is None:
        policy = policy.with_noise(Noise(_nobodys_seed(group)))
    if drafter is None:
        return None, SharedPolicy(policy, group)
    held = None if conversation.draft is None else conversation.draft.drafter
    same = isinstance(held, SharedDrafter) and held.drafter is drafter
    return held if same else SharedDrafter(drafter, group), SharedPolicy(policy, group)


def what_is_asked(
    ids: Sequence[int],
    policy: Policy,
    drafter: Drafter | None,
    stop: Sequence[str],
    kv_format: KVFormat | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that has to be the same in all processes for their passes to be the same, by the names of `ASKED`."""
    ours = [
        x if isinstance(x, (Sampler, Processor)) else type(x).__name__ for x in (policy.sampler, *policy.processors)
    ]
    named = drafter.fingerprint if isinstance(drafter, Fingerprinted) else None
    width = options["width"]
    found = (
        list(ids),
        [*ours, policy.seed],
        drafter and (type(drafter).__name__, drafter.max_width, drafter.tap_ids, named),
        width if isinstance(width, int) else type(width).__name__,
        (sorted(options["stop_tokens"]), list(stop)),
        (options["max_tokens"], options["prefill_step_size"], kv_format, options["lookahead"]),
    )
    return dict(zip(ASKED, found, strict=True))


def _nobodys_seed(group: mx.distributed.Group) -> int:
    words = from_first(group, mx.array(list(os.urandom(16)), dtype=mx.int32))
    return int.from_bytes(bytes(words.tolist()), "little")


class SharedDrafter:
    """A drafter whose proposals are the first process's."""

    def __init__(self, drafter: Drafter, group: mx.distributed.Group):
        self.drafter = drafter
        self.group = group
        self.tap_ids = drafter.tap_ids
        self.max_width = drafter.max_width
        self.new_context = drafter.new_context
        self.observe = drafter.observe
        self.window = drafter.window if isinstance(drafter, Windowed) else None

    def propose(self, context: Any, anchor: mx.array, width: int, policy: DraftPolicy) -> Proposal:
        """See `Drafter.propose`. q stays the process's own: only the first one's decides."""
        proposal = self.drafter.propose(context, anchor, width, policy)
        if proposal.tokens.size == 0:
            return proposal
        return Proposal(from_first(self.group, proposal.tokens), proposal.q, proposal.confidence)


class SharedPolicy:
    """A policy whose outcomes are the first process's."""

    def __init__(self, policy: Policy, group: mx.distributed.Group):
        self.policy = policy
        self.group = group
        self.processors = policy.processors
        self.sequential = policy.sequential

    def at(self, position: int | mx.array, history: Any = None) -> "_SharedRound":
        """See `Policy.at`."""
        return _SharedRound(self.policy.at(position, history), self.group)


@dataclass(frozen=True)
class _SharedRound:
    policy: RoundPolicy
    group: mx.distributed.Group

    @property
    def greedy(self) -> bool:
        return self.policy.greedy

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        return self.policy.draft(logits, slot)

    def draws(self, lanes: int, slots: int, vocab: int) -> Draws | None:
        return self.policy.draws(lanes, slots, vocab)

    def draft_among(self, scores: mx.array, ids: mx.array, slot: int, vocab: int) -> tuple[mx.array, mx.array | None]:
        return self.policy.draft_among(scores, ids, slot, vocab)

    def accept(self, tokens: mx.array, q: mx.array | None, logits: mx.array) -> tuple[Outcome, mx.array]:
        outcome, logprobs = self.policy.accept(tokens, q, logits)
        both = from_first(self.group, mx.stack([outcome.accepted, outcome.next_anchor]))
        return Outcome(both[0], both[1], outcome.faults), logprobs


class SharedWidths(AutoWidth):
    """Widths that the first process chooses by its own clock, a round earlier than it would alone.

    A decision is sent behind the round that is under way and taken for the one after the next, so that nobody waits for
    it: when it is looked at, the round that it was sent behind has been read.
    """

    def __init__(self, most: int, group: mx.distributed.Group, file: Path | None = None):
        self._first = group.rank() == 0
        super().__init__(most, file=file if self._first else None)
        self._group = group
        self._sent: mx.array | None = None

    @property
    def reason(self) -> str | None:
        """See `Widths`; None in the other processes, which don't know."""
        return super().reason if self._first else None

    def choose(self) -> int:
        """See `Widths.choose`."""
        width = super().choose() if self._first else 0
        sent, self._sent = self._sent, from_first(self._group, mx.array(width))
        mx.async_eval(self._sent)
        return (self._sent if sent is None else sent).item()

    def observed(self, width: int, accepted: int, seconds: float | None) -> None:
        """See `Widths.observed`."""
        if self._first:
            super().observed(width, accepted, seconds)
