"""Keys and values in 8 bits and fewer: each row is quantized as it is written, on its own."""

from dataclasses import dataclass

import mlx.core as mx

from specmlx.cache.kv import KV, QuantizedKV, reserve, write
from specmlx.formats.values import check
from specmlx.kernels.attention import Stored

INT8 = "int8"
_GROUPS = (32, 64, 128)
_BLOCK = 256


@dataclass(frozen=True)
class KVFormat:
    """How an attention layer keeps its rows once it has `start` of them: all that it has then, and those to come.

    bits and group_size: mlx's affine format, groups along the head. group_size None: int8 with one float32 scale per
    row and head.
    """

    bits: int
    group_size: int | None
    start: int = 0

    @classmethod
    def read(cls, kv_bits: int | str | None, kv_group_size: int = 64, quantized_kv_start: int = 0) -> "KVFormat | None":
        """The format that mlx_lm's options ask for, or "int8" for `kv_bits`; None without `kv_bits`.

        Raises ValueError for values that no format has.
        """
        bits, group = check("kv_bits", kv_bits), check("kv_group_size", kv_group_size)
        start = check("quantized_kv_start", quantized_kv_start)
        if bits is None:
            return None
        return cls(8, None, start) if bits == INT8 else cls(bits, group, start)

    @property
    def name(self) -> str:
        """What tells states in this format from others'."""
        how = INT8 if self.group_size is None else f"{self.bits} bits in groups of {self.group_size}"
        return f"{how} from token {self.start} on"

    def check(self, head_dim: int) -> None:
        """Raises ValueError where groups don't fit a head of this size."""
        group = self.group_size or _GROUPS[0]
        if head_dim % group:
            raise ValueError(f"kv_group_size is {group}: it must divide the heads' size, {head_dim}")

    def quantized(self, x: mx.array) -> tuple[mx.array, ...]:
        """Rows `[B, H, T, D]` as (codes, scales, biases), or as int8 codes and float32 scales `[B, H, T, 1]`."""
        if self.group_size is not None:
            return tuple(mx.quantize(x, group_size=self.group_size, bits=self.bits))
        x = x.astype(mx.float32)
        scale = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True) / 127, 1e-30)
        return mx.round(x / scale).astype(mx.int8), scale

    def converted(self, kv: KV) -> QuantizedKV:
        """Buffers in this format, whichever they are in."""
        return kv if isinstance(kv, QuantizedKV) else QuantizedKV(self.quantized(kv.keys), self.quantized(kv.values))

    def written(
        self, kv: KV | None, keys: mx.array, values: mx.array, start: int | mx.array, max_length: int, capacity: int = 0
    ) -> QuantizedKV:
        """The buffers with rows `[B, H, T, D]` written at `start`, with room as of `state.kv.reserve`."""
        rows, kv = self.converted(KV(keys, values)), None if kv is None else self.converted(kv)
        return write(reserve(kv, max_length, rows, capacity=capacity), rows, start)

    def stored(self, kv: QuantizedKV) -> tuple[Stored, Stored]:
        """Keys and values as the attention kernels take them."""
        parts = ((*x, None)[:3] for x in kv)
        return tuple(Stored(*x, self.bits) for x in parts)

    def attend(self, q: mx.array, kv: QuantizedKV, length: int, scale: float, mask: mx.array | str | None) -> mx.array:
        """softmax(scale q kᵀ) v of rows `[B, Hq, T, D]` over the first `length` rows, by mlx_lm's operations.

        A long prefill step goes by blocks of rows, since all scores `[B, Hq, T, length]` of a block are in memory.
        """
        from mlx_lm.models.base import quantized_scaled_dot_product_attention

        keys, values = (tuple(part[:, :, :length] for part in parts) for parts in kv)
        D, T, dtype, group = q.shape[-1], q.shape[2], q.dtype, self.group_size
        if group is None:
            group = next(size for size in reversed(_GROUPS) if D % size == 0)
            q, keys, values = q.astype(mx.float32), _affine(*keys, D // group), _affine(*values, D // group)
        out = []
        for first in range(0, T, _BLOCK):
            last = min(first + _BLOCK, T)
            # "causal" is meant from the end: the block's last row sees what is before it and itself.
            seen = length - T + last if isinstance(mask, str) else length
            block = mask[..., first:last, :] if isinstance(mask, mx.array) else mask
            k, v = (tuple(part[:, :, :seen] for part in parts) for parts in (keys, values))
            out.append(
                quantized_scaled_dot_product_attention(q[:, :, first:last], k, v, scale, block, group, self.bits)
            )
        return (out[0] if len(out) == 1 else mx.concatenate(out, axis=2)).astype(dtype)


def _affine(codes: mx.array, scales: mx.array, groups: int) -> tuple[mx.array, mx.array, mx.array]:
    """int8 codes with a scale a row in mlx's own 8 bits: s c = s (c + 128) - 128 s, the scale being every group's."""
    scales = mx.repeat(scales, groups, axis=-1)
    return (codes.view(mx.uint8) ^ 128).view(mx.uint32), scales, -128 * scales
