"""Launch of the attention kernels: chunks of keys, then their merge in order."""

from collections.abc import Callable
from math import e, log2

import mlx.core as mx

from specmlx.kernels.attention.reference import Span, Stored
from specmlx.kernels.source import Source
from specmlx.kernels.tuning import Chunks, tuning

_CHUNKS = Source(
    "attention_chunks",
    "q keys key_scales key_biases values value_scales value_biases start scale",
    "partial stats",
    "attention/kernel",
    "attention/unseen attention/load",
)
_MERGE = Source("attention_merge", "partial stats", "out", "attention/merge", "attention/unseen")
MAX_ROWS = 17
# More rows than this times 17 would not fit in threadgroup memory; a wider group is run in equal parts.
_HEADS = 8


def key(q: mx.array, keys: Stored, values: Stored, *_) -> dict | None:
    """The key of the kernels for these rows and this buffer; None where they don't take them."""
    _, Hq, T, D = q.shape
    same = keys.dims == values.dims == D and keys.bits == values.bits and keys.group_size == values.group_size
    taken = same and 64 <= D <= 256 and D % 32 == 0 and 1 <= T <= MAX_ROWS
    if not taken or not (keys.bits in (4, 8) or keys.data.dtype == q.dtype):
        return None
    kv = "plain" if not keys.bits else "int8" if keys.biases is None else f"affine{keys.bits}"
    return {"dtype": q.dtype, "Hq": Hq, "Hkv": keys.data.shape[1], "D": D, "kv": kv}


def attention(
    q: mx.array,
    keys: Stored,
    values: Stored,
    span: Span,
    scale: float,
    mask: mx.array | str | None = None,
    chunks: Chunks | None = None,
    *,
    factory: Callable,
) -> mx.array:
    """As `reference.by_formula`, in q's dtype, for up to 17 rows; the mask is not needed.

    chunks: how keys are split, by default as the chip's family has it.
    """
    chunks = chunks or tuning().chunks
    B, Hq, T, D = q.shape
    Hkv = keys.data.shape[1]
    group = Hq // Hkv
    G = max(n for n in range(1, _HEADS + 1) if group % n == 0)
    # Few rows: 32 columns of the output a simdgroup; many: 16, or its accumulators would not fit in registers.
    NC = 4 if T * G <= 64 else 2
    threads = 32 * D // (8 * NC)
    start = mx.full((B,), span.start, dtype=mx.int32) if isinstance(span.start, int) else span.start
    parts = [start if part is None else part for x in (keys, values) for part in x[:3]]
    n = chunks.count(span.length, span.window + T - 1 if span.window else None)
    template = {"T": q.dtype, "L": T, "Hq": Hq, "G": G, "D": D}
    partials = _CHUNKS(
        factory,
        [q, *parts, start, mx.array(scale * log2(e), dtype=mx.float32)],
        [((B, Hq // G, n, T * G, D), mx.float32), ((B, Hq // G, n, T * G, 2), mx.float32)],
        (threads, n, B * Hq // G),
        **template,
        Hkv=Hkv,
        FORMAT=2 if keys.biases is not None else 1 if keys.scales is not None else 0,
        BITS=keys.bits or 8 * keys.data.dtype.size,
        GROUP=keys.group_size,
        WINDOW=span.window or 0,
        FIRST=span.first,
        NC=NC,
        # Keys of one softmax step, the same for every T: the scores of 17 rows fit in 32 KB.
        KB=64 if G <= 6 else 32,
        CHUNK=chunks.size,
        MANY=chunks.many,
        REST=chunks.rest,
    )
    [out] = _MERGE(factory, partials, [((B, T, Hq, D), q.dtype)], (D, T * Hq, B), **template)
    return out.transpose(0, 2, 1, 3)
