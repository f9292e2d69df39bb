"""A drafter's tokens where each depends on the one before it, without a look at the device between them."""

from specmlx.kernels.dispatch import Dispatched
from specmlx.kernels.draft_head import metal, reference
from specmlx.kernels.draft_head.reference import Candidates, best_path

__all__ = ["Candidates", "best_path", "chain", "path", "top_k", "walk"]

top_k = Dispatched("draft_head", reference, metal, "top_k", metal.top_k_key)
chain = Dispatched("draft_head", reference, metal, "chain", metal.chain_key)
walk = Dispatched("draft_head", reference, metal, "walk", metal.candidates_key)
path = Dispatched("draft_head", reference, metal, "path", metal.candidates_key)
