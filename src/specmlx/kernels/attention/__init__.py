"""Attention of a pass's rows over a key-value buffer: each key and value read once for all of them."""

from specmlx.kernels.attention import metal, reference
from specmlx.kernels.attention.reference import Span, Stored
from specmlx.kernels.dispatch import Dispatched

__all__ = ["Span", "Stored", "attention"]

attention = Dispatched("attention", reference, metal, "attention", metal.key)
