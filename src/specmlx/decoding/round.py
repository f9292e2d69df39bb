"""One round on its way through the device, and what the host reads of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import mlx.core as mx

from specmlx.cache.conversation import Observable
from specmlx.cache.layers import LayerStates, Pass
from specmlx.decoding.accept import TARGETS, Outcome
from specmlx.decoding.prefill import Prefiller
from specmlx.drafters.proposal import Proposal


class Target(Prefiller, Protocol):
    """What the loop needs of a model: the two ways to run rows. It knows nothing of layers."""

    vocab_size: int

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

    proposal: of γ tokens. verified: the pass over its T = γ + 1 rows. outcome: what is kept.
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
    report: mx.array = field(init=False)
    seconds: float = 0.0

    def __post_init__(self):
        self.num_draft_tokens = self.proposal.tokens.shape[1]

    def send(self, states: LayerStates, arrays: Sequence[mx.array]) -> "Round":
        """Hand the round to the device with some arrays; `states` take its pass over."""
        outcome = self.outcome
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
