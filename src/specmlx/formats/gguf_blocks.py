"""GGUF's block formats in mlx's layouts, where one holds the same values exactly.

| GGUF | values of a block | mlx |
|---|---|---|
| Q4_0, Q5_0 | d (q - 8), d (q - 16) | affine, 4 or 5 bits, groups of 32: scale d, bias -8 d or -16 d |
| Q4_1, Q5_1 | d q + m | affine, 4 or 5 bits, groups of 32: scale d, bias m |
| Q8_0 | d q, q from -128 to 127 | affine, 8 bits, groups of 32: scale d, bias -128 d |
| Q4_K, Q5_K | d s q - e m, s and m of 6 bits for 32 values | affine, 4 or 5 bits, groups of 32: scale d s, bias -e m |
| Q6_K | d s (q - 32), s of 8 bits for 16 values | none: groups have at least 32 values. Dense |
| F32, F16, BF16 | | dense |

Scales and biases are exact in float32 (those of Q4_0 to Q8_0 in float16 too); in bfloat16 they are rounded. All other
types (Q2_K, Q3_K, IQ..., MXFP4, TQ...) are refused by name. mx.load reads Q4_0, Q4_1 and Q8_0 the same way, but makes
float16 of Q4_K and Q6_K and fails on files with a Q5_0, Q5_1 or Q5_K: so all are read here. Source: ggml-common.h and
gguf-py's quants.
"""

import mlx.core as mx
import numpy as np

# Bits of the packed layout; dense types have none.
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
DENSE = (*_FLOATS, "Q6_K")
GROUP = 32
# Blocks that are unpacked at a time: bounds the memory beside the result.
_AT_ONCE = 1 << 16


def to_mlx(kind: str, blocks: np.ndarray, shape: tuple[int, ...]) -> dict[str, mx.array]:
    """A tensor of blocks `[n, bytes]` as mlx's parameters: weight, and scales and biases float32 where it is packed.

    Raises ValueError for a type that no layout of mlx's holds, and for scales that are not finite.
    """
    if kind in _FLOATS:
        x = mx.array(blocks.view(_FLOATS[kind]))
        return {"weight": (x.view(mx.bfloat16) if kind == "BF16" else x).reshape(shape)}
    groups = [blocks[i : i + _AT_ONCE] for i in range(0, len(blocks), _AT_ONCE)]
    if kind == "Q6_K":
        return {"weight": mx.concatenate([mx.array(_q6_k(group)) for group in groups]).reshape(shape)}
    if kind not in BITS:
        raise ValueError(f"{kind} has no exact layout in mlx: use a file of {', '.join(BITS)}, Q6_K or floats")
    unpacked = _k_quant if kind.endswith("_K") else _simple
    parts = []
    for group in groups:
        q, scales, biases = unpacked(kind, group)
        parts.append([mx.array(x) for x in (_packed(q, BITS[kind]), scales, biases)])
    arrays = [mx.concatenate(part).reshape(*shape[:-1], -1) for part in zip(*parts, strict=True)]
    return dict(zip(("weight", "scales", "biases"), arrays, strict=True))


def _packed(q: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[n, 32]` as a stream of bits, the lowest first, in words uint32."""
    if bits == 8:
        return q.view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(q[:, ::2] | q[:, 1::2] << 4).view(np.uint32)
    stream = np.unpackbits(q[..., None], axis=-1, bitorder="little")[..., :bits].reshape(len(q), -1)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    scales = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)
    if not np.isfinite(scales).all():
        raise ValueError("a scale of its blocks is not finite, so the file is corrupt")
    return scales


def _simple(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    d = _half(blocks, 0)
    if kind == "Q8_0":
        return np.ascontiguousarray(blocks[:, 2:]) ^ 0x80, d, -128 * d
    at = 4 if kind.endswith("_1") else 2
    biases = _half(blocks, 2) if kind.endswith("_1") else -(1 << BITS[kind] - 1) * d
    nibbles = blocks[:, -16:]
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    if BITS[kind] == 5:
        q = q | np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") << 4
    return q, d, biases


def _k_quant(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q4_K and Q5_K: d, e, 12 bytes of scales and minima, a fifth bit for each value, nibbles; 8 groups of 32."""
    d, e, packed = _half(blocks, 0), _half(blocks, 2), blocks[:, 4:16]
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    s = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    m = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    nibbles = blocks[:, -128:].reshape(-1, 4, 1, 32)
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, 8, 32)
    if kind == "Q5_K":
        fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
        q = q | fifth << 4
    return q.reshape(-1, 32), (d * s).reshape(-1, 1), -(e * m).reshape(-1, 1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Low nibbles, two high bits, 16 scales int8, d: values float32 `[n, 256]`."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low.reshape(-1, 16, 16) | high.reshape(-1, 16, 16) << 4).astype(np.float32) - 32
    s = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * s)[..., None].reshape(-1, 16, 1) * q
