"""Few rows times a packed matrix: every packed word read once for up to 16 rows."""

from specmlx.kernels.quantized_matmul.metal import (
    Ordered,
    gated_quantized_matmul,
    gather_by_expert,
    gather_quantized_matmul,
    order_and_sum_rows,
    order_rows,
    quantized_matmul,
    supported,
)

__all__ = [
    "Ordered",
    "gated_quantized_matmul",
    "gather_by_expert",
    "gather_quantized_matmul",
    "order_and_sum_rows",
    "order_rows",
    "quantized_matmul",
    "supported",
]
