"""How a request turns logits into tokens, for the drafter and for the target.

Three rules, each exact: the delivered tokens have the target's own distribution.

- greedy: the argmax; a proposal is kept as far as it is equal.
- coupled (with a seed): index i has its own Gumbel noise G_i. The target's token is argmax(log p + G_i), a
  draw from p, and the drafter draws with the same G_i. So the text depends on p and the seed alone: any
  drafter, any width and none give the same one.
- rejection (without a seed): Leviathan et al. 2023. Keeps more, sum min(p, q) of each row.
  It relies on q: how far a proposal is verified may depend on earlier tokens, never on the token cut off.

A sampler or a logits processor that is not specmlx's is honoured row by row (foreign.py).
"""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx

from specmlx.decoding import custom_samplers as foreign
from specmlx.decoding.accept import PROCESSED, TARGETS, Outcome, accept_rejection
from specmlx.decoding.processors import Processor, Tokens
from specmlx.decoding.rng import Noise
from specmlx.decoding.sampling import Sampler
from specmlx.drafters.proposal import Draws, among
from specmlx.kernels.accept import match_best
from specmlx.kernels.draft_head import top_k

# Candidates that one pass over the logits finds (see kernels/draft_head).
FEW = 32

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class Policy:
    """Sampler, logits processors and randomness of one request (or of B lanes, with a seed each).

    Attributes:
        rule: "greedy", "coupled", "rejection", or "sampler-match" for a foreign sampler.
        sequential: True if rows are handled one by one, with a look at the device each; `reason` says why.
        reason: one line, or None.
        call: runs a callable of the user's with its arguments.
    """

    def __init__(
        self,
        sampler: Callable[[mx.array], mx.array] | None = None,
        processors: Sequence[LogitsProcessor] | None = None,
        seed: int | Sequence[int] | None = None,
    ):
        """sampler: a `Sampler`, any callable like mlx-lm's, or None for greedy. seed: see `Noise`.

        Raises ValueError for what can't be called, for a bad seed, and for a seed with a foreign sampler.
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
        self.reason = _reason(not ours, self.foreign_processors)
        if not ours:
            self.rule = "sampler-match"
        elif self.sampler.greedy:
            self.rule = "greedy"
        # Row by row, tokens are matched; common noise makes them match most often.
        elif seed is not None or self.sequential:
            self.rule = "coupled"
        else:
            self.rule = "rejection"

    @staticmethod
    def together(policies: "Sequence[Policy]") -> "Policy":
        """One policy of several lanes that share sampler, processors and rule, each with its own noise."""
        return policies[0].with_noise(Noise.together([policy.noise for policy in policies]))

    def lane(self, index: int) -> "Policy":
        """The policy of one lane."""
        return self.with_noise(self.noise.lane(index))

    def with_noise(self, noise: Noise) -> "Policy":
        """The same policy with other random numbers."""
        policy = copy.copy(self)
        policy.noise = noise
        return policy

    def at(self, position: int | mx.array, history: Tokens | None = None) -> "RoundPolicy":
        """The policy of one round.

        Args:
            position: absolute index of the first token that the round delivers: int, or [B] (device ok).
            history: as `RoundPolicy.accept` takes it; if given, drafts are penalised by it too.
        """
        return RoundPolicy(self, position, history)

    def log_probs(self, logprobs: mx.array, indices: mx.array) -> mx.array:
        """What rows at absolute `indices` [B, T] are sampled from, [B, T, V] -> [B, T, V] float32."""
        coin = self.noise.uniform("xtc", indices) if self.sampler.xtc_probability > 0 else None
        return self.sampler.log_probs(logprobs, coin)

    def log_probs_among(self, logprobs: mx.array, indices: mx.array) -> mx.array:
        """The same for the K most probable tokens, the only ones that are kept: [B, T, K] -> [B, T, K] float32."""
        K, sampler = logprobs.shape[-1], self.sampler
        # Filters that keep so many tokens keep all of them.
        top_k, least = sampler.top_k if sampler.top_k < K else 0, min(sampler.min_tokens_to_keep, K)
        coin = self.noise.uniform("xtc", indices) if sampler.xtc_probability > 0 else None
        return replace(sampler, top_k=top_k, min_tokens_to_keep=least).log_probs(logprobs, coin, total=1.0)

    def draw(self, logprobs: mx.array, indices: mx.array) -> mx.array:
        """The target's own tokens by the greedy or the coupled rule, [B, T, V] -> [B, T] int32."""
        scores, noise = self.scores(logprobs, indices)
        return mx.argmax(scores if noise is None else scores + noise, axis=-1).astype(mx.int32)

    def scores(self, logprobs: mx.array, indices: mx.array) -> tuple[mx.array, mx.array | None]:
        """What `draw` takes the best of, [B, T, V], and the noise that it adds, [B, T, V] float32 or None."""
        if self.rule != "coupled":
            return logprobs, None
        return self.log_probs(logprobs, indices), self.noise.gumbel("token", indices, logprobs.shape[-1])


@dataclass(frozen=True)
class RoundPolicy:
    """A policy whose slot 0 has an absolute index: a DraftPolicy, and what accepts the proposal."""

    policy: Policy
    position: int | mx.array
    history: Tokens | None = None
    failures: ClassVar[Mapping[int, Exception]] = {}

    def alone(self, index: int) -> "RoundPolicy":
        """The policy of one of several sequences, which have no processors."""
        return RoundPolicy(self.policy.lane(index), self.position[index : index + 1])

    @property
    def greedy(self) -> bool:
        """Whether `draft` takes the argmax of the logits as they are."""
        return self.policy.rule in ("greedy", "sampler-match") and not self.policy.processors

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, mx.array | None]:
        """Tokens of the proposal slots slot..slot+S-1, and what they were sampled from.

        logits [B, S, V] -> tokens [B, S] int32, q [B, S, V] float32 (None unless the rule is rejection).
        """
        policy = self.policy
        for processor in policy.processors:
            # Processors shape a draft only as far as they can: the tokens between are not known to all
            # drafters. That is exact, since q is what the token was sampled from.
            if isinstance(processor, Processor) and (self.history is not None or not processor.needs_history):
                logits = processor.rows(self.history, logits, None)
        if policy.rule in ("greedy", "sampler-match"):
            return mx.argmax(logits, axis=-1).astype(mx.int32), None
        if self._few(logits.shape[-1]):
            # Of all others the filters leave nothing: they needn't be sorted.
            scores, ids = top_k(logits, policy.sampler.top_k)
            total = mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)
            return self._draw_among(scores - total, ids, slot, logits.shape[-1])
        indices = self._indices(slot, logits.shape)
        logprobs = normalise(logits)
        if policy.rule == "coupled":
            return policy.draw(logprobs, indices), None
        log_q = policy.log_probs(logprobs, indices)
        noise = policy.noise.gumbel("draft", indices, logits.shape[-1])
        return mx.argmax(log_q + noise, axis=-1).astype(mx.int32), mx.exp(log_q)

    def _few(self, vocab: int) -> bool:
        """Whether a draft is drawn among so few of its largest logits that they are found in one pass."""
        sampler = self.policy.sampler
        return 0 < sampler.top_k <= min(FEW, vocab - 1) and sampler.xtc_probability == 0

    def draws(self, lanes: int, slots: int, vocab: int) -> Draws | None:
        """See `Drawing.draws`: greedy, and sampling by temperature alone."""
        policy = self.policy
        if self.greedy:
            return Draws()
        if policy.processors or policy.rule == "sampler-match" or policy.sampler.filters:
            return None
        indices = self._indices(0, (lanes, slots))
        noise = policy.noise.gumbel("token" if policy.rule == "coupled" else "draft", indices, vocab)
        return Draws(noise, policy.sampler.scale, policy.rule == "rejection")

    def draft_among(self, scores: mx.array, ids: mx.array, slot: int, vocab: int) -> tuple[mx.array, mx.array | None]:
        """See `Drawing.draft_among`: processors and XTC's special tokens go by ids, all else by the candidates."""
        policy = self.policy
        if policy.processors or (policy.rule != "sampler-match" and policy.sampler.xtc_special_tokens):
            return self.draft(among(scores, ids, vocab), slot)
        if policy.rule in ("greedy", "sampler-match"):
            best = mx.argmax(scores, axis=-1, keepdims=True)
            return mx.take_along_axis(ids, best, axis=-1)[..., 0].astype(mx.int32), None
        return self._draw_among(normalise(scores), ids, slot, vocab)

    def _draw_among(self, logprobs: mx.array, ids: mx.array, slot: int, vocab: int) -> tuple[mx.array, mx.array | None]:
        policy, indices = self.policy, self._indices(slot, logprobs.shape)
        log_q = policy.log_probs_among(logprobs, indices)
        noise = policy.noise.gumbel("token" if policy.rule == "coupled" else "draft", indices, vocab)
        best = mx.argmax(log_q + mx.take_along_axis(noise, ids, axis=-1), axis=-1, keepdims=True)
        tokens = mx.take_along_axis(ids, best, axis=-1)[..., 0].astype(mx.int32)
        return tokens, None if policy.rule == "coupled" else among(mx.exp(log_q), ids, vocab, 0.0)

    def accept(
        self, tokens: mx.array, q: mx.array | None, logits: mx.array, history: Tokens | None = None
    ) -> tuple[Outcome, mx.array]:
        """What the target keeps of a proposal.

        Args:
            tokens: the proposal, [B, γ] int32.
            q: what its tokens were sampled from, [B, γ, V] float32; None if they were not sampled.
            logits: the target's, [B, γ + 1, V]; rows behind the first rejected token may hold anything.
            history: this call's prompt and generated tokens including the anchor, [N], or [B, N] padded on
                the left with -1; needed with processors only (ValueError).

        Returns:
            The outcome with its faults, and logprobs [B, γ + 1, V] as mlx-lm yields them: after the processors,
            before the filters, in the model's dtype. Rows that a sequential policy didn't reach are NaN.
        """
        policy = self.policy
        history = self.history if history is None else history
        if logits.shape[1] != tokens.shape[1] + 1:
            raise ValueError(
                f"logits must have one row more than the proposal has tokens, got {logits.shape[1]} rows "
                f"for {tokens.shape[1]} tokens"
            )
        if policy.processors and history is None:
            raise ValueError("logits processors need history=: pass the tokens up to the anchor")
        indices, given = self._indices(0, logits.shape), logits
        if not policy.foreign_processors:
            for processor in policy.processors:
                logits = processor.rows(history, logits, tokens)
        if policy.sequential:
            processors = [partial(policy.call, p) for p in policy.processors] if policy.foreign_processors else ()
            outcome, logprobs = foreign.accept_rows(tokens, logits, history, processors, self._draw_row(indices))
            return self._with_faults(outcome, given, outcome.faults), logprobs
        # NaN or +inf in any logit shows in their sum, and so does that none is left.
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs, faults = logits - total, ~mx.isfinite(total[..., 0])
        if policy.rule != "rejection":
            outcome = Outcome(*match_best(tokens, *policy.scores(logprobs, indices)))
            return self._with_faults(outcome, given, faults), logprobs
        p = mx.exp(policy.log_probs(logprobs, indices))
        u = policy.noise.uniform("accept", indices[:, :-1])
        # One draw a round: it is keyed by the round's first index, which no other round has.
        noise = policy.noise.gumbel("residual", indices[:, :1], logits.shape[-1])[:, 0]
        outcome = accept_rejection(tokens, q, p, u, noise)
        return self._with_faults(outcome, given, faults), logprobs

    def _with_faults(self, outcome: Outcome, given: mx.array, faults: mx.array) -> Outcome:
        """The outcome with the faults of its rows: of those that leave no token, and of the logits as `given`."""
        faults = faults.astype(mx.int32) * (PROCESSED if self.policy.processors else TARGETS)
        if self.policy.processors:
            total = mx.logsumexp(given, axis=-1)
            faults = mx.where(mx.isnan(total) | (total == mx.inf), TARGETS, faults)
        return replace(outcome, faults=faults)

    def _draw_row(self, indices):
        policy = self.policy
        if policy.rule == "sampler-match":
            return lambda lane, row, logprobs: policy.call(policy.sampler, logprobs)
        # All lanes' draw of this row: a lane's noise is found by its place in the batch.
        return lambda lane, row, logprobs: policy.draw(
            mx.broadcast_to(logprobs[:, None], (len(indices), 1, logprobs.shape[-1])),
            indices[:, row : row + 1],
        )[lane]

    def _indices(self, slot, shape):
        position = mx.array(self.position).reshape(-1, 1) + slot
        return mx.broadcast_to(position + mx.arange(shape[1]), shape[:2])


def normalise(logits: mx.array) -> mx.array:
    """Log-probabilities in the logits' own dtype, as mlx_lm.generate computes them, [..., V] -> [..., V].

    Greedy is decided on these: rounding makes ties that the logits do not have.
    """
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _reason(foreign_sampler, foreign_processors):
    if foreign_processors:
        return "a logits processor is not specmlx's: rows are processed one by one on accepted text only"
    if foreign_sampler:
        return "the sampler is not specmlx's: tokens are drawn with it one by one and compared with the draft"
    return None


def plain_sampler(sampler: Any) -> Any:
    """The sampler, None where it is mlx_lm's greedy one."""
    from mlx_lm.sample_utils import greedy_sampler

    return None if sampler is greedy_sampler else sampler
