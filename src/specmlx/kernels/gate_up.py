"""silu(x gateᵀ) * (x upᵀ), what the first half of an MLP is, by the forms of the packed product."""

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from specmlx.kernels.choice.operator import STOCK
from specmlx.kernels.quantized_matmul import Ordered, gated_quantized_matmul, quantized_matmul

# A packed matrix: words, scales, biases (or None), and the scale of the tensor (or None).
Matrix = tuple[mx.array, mx.array, mx.array | None, mx.array | None]


def gate_up(
    x: mx.array, gate: Matrix, up: Matrix, variant: str, factory: Callable = mx.fast.metal_kernel, **format
) -> mx.array:
    """`[..., N]` of x `[..., K]`: forms "A" and "AX" in one launch, the others in three; `format` as mlx names it."""
    if variant in ("A", "AX"):
        return gated_quantized_matmul(x, gate, up, variant=variant, kernel=factory, **format)
    ordered = Ordered()

    def product(matrix: Matrix) -> mx.array:
        *packed, tensor_scale = matrix
        if variant == STOCK:
            return mx.quantized_matmul(x, *packed, transpose=True, **format)
        options = dict(tensor_scale=tensor_scale, variant=variant, kernel=factory, ordered=ordered)
        return quantized_matmul(x, *packed, **options, **format)

    return swiglu(product(gate), product(up))
