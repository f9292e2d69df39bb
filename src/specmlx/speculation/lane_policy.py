"""The policies of B lanes as one: lanes that sample alike are drawn for together, each with its own noise."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from specmlx.drafters.proposal import Draws, among
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
    limits: the tokens that each lane may still give, None for any number, and those that end it: callables of the
        user's see no row behind, as in a lane alone.
    failures: `draft` and `accept` put in what lanes' own callables raised, by lane.
    """

    groups: Sequence[Group]
    positions: mx.array
    histories: Sequence[list[int]]
    limits: Sequence[tuple[int | None, Collection[int]]] = ()
    failures: dict[int, Exception] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether every lane takes the argmax of the logits as they are."""
        return all(self._of(group).greedy for group in self.groups)

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        """See `DraftPolicy.draft`; q of lanes that sample nothing is zero, and None if there is no other lane."""
        drafts = [self._draft(group, self._rows(logits, group), slot) for group in self.groups]
        if len(drafts) == 1:
            return drafts[0]
        tokens = self._by_lane([tokens for tokens, _ in drafts])
        if all(q is None for _, q in drafts):
            return tokens, None
        return tokens, self._by_lane([mx.zeros((*t.shape, logits.shape[-1])) if q is None else q for t, q in drafts])

    def draws(self, lanes: int, slots: int, vocab: int) -> Draws | None:
        """See `Drawing.draws`: of lanes that draw alike."""
        if self.greedy:
            return Draws()
        return self._of(self.groups[0]).draws(lanes, slots, vocab) if len(self.groups) == 1 else None

    def draft_among(self, scores: mx.array, ids: mx.array, slot: int, vocab: int) -> tuple[mx.array, mx.array | None]:
        """See `Drawing.draft_among`."""
        group = self.groups[0]
        if len(self.groups) > 1 or group.policy.processors or group.policy.sequential:
            return self.draft(among(scores, ids, vocab), slot)
        return self._of(group).draft_among(scores, ids, slot, vocab)

    def accept(self, tokens: mx.array, q: mx.array | None, logits: mx.array) -> tuple[Outcome, mx.array]:
        """See `RoundPolicy.accept`; what one lane's own callables raise keeps no other lane back."""
        outcomes, logprobs = [], []
        for group in self.groups:
            policy = self._of(group)
            mine = self._rows(q, group) if q is not None and group.policy.rule == "rejection" else None
            rows = self._until_end(group, self._rows(tokens, group))
            try:
                outcome, scores = policy.accept(rows, mine, self._rows(logits, group)[:, : rows.shape[1] + 1])
            except Exception as error:
                self._failed(group, error)
                nothing = mx.zeros((1,), dtype=mx.int32)
                outcome, scores = Outcome(nothing, nothing, nothing[:, None]), self._rows(logits, group)[:, :1]
            if missing := logits.shape[1] - scores.shape[1]:
                scores = mx.pad(scores, [(0, 0), (0, missing), (0, 0)], constant_values=mx.nan)
                outcome = replace(outcome, faults=mx.pad(outcome.faults, [(0, 0), (0, missing)]))
            outcomes.append(outcome)
            logprobs.append(scores)
        parts = zip(*((o.accepted, o.next_anchor, o.faults) for o in outcomes), strict=True)
        return Outcome(*(self._by_lane([*part]) for part in parts)), self._by_lane(logprobs)

    def lane(self, index: int) -> "LanePolicy":
        """The policy of one lane alone."""
        group = next(group for group in self.groups if index in group.lanes)
        alone = Group(group.policy.lane(group.lanes.index(index)), (0,))
        return LanePolicy([alone], self.positions[index : index + 1], self.histories[index : index + 1])

    def _draft(self, group: Group, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        try:
            return self._of(group).draft(logits, slot)
        except Exception as error:
            self._failed(group, error)
            return mx.argmax(logits, axis=-1).astype(mx.int32), None

    def _failed(self, group: Group, error: Exception) -> None:
        """Keep what a lane's own callable raised; raises it again where it is not one's own."""
        if not (group.policy.processors or group.policy.sequential):
            raise error
        self.failures.setdefault(group.lanes[0], error)

    def _until_end(self, group: Group, tokens: mx.array) -> mx.array:
        if not group.policy.sequential or not self.limits:
            return tokens
        left, ends = self.limits[group.lanes[0]]
        drafted = tokens[0].tolist()[: None if left is None else left - 1]
        return tokens[:, : next((i for i, token in enumerate(drafted) if token in ends), len(drafted))]

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
