"""DSpark: DFlash's trunk where the anchor's row proposes too, and a Markov head that chains the tokens."""

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.block import BlockTrunk, Layer
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import GEMMA4, DrafterConfig
from specmlx.drafters.context import Context
from specmlx.drafters.gemma4 import Gemma4Layer
from specmlx.drafters.markov import ConfidenceHead, MarkovHead
from specmlx.drafters.proposal import DraftPolicy, Drawing, Draws, Proposal, among, draft_among
from specmlx.drafters.vocabulary import dense_rows, take_rows
from specmlx.kernels.draft_head import chain, top_k, walk


class DSparkTrunk(BlockTrunk):
    """The trunk with DSpark's heads, by DeepSpec's names."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config, Gemma4Layer if config.family == GEMMA4 else Layer)
        self.markov_head = MarkovHead(config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)


class DSpark(BlockDrafter):
    """DSpark (arXiv 2607.05147): row k of the block proposes the token after its position; γ = block."""

    model: DSparkTrunk
    markov_top_k: int | None = None
    """Of how many of a slot's best tokens the Markov head's bias is computed; the others are not drafted."""

    def keep_rows(self, rows: mx.array) -> None:
        """Keep these rows of the head, and of the Markov head, which is added to it."""
        self.model.markov_head.markov_w2 = take_rows(self.model.markov_head.markov_w2, rows)

    def propose(self, context: Context, anchor: mx.array, width: int, policy: DraftPolicy) -> Proposal:
        """See `Drafter.propose`. Slot k's logits are head(h_k) plus the Markov head's bias of the token before it."""
        self.check_width(width)
        if width == 0:
            return Proposal(mx.zeros((anchor.shape[0], 0), dtype=mx.int32))
        hidden = self.slots_hidden(context, anchor, width)
        base, head = self.logits(hidden), self.model.markov_head
        draws = policy.draws(len(anchor), width, self.vocab_size) if isinstance(policy, Drawing) else None
        if draws is not None and self._rows_as_they_are():
            if self.markov_top_k is None:
                return self._chained(hidden, base, anchor, draws)
            if self.vocabulary is None:
                return self._walked(hidden, base, anchor, draws)
        if self.markov_top_k is not None:
            return self._among_candidates(hidden, base, anchor, policy)
        state, previous, tokens, qs = None, anchor.astype(mx.int32)[:, None], [], []
        for slot in range(width):
            at = slice(slot, slot + 1)
            state, latent = head.step(state, previous, hidden[:, at])
            previous, q = policy.draft(self.widen(base[:, at] + head.markov_w2(latent)), slot)
            tokens.append(previous)
            qs.append(q)
        q = None if qs[0] is None else mx.concatenate(qs, axis=1)
        return self._proposal(hidden, anchor, mx.concatenate(tokens, axis=1), q)

    def _rows_as_they_are(self) -> bool:
        """Whether W1's and W2's rows are a token's latent and bias: neither gated nor quantized."""
        head = self.model.markov_head
        dense = type(head.markov_w1) is nn.Embedding and type(head.markov_w2) is nn.Linear
        return dense and head.kind == "vanilla"

    def _chained(self, hidden: mx.array, base: mx.array, anchor: mx.array, draws: Draws) -> Proposal:
        """All slots by one operator."""
        head, ids = self.model.markov_head, None if self.vocabulary is None else self.vocabulary.ids
        noise = draws.noise if ids is None else draws.at(ids)
        w1, w2 = head.markov_w1.weight, head.markov_w2.weight
        tokens, biased = chain(base, w1, w2, anchor, noise, draws.scale, ids, keep_logits=draws.sampled)
        return self._proposal(hidden, anchor, tokens, draws.q(self.widen(biased)) if draws.sampled else None)

    def _walked(self, hidden: mx.array, base: mx.array, anchor: mx.array, draws: Draws) -> Proposal:
        """All slots by one operator, each among its best tokens before the bias."""
        head, (unary, ids) = self.model.markov_head, top_k(base, self.markov_top_k)
        w1, w2 = head.markov_w1.weight, head.markov_w2.weight
        tokens, scores = walk(unary, ids, w1, w2, anchor, None, draws.at(ids), draws.scale)
        q = draws.q(among(scores, ids, self.vocab_size)) if draws.sampled else None
        return self._proposal(hidden, anchor, tokens, q)

    def _among_candidates(self, hidden: mx.array, base: mx.array, anchor: mx.array, policy: DraftPolicy) -> Proposal:
        """The same with the rows of W2 gathered that belong to each slot's best tokens before the bias."""
        head, vocabulary = self.model.markov_head, self.vocabulary
        unary, rows = top_k(base, self.markov_top_k)
        ids = rows if vocabulary is None else vocabulary.ids[rows]
        state, previous, tokens, qs = None, anchor.astype(mx.int32)[:, None], [], []
        for slot in range(base.shape[1]):
            at = slice(slot, slot + 1)
            state, latent = head.step(state, previous, hidden[:, at])
            w2 = dense_rows(head.markov_w2, rows[:, at]).astype(mx.float32)
            scores = unary[:, at] + (w2 @ latent.astype(mx.float32)[..., None])[..., 0]
            previous, q = draft_among(policy, scores, ids[:, at], slot, self.vocab_size)
            tokens.append(previous)
            qs.append(q)
        q = None if qs[0] is None else mx.concatenate(qs, axis=1)
        return self._proposal(hidden, anchor, mx.concatenate(tokens, axis=1), q)

    def _proposal(self, hidden: mx.array, anchor: mx.array, tokens: mx.array, q: mx.array | None) -> Proposal:
        previous = mx.concatenate([anchor[:, None].astype(mx.int32), tokens[:, :-1]], axis=1)
        return Proposal(tokens, q, self._confidence(hidden, previous))

    def _confidence(self, hidden: mx.array, previous: mx.array) -> mx.array | None:
        if not self.config.enable_confidence_head:
            return None
        logits = self.model.confidence_head(hidden, self.model.markov_head.markov_w1(previous))
        if temperatures := self.config.confidence_temperatures:
            logits = logits / mx.array(temperatures[: logits.shape[1]])
        return mx.sigmoid(logits)
