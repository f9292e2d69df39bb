"""Acceptance on the device: how many proposed tokens stand, and the target's own token after them."""

from specmlx.kernels.accept import metal, reference
from specmlx.kernels.accept.reference import match
from specmlx.kernels.dispatch import Dispatched

__all__ = ["match", "match_best", "rejection"]

match_best = Dispatched("accept", reference, metal, "match_best", lambda tokens, scores, *_: metal.key(scores))
rejection = Dispatched("accept", reference, metal, "rejection", lambda tokens, q, p, *_: metal.key(p))
