"""Where arrays are computed, as far as an operator's choice depends on it."""

from collections.abc import Callable

import mlx.core as mx


def metal_factory() -> Callable | None:
    """What makes a Metal kernel of its source, or None where mlx does not run on a Metal device."""
    on_metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    return mx.fast.metal_kernel if on_metal else None
