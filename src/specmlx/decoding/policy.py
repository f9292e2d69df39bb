"""How a request turns logits into tokens, for the drafter and for the target.

Three rules, each exact: the delivered tokens have the target's own distribution.

- greedy: the argmax; a proposal is kept as far as it is equal.
- coupled (with a seed): index i has its own Gumbel noise G_i. The target's token is argmax(log p + G_i), a draw from p,
  and the drafter draws with the same G_i. So the text depends on p and the seed alone, whatever the drafter and width.
- rejection (without a seed): Leviathan et al. 2023. Keeps more, sum min(p, q) of each row.
  It relies on q: how far a proposal is verified may depend on earlier tokens, never on the token cut off.

A sampler or a logits processor that is not specmlx's is honoured row by row (accept.py).
"""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import mlx.core as mx

from specmlx.decoding.accept import PROCESSED, TARGETS, Limit, Outcome, accept_rows
from specmlx.decoding.processors import Processor, Tokens
from specmlx.decoding.rng import Noise
from specmlx.decoding.sampling import Sampler, normalise
from specmlx.drafters.proposal import DraftPolicy, Draws, among
from specmlx.kernels.accept import match_best, rejection
from specmlx.kernels.draft_head import top_k

# Candidates that one pass over the logits finds (see kernels/draft_head).
FEW = 32


class Policy:
    """Sampler, logits processors and randomness of one request (or of B that sample alike, with a seed each).

    Attributes:
        rule: "greedy", "coupled", "rejection", or "sampler-match" for a sampler that is not specmlx's.
        sequential: True if rows are handled one by one, with a look at the device each; `reason` says why.
        reason: one line, or None.
        samples: whether drafts are sampled, or taken by argmax.
        call: runs a callable of the user's with its arguments.
    """

    def __init__(
        self,
        sampler: Callable[[mx.array], mx.array] | None = None,
        processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
        seed: int | Sequence[int] | None = None,
    ):
        """sampler: a `Sampler`, any callable like mlx-lm's, or None for greedy. seed: see `Noise`.

        Raises ValueError for what can't be called, for a bad seed, and for a seed with another sampler.
        """
        if processors is not None and (callable(processors) or not isinstance(processors, Iterable)):
            raise ValueError(f"logits_processors must be a list, got {processors!r}: write [it]")
        self.sampler = Sampler() if sampler is None else sampler
        self.processors = tuple(processors or ())
        self.seed = seed
        for what, value in [("sampler", self.sampler), *(("logits_processors", p) for p in self.processors)]:
            if not callable(value):
                raise ValueError(f"{what} must be callable, got {value!r}: use specmlx.make_{what}")
        self.noise = Noise(seed)
        self.call: Callable = operator.call
        ours = isinstance(self.sampler, Sampler)
        if not ours and seed is not None:
            raise ValueError(f"seed={seed} needs a sampler of specmlx.make_sampler: this one has randomness of its own")
        self.foreign_processors = not all(isinstance(p, Processor) for p in self.processors)
        self.sequential = self.foreign_processors or not ours
        self.reason = None
        if self.foreign_processors:
            self.reason = "a logits processor is not specmlx's: rows are processed one by one on accepted text only"
        elif not ours:
            self.reason = (
                "the sampler is not specmlx's: tokens are drawn with it one by one and compared with the draft"
            )
        if not ours:
            self.rule = "sampler-match"
        elif self.sampler.greedy:
            self.rule = "greedy"
        # Row by row, tokens are matched; common noise makes them match most often.
        elif seed is not None or self.sequential:
            self.rule = "coupled"
        else:
            self.rule = "rejection"
        self.samples = self.rule in ("coupled", "rejection")

    def with_noise(self, noise: Noise) -> "Policy":
        """The same policy with other random numbers."""
        policy = copy.copy(self)
        policy.noise = noise
        return policy

    def at(self, position: int | mx.array, history: Tokens | None = None, limit: Limit = (None, ())) -> "RoundPolicy":
        """The policy of one round.

        Args:
            position: absolute index of the first token that the round delivers: int, or [B] (device ok).
            history: this call's prompt and generated tokens including the anchor, [N], or [B, N] padded on the left
                with -1. Processors need it (`accept` raises ValueError); drafts are penalised by it too, if given.
            limit: callables of the user's see no row after a sequence's end.
        """
        return RoundPolicy(self, position, history, limit)

    def log_probs(self, logprobs: mx.array, indices: mx.array, top: bool = False) -> mx.array:
        """What rows at absolute `indices` [B, T] are sampled from, [B, T, V] -> [B, T, V] float32.

        top: the V tokens are the most probable ones of more, and the only ones that are kept.
        """
        V, sampler = logprobs.shape[-1], self.sampler
        if top:
            # Filters that keep so many tokens keep all of them.
            k, least = sampler.top_k if sampler.top_k < V else 0, min(sampler.min_tokens_to_keep, V)
            sampler = replace(sampler, top_k=k, min_tokens_to_keep=least)
        coin = self.noise.uniform("xtc", indices) if sampler.xtc_probability > 0 else None
        return sampler.log_probs(logprobs, coin, 1.0 if top else None)

    def scores(self, logprobs: mx.array, indices: mx.array) -> tuple[mx.array, mx.array | None]:
        """[B, T, V], of which the greedy and the coupled rule take the best, and the noise to add first, or None."""
        if self.rule != "coupled":
            return logprobs, None
        return self.log_probs(logprobs, indices), self.noise.gumbel("token", indices, logprobs.shape[-1])


@dataclass(frozen=True)
class RoundPolicy:
    """A policy whose slot 0 has an absolute index: a DraftPolicy, and what accepts the proposal."""

    policy: Policy
    position: int | mx.array
    history: Tokens | None = None
    limit: Limit = (None, ())
    failures: ClassVar[Mapping[int, Exception]] = {}

    def alone(self, index: int) -> "RoundPolicy":
        """The policy of one of several sequences."""
        own = self.policy.with_noise(self.policy.noise.lane(index))
        return replace(self, policy=own, position=self.position[index : index + 1])

    @property
    def greedy(self) -> bool:
        """Whether `draft` takes the argmax of the logits as they are."""
        return not (self.policy.samples or self.policy.processors)

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        """Tokens of the proposal slots slot..slot+S-1, and what they were sampled from.

        logits [B, S, V] -> tokens [B, S] int32, q [B, S, V] float32 (None unless the rule is rejection).
        """
        sampler, vocab = self.policy.sampler, logits.shape[-1]
        for processor in self.policy.processors:
            # Only as far as it can: the tokens between are not known to all drafters. It is exact by q.
            if isinstance(processor, Processor) and (self.history is not None or not processor.needs_history):
                logits = processor.rows(self.history, logits, None)
        if not self.policy.samples:
            return mx.argmax(logits, axis=-1).astype(mx.int32), None
        if 0 < sampler.top_k <= min(FEW, vocab - 1) and sampler.xtc_probability == 0:
            # Of all others the filters leave nothing: they needn't be sorted.
            scores, ids = top_k(logits, sampler.top_k)
            total = mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)
            return self._draw(scores - total, slot, vocab, ids)
        return self._draw(normalise(logits), slot, vocab)

    def draws(self, batch: int, slots: int, vocab: int) -> Draws | None:
        """See `Drawing.draws`: greedy, and sampling by temperature alone."""
        policy = self.policy
        if self.greedy:
            return Draws()
        if policy.processors or policy.sampler.filters:
            return None
        return Draws(
            self._noise(self._indices(0, (batch, slots)), vocab), policy.sampler.scale, policy.rule == "rejection"
        )

    def draft_among(self, scores: mx.array, ids: mx.array, slot: int, vocab: int) -> tuple[mx.array, mx.array | None]:
        """See `Drawing.draft_among`: processors and XTC's special tokens go by ids, all else by the candidates."""
        if self.policy.processors or (self.policy.samples and self.policy.sampler.xtc_special_tokens):
            return self.draft(among(scores, ids, vocab), slot)
        if self.policy.samples:
            return self._draw(normalise(scores), slot, vocab, ids)
        return _at_best(scores, ids), None

    def _draw(
        self, logprobs: mx.array, slot: int, vocab: int, ids: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """Sampled tokens [B, S] and their q; logprobs of the whole vocabulary or, [B, S, K], of the `ids` alone."""
        indices = self._indices(slot, logprobs.shape)
        log_q = self.policy.log_probs(logprobs, indices, top=ids is not None)
        noise, sampled = self._noise(indices, vocab), self.policy.rule == "rejection"
        if ids is None:
            return mx.argmax(log_q + noise, axis=-1).astype(mx.int32), mx.exp(log_q) if sampled else None
        tokens = _at_best(log_q + mx.take_along_axis(noise, ids, axis=-1), ids)
        return tokens, among(mx.exp(log_q), ids, vocab, 0.0) if sampled else None

    def _noise(self, indices: mx.array, vocab: int) -> mx.array:
        return self.policy.noise.gumbel("draft" if self.policy.rule == "rejection" else "token", indices, vocab)

    def accept(self, tokens: mx.array, q: mx.array | None, logits: mx.array) -> tuple[Outcome, mx.array]:
        """What the target keeps of a proposal. Nothing is read on the host, except by a sequential policy, of B = 1.

        Args:
            tokens: the proposal, [B, γ] int32.
            q: what its tokens were sampled from, [B, γ, V] float32; None if they were not sampled.
            logits: the target's, [B, γ + 1, V]; rows after the first rejected token may hold anything, NaN too.

        Returns:
            The outcome with its faults, and logprobs [B, γ + 1, V] as mlx-lm yields them: after the processors,
            before the filters, in the model's dtype. Rows that a sequential policy didn't reach are NaN.
        """
        policy, history, given = self.policy, self.history, logits
        if logits.shape[1] != tokens.shape[1] + 1:
            T, γ = logits.shape[1], tokens.shape[1]
            raise ValueError(f"logits must have one row more than the proposal has tokens, got {T} rows for {γ} tokens")
        if policy.processors and history is None:
            raise ValueError("logits processors need history=: pass the tokens up to the anchor")
        indices = self._indices(0, logits.shape)
        if not policy.foreign_processors:
            for processor in policy.processors:
                logits = processor.rows(history, logits, tokens)
        if policy.sequential:
            found, logprobs, faults = accept_rows(policy, tokens, logits, history, indices, self.limit)
        else:
            # NaN or +inf in any logit shows in their sum, and so does that none is left.
            total = mx.logsumexp(logits, axis=-1, keepdims=True)
            logprobs, faults = logits - total, ~mx.isfinite(total[..., 0])
            if policy.rule != "rejection":
                found = match_best(tokens, *policy.scores(logprobs, indices))
            else:
                p = mx.exp(policy.log_probs(logprobs, indices))
                u = policy.noise.uniform("accept", indices[:, :-1])
                # One draw a round: it is keyed by the round's first index, which no other round has.
                noise = policy.noise.gumbel("residual", indices[:, :1], logits.shape[-1])[:, 0]
                found = rejection(tokens, q, p, u, noise)
        faults = faults.astype(mx.int32) * (PROCESSED if policy.processors else TARGETS)
        if policy.processors:
            total = mx.logsumexp(given, axis=-1)
            faults = mx.where(mx.isnan(total) | (total == mx.inf), TARGETS, faults)
        return Outcome(*found, faults), logprobs

    def _indices(self, slot: int, shape: Sequence[int]) -> mx.array:
        position = mx.array(self.position).reshape(-1, 1) + slot
        return mx.broadcast_to(position + mx.arange(shape[1]), shape[:2])


@dataclass(frozen=True)
class MixedPolicy(DraftPolicy):
    """A round's policies of several sequences, and what accepts the proposal.

    parts: each policy with its sequences. failures: `draft` and `accept` put in what a sequence's own callables raised.
    """

    parts: Sequence[tuple[RoundPolicy, Sequence[int]]]
    failures: dict[int, Exception] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether every sequence takes the argmax of the logits as they are."""
        return all(policy.greedy for policy, _ in self.parts)

    def alone(self, index: int) -> "MixedPolicy":
        """The policy of one sequence alone, whose failures are by index 0."""
        policy, rows = next(part for part in self.parts if index in part[1])
        return MixedPolicy([(policy.alone(rows.index(index)), [0])])

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        """See `DraftPolicy.draft`; q of sequences that sample nothing is zero, and None if there is no other one."""

        def best(at: mx.array) -> tuple[mx.array, None]:
            return mx.argmax(logits[at], axis=-1).astype(mx.int32), None

        tokens, q = self._each(lambda policy, at: policy.draft(logits[at], slot), best)
        if all(each is None for each in q):
            return self._in_order(tokens), None
        V = logits.shape[-1]
        q = [mx.zeros((*t.shape, V)) if each is None else each for t, each in zip(tokens, q, strict=True)]
        return self._in_order(tokens), self._in_order(q)

    def accept(self, tokens: mx.array, q: mx.array | None, logits: mx.array) -> tuple[Outcome, mx.array]:
        """See `RoundPolicy.accept`; what one sequence's own callables raise keeps no other one back."""

        def kept(policy: RoundPolicy, at: mx.array) -> tuple[Outcome, mx.array]:
            sampled = q is not None and policy.policy.rule == "rejection"
            return policy.accept(tokens[at], q[at] if sampled else None, logits[at])

        def nothing(at: mx.array) -> tuple[Outcome, mx.array]:
            none = mx.zeros((1, logits.shape[1]), dtype=mx.int32)
            return Outcome(none[:, 0], none[:, 0], none), logits[at]

        outcomes, logprobs = self._each(kept, nothing)
        return Outcome(*map(self._in_order, zip(*outcomes, strict=True))), self._in_order(logprobs)

    def _each(self, run: Callable, instead: Callable) -> Iterable[tuple]:
        """What `run` gives for each policy, `instead` where a sequence's own callable raises, result by result."""
        found = []
        for policy, rows in self.parts:
            try:
                found.append(run(policy, mx.array(rows)))
            except Exception as error:
                if not (policy.policy.processors or policy.policy.sequential):
                    raise
                self.failures.setdefault(rows[0], error)
                found.append(instead(mx.array(rows)))
        return zip(*found, strict=True)

    def _in_order(self, found: Sequence[mx.array]) -> mx.array:
        order = [i for _, rows in self.parts for i in rows]
        return mx.concatenate(found)[mx.array([order.index(i) for i in range(len(order))])]


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
            (policies[rows[0]].with_noise(Noise.together([policies[i].noise for i in rows])), rows)
            for rows in alike.values()
        ]

    def at(
        self, positions: Sequence[int] | mx.array, histories: Sequence[Tokens], limits: Sequence[Limit] = ()
    ) -> RoundPolicy | MixedPolicy:
        """The policy of a round.

        Args:
            positions: `[B]`, each sequence's absolute index of the first token that the round delivers (device ok).
            histories: each sequence's tokens up to its anchor, `[N]` or `[1, N]` padded on the left with -1; used where
                it has logits processors.
            limits: each sequence's; needed where `sequential`.
        """
        positions, parts = mx.array(positions), []
        for policy, rows in self.groups:
            own = positions if len(self.groups) == 1 else positions[mx.array(rows)]
            limit = limits[rows[0]] if policy.sequential and limits else (None, ())
            parts.append((policy.at(own, histories[rows[0]] if policy.processors else None, limit), rows))
        return parts[0][0] if len(parts) == 1 else MixedPolicy(parts)


def _at_best(scores: mx.array, ids: mx.array) -> mx.array:
    """The ids [B, S] int32 of the best scores, both [B, S, K]."""
    best = mx.argmax(scores, axis=-1, keepdims=True)
    return mx.take_along_axis(ids, best, axis=-1)[..., 0].astype(mx.int32)
