"""The policies of B lanes as one: lanes that sample alike are drawn for together, each with its own noise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from specmlx.speculation.accept import Outcome
from specmlx.speculation.policy import Policy, RoundPolicy


@dataclass(frozen=True)
class Group:
    """Lanes that share a policy, by their indices."""

    policy: Policy
    lanes: tuple[int, ...]


def grouped(policies: Sequence[Policy]) -> list[Group]:
    """Lanes by sampler and rule; one with logits processors or callables of the user's stays alone."""
    alike: dict[object, list[int]] = {}
    for lane, policy in enumerate(policies):
        alone = policy.processors or policy.sequential
        alike.setdefault(lane if alone else (policy.rule, policy.sampler), []).append(lane)
    return [Group(Policy.together([policies[i] for i in lanes]), tuple(lanes)) for lanes in alike.values()]


@dataclass(frozen=True)
class LanePolicy:
    """A round's policy for B lanes: a DraftPolicy, and what accepts the proposal.

    positions: `[B]` int32, each lane's absolute index of the first token that the round delivers.
    histories: each lane's tokens up to its anchor, used where it has logits processors.
    failures: `accept` puts in what lanes' own callables raised, by lane.
    """

    groups: Sequence[Group]
    positions: mx.array
    histories: Sequence[list[int]]
    failures: dict[int, Exception] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether every lane takes the argmax of the logits as they are."""
        return all(self._of(group).greedy for group in self.groups)

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        """See `DraftPolicy.draft`; q of lanes that sample nothing is zero, and None if there is no other lane."""
        if len(self.groups) == 1:
            return self._of(self.groups[0]).draft(logits, slot)
        drafts = [self._of(group).draft(self._rows(logits, group), slot) for group in self.groups]
        tokens = self._by_lane([tokens for tokens, _ in drafts])
        if all(q is None for _, q in drafts):
            return tokens, None
        return tokens, self._by_lane([mx.zeros((*t.shape, logits.shape[-1])) if q is None else q for t, q in drafts])

    def accept(self, tokens: mx.array, q: mx.array | None, logits: mx.array) -> tuple[Outcome, mx.array]:
        """See `RoundPolicy.accept`; what one lane's own callables raise keeps no other lane back."""
        outcomes, logprobs = [], []
        for group in self.groups:
            policy = self._of(group)
            mine = self._rows(q, group) if q is not None and group.policy.rule == "rejection" else None
            try:
                outcome, scores = policy.accept(self._rows(tokens, group), mine, self._rows(logits, group))
            except Exception as error:
                if not (group.policy.processors or group.policy.sequential):
                    raise
                self.failures[group.lanes[0]] = error
                nothing = mx.zeros((1,), dtype=mx.int32)
                outcome, scores = Outcome(nothing, nothing), mx.zeros_like(self._rows(logits, group))
            outcomes.append(outcome)
            logprobs.append(scores)
        accepted = self._by_lane([outcome.accepted for outcome in outcomes])
        return Outcome(accepted, self._by_lane([o.next_anchor for o in outcomes])), self._by_lane(logprobs)

    def lane(self, index: int) -> RoundPolicy:
        """The policy of one lane alone."""
        group = next(group for group in self.groups if index in group.lanes)
        alone = group.policy.lane(group.lanes.index(index))
        return alone.at(self.positions[index : index + 1], self.histories[index] if alone.processors else None)

    def _rows(self, x: mx.array, group: Group) -> mx.array:
        return x if len(self.groups) == 1 else x[mx.array(group.lanes)]

    def _of(self, group: Group) -> RoundPolicy:
        history = self.histories[group.lanes[0]] if group.policy.processors else None
        return group.policy.at(self._rows(self.positions, group), history)

    def _by_lane(self, parts: list[mx.array]) -> mx.array:
        if len(parts) == 1:
            return parts[0]
        order = [lane for group in self.groups for lane in group.lanes]
        return mx.concatenate(parts)[mx.array([order.index(lane) for lane in range(len(order))])]
