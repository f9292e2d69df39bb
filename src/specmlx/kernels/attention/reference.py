"""Attention of a pass's rows over a key-value buffer, as the formula reads; keys and values as they are stored."""

from typing import NamedTuple

import mlx.core as mx


class Stored(NamedTuple):
    """Keys or values `[B, Hkv, capacity, D]` as a cache stores them.

    bits 0: `data` itself. bits 8 and no biases: int8 `data` times `scales` `[B, Hkv, capacity, 1]`.
    With biases: mlx's affine format, `data` packed uint32, scales and biases `[B, Hkv, capacity, D / group]`.
    """

    data: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0

    @property
    def dims(self) -> int:
        """The head's size D."""
        return self.data.shape[-1] * 32 // self.bits if self.biases is not None else self.data.shape[-1]

    @property
    def group_size(self) -> int:
        """Elements that share a scale; the whole head where nothing is quantized."""
        return self.dims // self.scales.shape[-1] if self.scales is not None else self.dims

    def first(self, length: int) -> "Stored":
        """The buffer's first `length` rows."""
        if self.scales is None:
            return Stored(self.data[:, :, :length])
        return Stored(*(None if x is None else x[:, :, :length] for x in self[:3]), self.bits)


def dequantized(x: Stored) -> mx.array:
    """What is stored, `[B, Hkv, capacity, D]` float32."""
    if x.biases is not None:
        scales, biases = x.scales.astype(mx.float32), x.biases.astype(mx.float32)
        return mx.dequantize(x.data, scales, biases, group_size=x.group_size, bits=x.bits)
    data = x.data.astype(mx.float32)
    return data if x.scales is None else data * x.scales.astype(mx.float32)


def seen(start: mx.array, T: int, length: int, window: int | None = None, first: int = 0) -> mx.array:
    """Which of `length` keys the rows start..start + T - 1 see, `[B, T, length]` bool: theirs and older ones.

    `start` `[B]` int32; with a window, the row at position p sees key c iff p - c < window. Keys before `first` are
    seen by none but themselves.
    """
    positions = (start[:, None] + mx.arange(T))[..., None]
    keys = mx.arange(length)
    mask = (keys <= positions) & ((keys >= first) | (keys == positions))
    return mask if window is None else mask & (positions - keys < window)


def attention(
    q: mx.array,
    keys: Stored,
    values: Stored,
    start: mx.array,
    scale: float,
    window: int | None = None,
    first: int = 0,
) -> mx.array:
    """softmax(scale q kᵀ) v of rows `[B, Hq, T, D]` at positions start..start + T - 1, in float32: `[B, Hq, T, D]`.

    `keys` and `values` hold the rows' own too. Rows behind the last one may hold anything.
    """
    B, Hq, T, D = q.shape
    k, v = dequantized(keys), dequantized(values)
    Hkv, length = k.shape[1:3]
    mask = seen(start, T, length, window, first)
    v = mx.where(mask.any(axis=1)[:, None, :, None], v, 0)
    rows = q.astype(mx.float32).reshape(B, Hkv, Hq // Hkv, T, D)
    scores = scale * (rows @ k[:, :, None].swapaxes(-1, -2))
    weights = mx.softmax(mx.where(mask[:, None, None], scores, -mx.inf), axis=-1, precise=True)
    return (weights @ v[:, :, None]).reshape(B, Hq, T, D)
