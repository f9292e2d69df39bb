"""The 256 codes of FP8 E4M3 (finite, no infinities; OCP 8-bit floating point, 2023)."""

import mlx.core as mx


def _value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 0x80 else size


VALUES = mx.array([_value(code) for code in range(256)])


def is_nan(codes: mx.array) -> mx.array:
    """Which of the codes (uint8) are not a number."""
    return (codes & 0x7F) == 0x7F
