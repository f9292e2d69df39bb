"""Storage order of dense weights."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map


def column_major(module: nn.Module) -> None:
    """Store float32 matrices `[N, K]` with K as the slow axis, in place; shapes and results stay the same, bit for bit.

    The BLAS that mlx's Linux wheel bundles multiplies x `[M, K]` with such a W almost twice as fast, whatever M is.
    """

    def stored(x: mx.array) -> mx.array:
        return mx.contiguous(x.T).T if x.ndim == 2 and x.dtype == mx.float32 else x

    module.update(tree_map(stored, module.parameters()))
