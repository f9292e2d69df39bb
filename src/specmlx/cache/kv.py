"""Keys and values of attention rows, written in place at each lane's own length."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

STEP = 256


class KV(NamedTuple):
    """Buffers `[B, H, capacity, D]`; rows beyond a lane's length are stale and finite, and must be masked."""

    keys: mx.array
    values: mx.array

    @property
    def capacity(self) -> int:
        return self.arrays()[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All buffers."""
        return [self.keys, self.values]

    def mapped(self, change: Callable[[mx.array], mx.array]) -> "KV":
        """Others of the same kind, each buffer changed in the same way."""
        return of_arrays([change(x) for x in self.arrays()])


class QuantizedKV(KV):
    """Buffers where keys and values `[B, H, capacity, *]` are each a tuple of parts, as of `KVFormat.quantized`."""

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]


def of_arrays(arrays: Sequence[mx.array]) -> KV:
    """The buffers whose `arrays` these are."""
    if len(arrays) == 2:
        return KV(*arrays)
    half = len(arrays) // 2
    return QuantizedKV(tuple(arrays[:half]), tuple(arrays[half:]))


def joined(parts: Sequence[KV], axis: int = 2) -> KV:
    """Buffers of one kind behind one another: their rows, or with axis 0 their lanes."""
    return of_arrays([mx.concatenate(same, axis=axis) for same in zip(*(kv.arrays() for kv in parts), strict=True)])


def zeros(like: KV, rows: int, lanes: int | None = None) -> KV:
    """Buffers of the same kind with so many rows, and as many lanes if no number is given."""
    return like.mapped(lambda x: mx.zeros((lanes or x.shape[0], x.shape[1], rows, x.shape[3]), dtype=x.dtype))


def reserve(kv: KV | None, max_length: int, like: KV, step: int = STEP, capacity: int = 0) -> KV:
    """Buffers with room for `max_length` rows, rounded up to `step`; old rows are kept, new ones are zeros.

    Buffers that have to grow, and so to be copied, grow to `capacity` rows where that is more.
    `like`, rows of any number, gives the shapes and dtypes of buffers that do not exist yet.
    """
    have = 0 if kv is None else kv[0].shape[2] if type(kv) is KV else kv.capacity
    if have >= max_length:
        return kv
    room = zeros(like, -(-max(max_length, capacity) // step) * step - have)
    return room if kv is None else joined([kv, room])


def write(kv: KV, rows: KV, start: int | mx.array) -> KV:
    """The buffers with rows `[B, H, T, D]` written at `start`, an int or an int32 array `[B]` on the device.

    Functional; mlx reuses the memory when nothing else refers to the old buffers at evaluation.
    """
    plain = type(kv) is KV
    buffers, new = ([*kv], rows) if plain else (kv.arrays(), rows.arrays())
    lanes = 1 if isinstance(start, int) else len(new[0])
    for i, x in enumerate(new):
        if lanes == 1:
            at = mx.array([start]) if isinstance(start, int) else start.reshape(1)
            buffers[i] = mx.slice_update(buffers[i], x, at, axes=(2,))
            continue
        for lane in range(lanes):
            at = mx.stack([mx.array(lane, dtype=start.dtype), start[lane]])
            buffers[i] = mx.slice_update(buffers[i], x[lane : lane + 1], at, axes=(0, 2))
    return KV(*buffers) if plain else of_arrays(buffers)


def visible(q_positions: mx.array, length: int) -> mx.array:
    """Boolean mask `[B, 1, T, length]`: the query at position p sees row j iff j <= p."""
    return mx.arange(length) <= q_positions[:, None, :, None]


def merge(parts: Sequence[tuple[KV | None, int]]) -> KV | None:
    """The lanes of several buffers in one, zeros behind the shorter ones; a part is (buffers or None, its lanes)."""
    held = [kv for kv, _ in parts if kv is not None]
    if not held:
        return None
    longest = max(kv.capacity for kv in held)
    return joined([reserve(kv, longest, zeros(held[0], 0, lanes), step=1) for kv, lanes in parts], axis=0)


def take(kv: KV, lanes: mx.array, rows: int | None = None) -> KV:
    """The buffers of some lanes, by their indices `[b]`, as long as `rows` rows need them."""
    capacity = kv.capacity if rows is None else -(-max(rows, 1) // STEP) * STEP
    return kv.mapped(lambda x: x[:, :, :capacity][lanes])
