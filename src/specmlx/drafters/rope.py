"""Rotary positions of a block drafter: NeoX halves or interleaved pairs, any position for any row."""

from typing import Any

import mlx.core as mx

from specmlx.formats.rope import attention_factor, periods


class Rotary:
    """Turns rows to absolute positions.

    `factor` is what YaRN multiplies cos and sin by, else 1: the caller applies it.
    """

    def __init__(self, dims: int, rope: dict[str, Any], interleaved: bool = False):
        self.dims = dims
        self.interleaved = interleaved
        self.factor = attention_factor(rope)
        self._periods = periods(rope, dims)

    def __call__(self, x: mx.array, positions: mx.array) -> mx.array:
        """x `[B, T, H, D]` turned to `positions` `[B, T]` int32."""
        B, T, H, D = x.shape
        # Every row is a sequence of its own, so that it has an offset of its own; nothing is copied for that.
        rows = mx.fast.rope(
            x.reshape(B * T, H, 1, D),
            self.dims,
            traditional=self.interleaved,
            base=None,
            scale=1.0,
            offset=positions.reshape(-1),
            freqs=self._periods,
        )
        return rows.reshape(B, T, H, D)
