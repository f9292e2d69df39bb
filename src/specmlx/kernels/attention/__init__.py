"""Attention of a pass's rows over a key-value buffer: each key and value read once for all of them."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels import dispatch
from specmlx.kernels.attention import metal, reference
from specmlx.kernels.attention.reference import Stored

__all__ = ["Stored", "attention", "runs"]


def runs(q: mx.array, keys: Stored, values: Stored) -> bool:
    """Whether there is Metal, with a kernel for these rows and this buffer."""
    return _factory(q, keys, values) is not None


def attention(
    q: mx.array,
    keys: Stored,
    values: Stored,
    start: int | mx.array,
    length: int,
    scale: float,
    mask: mx.array | str | None,
    window: int | None = None,
    first: int = 0,
) -> mx.array:
    """Rows `[B, Hq, T, D]` at positions start..start + T - 1 over a buffer that holds them too: `[B, Hq, T, D]`.

    start: an int, or int32 `[B]` on the device; the row at position p sees the keys c <= p, and with a window those
    with p - c < window; keys before `first` are seen by none but themselves. length: how much of the buffer any row
    sees. mask: the same rule as stock mlx takes it, which runs where no kernel does, and for more than 17 rows; where
    keys are quantized the reference runs instead.
    """
    if factory := _factory(q, keys, values):
        start = mx.full((q.shape[0],), start, dtype=mx.int32) if isinstance(start, int) else start
        return metal.attention(q, keys, values, start, length, scale, window, first, factory=factory)
    keys, values = keys.first(length), values.first(length)
    if keys.bits or values.bits:
        start = mx.array(start, dtype=mx.int32).reshape(-1)
        return reference.attention(q, keys, values, start, scale, window, first).astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(q, keys.data, values.data, scale=scale, mask=mask)


def _factory(q: mx.array, keys: Stored, values: Stored) -> Callable | None:
    if not metal.supports(q, keys, values):
        return None
    kv = "plain" if not keys.bits else "int8" if keys.biases is None else f"affine{keys.bits}"
    return dispatch.kernel("attention", q.dtype, Hq=q.shape[1], Hkv=keys.data.shape[1], D=q.shape[-1], kv=kv)
