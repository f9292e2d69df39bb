"""Few rows times a packed matrix: every packed word read once for up to 16 rows."""

from specmlx.kernels.quantized_matmul.metal import (
    gated_quantized_matmul,
    gather_by_expert,
    gather_quantized_matmul,
    quantized_matmul,
    supported,
)
from specmlx.kernels.quantized_matmul.reference import Matrix

__all__ = [
    "Matrix",
    "gated_quantized_matmul",
    "gather_by_expert",
    "gather_quantized_matmul",
    "quantized_matmul",
    "supported",
]
