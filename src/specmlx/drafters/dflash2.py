"""DFlash 2: DFlash's block with convolutions in its layers, and a selector that joins the slots to a path."""

import mlx.core as mx

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.context import Context
from specmlx.drafters.convolution import ConvLayer
from specmlx.drafters.proposal import DraftPolicy, Drawing, Proposal, among, draft_among
from specmlx.drafters.selector import CandidateSelector


class DFlash2Trunk(BlockTrunk):
    """The trunk with DFlash 2's convolutions and selector, by the publishers' names."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config, ConvLayer)
        self.candidate_selector = CandidateSelector(config)


class DFlash2(BlockDrafter):
    """DFlash 2 (Inco AI): γ = block - 1; a slot's token is one of its best candidates, given the token before it."""

    model: DFlash2Trunk

    def propose(self, context: Context, anchor: mx.array, width: int, policy: DraftPolicy) -> Proposal:
        """See `Drafter.propose`. Greedy lanes take the path that is expected to keep most tokens; others walk.

        A walk draws a slot from the candidates' scores after the token drawn before, which is its q: every other id
        has the logit -inf.
        """
        self.check_width(width)
        if width == 0:
            return Proposal(mx.zeros((anchor.shape[0], 0), dtype=mx.int32))
        selector = self.model.candidate_selector
        hidden = self.slots_hidden(context, anchor, width)
        logits = self.logits(hidden)
        unary, ids = selector.candidates(logits)
        ids = ids if self.vocabulary is None else self.vocabulary.ids[ids]
        if policy.greedy:
            return Proposal(selector.path(hidden, unary, ids, anchor))
        draws = policy.draws(len(anchor), width, self.vocab_size) if isinstance(policy, Drawing) else None
        if draws is not None:
            tokens, scores = selector.walk(hidden, unary, ids, anchor, draws.at(ids), draws.scale)
            return Proposal(tokens, draws.q(among(scores, ids, self.vocab_size)) if draws.sampled else None)
        previous, tokens, qs = anchor.astype(mx.int32)[:, None], [], []
        for slot in range(width):
            at = slice(slot, slot + 1)
            scores = selector.scores(hidden[:, at], unary[:, at], ids[:, at], previous[..., None])[..., 0, :]
            previous, q = draft_among(policy, scores, ids[:, at], slot, self.vocab_size)
            tokens.append(previous)
            qs.append(q)
        return Proposal(mx.concatenate(tokens, axis=1), None if qs[0] is None else mx.concatenate(qs, axis=1))
