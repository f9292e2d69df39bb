"""The gated delta rule: steps and fold (bit-equal to each other), and the block-parallel form for prefill."""

from specmlx.kernels.gated_delta.chunk import GRID, delta_rule
from specmlx.kernels.gated_delta.reference import Tape, fold, steps

__all__ = ["GRID", "Tape", "delta_rule", "fold", "steps"]
