"""The policies of B sequences as one: those that sample alike are drawn for together, each with its own noise."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from specmlx.decoding.accept import Outcome
from specmlx.decoding.policy import Policy, RoundPolicy
from specmlx.decoding.processors import Tokens
from specmlx.drafters.proposal import Draws, among

Limit = tuple[int | None, Collection[int]]
"""How many tokens a sequence may still give, None for any number, and the tokens that end it."""


class Policies:
    """The policies of B sequences; `at` is the policy of one round.

    Sequences are grouped by sampler and rule; one with logits processors or callables of the user's stays alone.
    """

    def __init__(self, policies: Sequence[Policy]):
        self.sequential = any(policy.sequential for policy in policies)
        self.processors = any(policy.processors for policy in policies)
        alike: dict[object, list[int]] = {}
        for i, policy in enumerate(policies):
            alone = policy.processors or policy.sequential
            alike.setdefault(i if alone else (policy.rule, policy.sampler), []).append(i)
        self.groups = [
            (policies[rows[0]] if len(rows) == 1 else Policy.together([policies[i] for i in rows]), tuple(rows))
            for rows in alike.values()
        ]

    def at(
        self, positions: Sequence[int] | mx.array, histories: Sequence[Tokens], limits: Sequence[Limit] = ()
    ) -> "RoundPolicy | MixedPolicy":
        """The policy of a round.

        Args:
            positions: `[B]`, each sequence's absolute index of the first token that the round delivers (device ok).
            histories: each sequence's tokens up to its anchor, `[N]` or `[1, N]` padded on the left with -1; used where
                it has logits processors.
            limits: needed where `sequential`: callables of the user's see no row behind a sequence's end.
        """
        positions = mx.array(positions)
        if len(self.groups) > 1:
            return MixedPolicy(self.groups, positions, histories, limits)
        ((policy, _),) = self.groups
        return policy.at(positions, histories[0] if policy.processors else None)


@dataclass(frozen=True)
class MixedPolicy:
    """A round's policy for groups of sequences: a DraftPolicy, and what accepts the proposal.

    failures: `draft` and `accept` put in what a sequence's own callables raised, by sequence.
    """

    groups: Sequence[tuple[Policy, tuple[int, ...]]]
    positions: mx.array
    histories: Sequence[Tokens]
    limits: Sequence[Limit] = ()
    failures: dict[int, Exception] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether every sequence takes the argmax of the logits as they are."""
        return all(policy.rule in ("greedy", "sampler-match") and not policy.processors for policy, _ in self.groups)

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        """See `DraftPolicy.draft`; q of sequences that sample nothing is zero, and None if there is no other one."""
        tokens, q = zip(*(self._draft(group, logits, slot) for group in self.groups), strict=True)
        if all(each is None for each in q):
            return self._in_order(tokens), None
        V = logits.shape[-1]
        q = [mx.zeros((*t.shape, V)) if each is None else each for t, each in zip(tokens, q, strict=True)]
        return self._in_order(tokens), self._in_order(q)

    def draws(self, batch: int, slots: int, vocab: int) -> Draws | None:
        """See `Drawing.draws`."""
        return Draws() if self.greedy else None

    def draft_among(self, scores: mx.array, ids: mx.array, slot: int, vocab: int) -> tuple[mx.array, mx.array | None]:
        """See `Drawing.draft_among`."""
        return self.draft(among(scores, ids, vocab), slot)

    def accept(self, tokens: mx.array, q: mx.array | None, logits: mx.array) -> tuple[Outcome, mx.array]:
        """See `RoundPolicy.accept`; what one sequence's own callables raise keeps no other one back."""
        outcomes, logprobs = [], []
        for policy, rows in self.groups:
            at, sampled = mx.array(rows), q is not None and policy.rule == "rejection"
            mine, own = tokens[at], logits[at]
            if policy.sequential:
                mine = mine[:, : self._before_end(rows[0], mine)]
            try:
                outcome, scores = self._of(policy, rows).accept(
                    mine, q[at] if sampled else None, own[:, : mine.shape[1] + 1]
                )
            except Exception as error:
                self._failed(policy, rows, error)
                nothing = mx.zeros((1,), dtype=mx.int32)
                outcome, scores = Outcome(nothing, nothing, nothing[:, None]), own[:, :1]
            if missing := logits.shape[1] - scores.shape[1]:
                scores = mx.pad(scores, [(0, 0), (0, missing), (0, 0)], constant_values=mx.nan)
                outcome = replace(outcome, faults=mx.pad(outcome.faults, [(0, 0), (0, missing)]))
            outcomes.append(outcome)
            logprobs.append(scores)
        parts = zip(*((o.accepted, o.next_anchor, o.faults) for o in outcomes), strict=True)
        return Outcome(*map(self._in_order, parts)), self._in_order(logprobs)

    def alone(self, index: int) -> "MixedPolicy":
        """The policy of one sequence alone, whose failures are by index 0."""
        policy, rows = next(group for group in self.groups if index in group[1])
        own = [(policy.lane(rows.index(index)), (0,))]
        return MixedPolicy(own, self.positions[index : index + 1], self.histories[index : index + 1])

    def _draft(self, group: tuple, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        policy, rows = group
        own = logits[mx.array(rows)]
        try:
            return self._of(policy, rows).draft(own, slot)
        except Exception as error:
            self._failed(policy, rows, error)
            return mx.argmax(own, axis=-1).astype(mx.int32), None

    def _failed(self, policy: Policy, rows: tuple[int, ...], error: Exception) -> None:
        """Keep what a sequence's own callable raised; raises it again where it is nobody's own."""
        if not (policy.processors or policy.sequential):
            raise error
        self.failures.setdefault(rows[0], error)

    def _before_end(self, index: int, tokens: mx.array) -> int:
        left, ends = self.limits[index]
        drafted = tokens[0].tolist()[: None if left is None else left - 1]
        return next((i for i, token in enumerate(drafted) if token in ends), len(drafted))

    def _of(self, policy: Policy, rows: tuple[int, ...]) -> RoundPolicy:
        return policy.at(self.positions[mx.array(rows)], self.histories[rows[0]] if policy.processors else None)

    def _in_order(self, parts: Sequence[mx.array]) -> mx.array:
        order = [i for _, rows in self.groups for i in rows]
        return mx.concatenate(parts)[mx.array([order.index(i) for i in range(len(order))])]
