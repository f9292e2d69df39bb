"""DFlash: one pass over anchor and masks; row t of the block proposes the token at its own position."""

import mlx.core as mx

from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.context import Context
from specmlx.drafters.proposal import DraftPolicy, Proposal


class DFlash(BlockDrafter):
    """DFlash (arXiv 2602.06036): γ = block - 1; the anchor's row proposes nothing."""

    def _propose(self, context: Context, anchor: mx.array, slots: int, policy: DraftPolicy) -> Proposal:
        return Proposal(*policy.draft(self.widen(self.logits(self.slots_hidden(context, anchor, slots))), 0))
