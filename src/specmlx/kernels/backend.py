"""Where arrays are computed, as far as an operator's choice depends on it."""

import os
from collections.abc import Callable

import mlx.core as mx

OFF = "SPECMLX_KERNELS"  # 0 in the environment: no kernel of ours is used


def on_metal() -> bool:
    """Whether mlx runs on a Metal device."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def metal_factory() -> Callable | None:
    """What makes a Metal kernel of its source, or None: not on a Metal device, or kernels are switched off."""
    return mx.fast.metal_kernel if on_metal() and os.environ.get(OFF) != "0" else None
