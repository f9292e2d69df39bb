"""Products with the experts of a mixture: pairs of a row and an expert, in any order."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels.quantized_matmul import gather_quantized_matmul


def gather_by_expert(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    indices: mx.array,
    *,
    sorted_indices: bool = False,
    factory: Callable = mx.fast.metal_kernel,
    **format,
) -> mx.array:
    """As `mx.gather_qmm(x, w, scales, biases, rhs_indices=indices, transpose=True)`: `[*indices.shape, 1, N]`.

    x has a row `[..., 1, K]` for each of `indices` `[..., k]`, or one for every k of them. Each expert in use is read
    once for up to 16 of its rows.
    """
    K, pairs = x.shape[-1], indices.reshape(-1)
    x = x.reshape(-1, K)
    shared = pairs.size // len(x)
    if sorted_indices:
        rows = mx.arange(pairs.size, dtype=mx.uint32) // shared
        y = gather_quantized_matmul(x, w, scales, biases, rows, pairs, kernel=factory, **format)
    else:
        order = mx.argsort(pairs)
        y = gather_quantized_matmul(x, w, scales, biases, order // shared, pairs[order], kernel=factory, **format)
        y = y[mx.argsort(order)]
    return y.reshape(*indices.shape, 1, -1)
