"""DSpark: DFlash's trunk where the anchor's row proposes too, and a Markov head that chains the tokens."""

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.context import Context
from specmlx.drafters.proposal import DraftPolicy, Proposal
from specmlx.kernels.draft_head import chain


class MarkovHead(nn.Module):
    """The vanilla head: a token's low-rank bias on the logits of the token after it."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def __call__(self, previous: mx.array) -> mx.array:
        """Biases `[..., V]` after the tokens `[...]`."""
        return self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """How likely the target is to accept a slot's token, judged before that token is known."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def __call__(self, hidden: mx.array, markov: mx.array) -> mx.array:
        """Logits `[...]` float32 from slots' rows `[..., hidden]` and w1 of the tokens before them."""
        x = mx.concatenate([hidden, markov.astype(hidden.dtype)], axis=-1) if self.with_markov else hidden
        return self.proj(x).squeeze(-1).astype(mx.float32)


class DSparkTrunk(BlockTrunk):
    """The trunk with DSpark's heads, by DeepSpec's names."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)


class DSpark(BlockDrafter):
    """DSpark (arXiv 2607.05147): row k of the block proposes the token after its position; γ = block."""

    model: DSparkTrunk

    def propose(self, context: Context, anchor: mx.array, width: int, policy: DraftPolicy) -> Proposal:
        """See `Drafter.propose`. Slot k's logits are head(h_k) + w2(w1(the token before it))."""
        self.check_width(width)
        if width == 0:
            return Proposal(mx.zeros((anchor.shape[0], 0), dtype=mx.int32))
        hidden = self.slots_hidden(context, anchor, width)
        base = self.logits(hidden)
        w1, w2 = self.model.markov_head.markov_w1, self.model.markov_head.markov_w2
        # Quantized weights have no rows that could be taken as they are.
        if policy.greedy and type(w1) is nn.Embedding and type(w2) is nn.Linear:
            tokens, _ = chain(base, w1.weight, w2.weight, anchor)
            return self._proposal(hidden, anchor, tokens, None)
        previous, tokens, qs = anchor.astype(mx.int32), [], []
        for slot in range(width):
            logits = base[:, slot : slot + 1] + self.model.markov_head(previous[:, None])
            token, q = policy.draft(logits, slot)
            previous = token[:, 0]
            tokens.append(token)
            qs.append(q)
        q = None if qs[0] is None else mx.concatenate(qs, axis=1)
        return self._proposal(hidden, anchor, mx.concatenate(tokens, axis=1), q)

    def _proposal(self, hidden: mx.array, anchor: mx.array, tokens: mx.array, q: mx.array | None) -> Proposal:
        previous = mx.concatenate([anchor[:, None].astype(mx.int32), tokens[:, :-1]], axis=1)
        return Proposal(tokens, q, self._confidence(hidden, previous))

    def _confidence(self, hidden: mx.array, previous: mx.array) -> mx.array | None:
        if not self.config.enable_confidence_head:
            return None
        return mx.sigmoid(self.model.confidence_head(hidden, self.model.markov_head.markov_w1(previous)))
