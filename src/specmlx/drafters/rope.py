"""Rotary positions of a block drafter: whole head, NeoX halves or interleaved pairs, any position for any row."""

import math
from typing import Any

import mlx.core as mx

ROPE_TYPES = ("default", "linear", "yarn", "mrope", "proportional")  # mrope, on text, is the default rope


def rope_type(scaling: dict[str, Any]) -> str:
    """The kind of rope that a rope_parameters or rope_scaling dictionary names."""
    return scaling.get("rope_type") or scaling.get("type") or "default"


class Rotary:
    """Turns rows to absolute positions; YaRN's ramp and factor are transformers' (arXiv 2309.00071).

    `factor` is what YaRN multiplies cos and sin by, else 1: the caller applies it.
    """

    def __init__(
        self,
        dims: int,
        theta: float,
        scaling: dict[str, Any],
        max_positions: int | None = None,
        interleaved: bool = False,
    ):
        self.dims = dims
        self.interleaved = interleaved
        self.factor = 1.0
        # The form that mx.fast.rope takes: a row at position p is turned by p / period.
        periods = [theta ** (i / dims) for i in range(0, dims, 2)]
        if rope_type(scaling) == "linear":
            periods = [scaling["factor"] * period for period in periods]
        elif rope_type(scaling) == "proportional":
            # Gemma 4: the first pairs of the whole head turn, the others never.
            turned = int(scaling.get("partial_rotary_factor", 1.0) * dims // 2)
            stretch = scaling.get("factor", 1.0)
            periods = [stretch * period if i < turned else math.inf for i, period in enumerate(periods)]
        elif rope_type(scaling) == "yarn":
            original = scaling.get("original_max_position_embeddings") or max_positions
            ramp = _yarn_ramp(dims, theta, scaling, original)
            stretch = scaling["factor"]
            periods = [1 / ((1 - r) / p + r / (stretch * p)) for r, p in zip(ramp, periods, strict=True)]
            self.factor = _yarn_factor(scaling)
        self._periods = mx.array(periods, dtype=mx.float32)

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


def _yarn_ramp(dims: int, theta: float, scaling: dict[str, Any], original: int) -> list[float]:
    # How far each frequency is interpolated: 0 for the fast ones, 1 for the slow ones.
    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    return [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dims // 2)]


def _yarn_factor(scaling: dict[str, Any]) -> float:
    if (factor := scaling.get("attention_factor")) is not None:
        return factor

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale()
