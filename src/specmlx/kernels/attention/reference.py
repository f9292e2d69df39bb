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


class Span(NamedTuple):
    """Which of a buffer's first `length` keys the rows at positions start..start + T - 1 see: theirs and older ones.

    start: an int, or int32 `[B]` on the device. Keys before `first` are seen by none but themselves. With a window, the
    row at position p sees key c iff p - c < window.
    """

    start: int | mx.array
    length: int
    first: int = 0
    window: int | None = None

    def mask(self, T: int) -> mx.array:
        """The keys that T rows see, `[B, T, length]` bool, or `[1, T, length]` for an int."""
        positions = (mx.array(self.start).reshape(-1, 1) + mx.arange(T))[..., None]
        keys = mx.arange(self.length)
        mask = (keys <= positions) & ((keys >= self.first) | (keys == positions))
        return mask if self.window is None else mask & (positions - keys < self.window)


def by_formula(q: mx.array, keys: Stored, values: Stored, span: Span, scale: float) -> mx.array:
    """softmax(scale q kᵀ) v of rows `[B, Hq, T, D]`, in float32: `[B, Hq, T, D]`.

    `keys` and `values` hold the rows' own too. Rows behind the last one may hold anything.
    """
    B, Hq, T, D = q.shape
    k, v = dequantized(keys.first(span.length)), dequantized(values.first(span.length))
    mask, Hkv = span.mask(T), k.shape[1]
    v = mx.where(mask.any(axis=1)[:, None, :, None], v, 0)
    rows = q.astype(mx.float32).reshape(B, Hkv, Hq // Hkv, T, D)
    scores = scale * (rows @ k[:, :, None].swapaxes(-1, -2))
    weights = mx.softmax(mx.where(mask[:, None, None], scores, -mx.inf), axis=-1, precise=True)
    return (weights @ v[:, :, None]).reshape(B, Hq, T, D)


def attention(
    q: mx.array, keys: Stored, values: Stored, span: Span, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Rows `[B, Hq, T, D]` over a buffer that holds them too, as mlx runs them: `[B, Hq, T, D]` in q's dtype.

    mask: the span as stock mlx takes it. Where keys are quantized the formula runs instead.
    """
    if keys.bits or values.bits:
        return by_formula(q, keys, values, span, scale).astype(q.dtype)
    keys, values = keys.first(span.length), values.first(span.length)
    return mx.fast.scaled_dot_product_attention(q, keys.data, values.data, scale=scale, mask=mask)
