"""Launch of the attention kernels: chunks of keys, then their merge in order."""

from collections.abc import Callable
from math import e, log2
from typing import NamedTuple

import mlx.core as mx

from specmlx.kernels.attention.reference import Stored
from specmlx.kernels.source import Source
from specmlx.kernels.tuning import Tuning, tuning

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


class Chunks(NamedTuple):
    """Where keys are split: `many` chunks of `size` from position 0, then chunks of `rest`.

    Short ones first, so that short contexts fill the chip; long ones later, where partial results would cost more.
    """

    size: int
    many: int = 64
    rest: int = 1024

    @classmethod
    def of(cls, tuning: Tuning) -> "Chunks":
        return cls(tuning.chunk, tuning.short_chunks, tuning.long_chunk)

    def count(self, length: int, seen: int | None = None) -> int:
        """How many chunks the first `length` keys touch, or any `seen` neighbours of them."""
        first = self.size * self.many
        n = -(-length // self.size) if length <= first else self.many + -(-(length - first) // self.rest)
        return n if seen is None else min(n, (seen - 2) // self.size + 2)


def supports(q: mx.array, keys: Stored, values: Stored) -> bool:
    """Whether the kernels take these rows and this buffer."""
    D, T = q.shape[-1], q.shape[2]
    if not (64 <= D <= 256 and D % 32 == 0 and 1 <= T <= MAX_ROWS):
        return False
    same = keys.dims == values.dims == D and keys.bits == values.bits and keys.group_size == values.group_size
    stored = keys.bits in (4, 8) or keys.data.dtype == q.dtype
    return same and stored


def attention(
    q: mx.array,
    keys: Stored,
    values: Stored,
    start: mx.array,
    length: int,
    scale: float,
    window: int | None = None,
    first: int = 0,
    chunks: Chunks | None = None,
    factory: Callable = mx.fast.metal_kernel,
) -> mx.array:
    """As `reference.attention`, in q's dtype; no row sees more than the buffer's first `length` keys.

    chunks: how keys are split, by default as the chip's family has it.
    """
    chunks = chunks or Chunks.of(tuning())
    B, Hq, T, D = q.shape
    Hkv = keys.data.shape[1]
    group = Hq // Hkv
    G = max(n for n in range(1, _HEADS + 1) if group % n == 0)
    # Few rows: 32 columns of the output a simdgroup; many: 16, or its accumulators would not fit in registers.
    NC = 4 if T * G <= 64 else 2
    threads = 32 * D // (8 * NC)
    unused = start
    parts = [unused if part is None else part for x in (keys, values) for part in x[:3]]
    n = chunks.count(length, window + T - 1 if window else None)
    template = {"T": q.dtype, "L": T, "Hq": Hq, "G": G, "D": D}
    partials = _CHUNKS(
        factory,
        [q, *parts, start, mx.array(scale * log2(e), dtype=mx.float32)],
        [((B, Hq // G, n, T * G, D), mx.float32), ((B, Hq // G, n, T * G, 2), mx.float32)],
        (threads, n, B * Hq // G),
        (threads, 1, 1),
        **template,
        Hkv=Hkv,
        FORMAT=2 if keys.biases is not None else 1 if keys.scales is not None else 0,
        BITS=keys.bits or 8 * keys.data.dtype.size,
        GROUP=keys.group_size,
        WINDOW=window or 0,
        FIRST=first,
        NC=NC,
        # Keys of one softmax step, the same for every T: the scores of 17 rows fit in 32 KB.
        KB=64 if G <= 6 else 32,
        CHUNK=chunks.size,
        MANY=chunks.many,
        REST=chunks.rest,
    )
    [out] = _MERGE(factory, partials, [((B, T, Hq, D), q.dtype)], (D, T * Hq, B), (D, 1, 1), **template)
    return out.transpose(0, 2, 1, 3)
