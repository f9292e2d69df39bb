"""DFlash: one pass over anchor and masks; row t of the block proposes the token at its own position."""

import mlx.core as mx

from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.context import Context
from specmlx.drafters.proposal import DraftPolicy, Proposal


class DFlash(BlockDrafter):
    """DFlash (arXiv 2602.06036): γ = block - 1; the anchor's row proposes nothing."""

    def propose(self, context: Context, anchor: mx.array, width: int, policy: DraftPolicy) -> Proposal:
        """See `Drafter.propose`. The whole block runs: its rows see one another. `width` cuts the rest."""
        self.check_width(width)
        if width == 0:
            return Proposal(mx.zeros((anchor.shape[0], 0), dtype=mx.int32))
        tokens, q = policy.draft(self.widen(self.logits(self.slots_hidden(context, anchor, width))), 0)
        return Proposal(tokens, q)
