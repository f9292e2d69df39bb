"""Storage order of dense weights."""

import mlx.core as mx
import mlx.nn as nn


def column_major(module: nn.Module) -> None:
    """Store float32 matrices `[N, K]` with K as the slow axis, in place; shapes and results stay the same, bit for bit.

    The BLAS that mlx's Linux wheel bundles multiplies x `[M, K]` with such a W almost twice as fast, whatever M is.
    Quantized layers keep their order.
    """
    for _, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)) and layer.weight.dtype == mx.float32:
            layer.weight = mx.contiguous(layer.weight.T).T
