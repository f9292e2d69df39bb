"""Keys and values of attention rows, written in place at each lane's own length."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

STEP = 256


class KV(NamedTuple):
    """Buffers `[B, H, capacity, D]`; rows beyond a lane's length are stale and finite, and must be masked."""

    keys: mx.array
    values: mx.array

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All buffers."""
        return [self.keys, self.values]

    def with_arrays(self, arrays: Sequence[mx.array]) -> "KV":
        """Others of the same kind, made of such a list."""
        return KV(*arrays)


def reserve(
    kv: KV | None, capacity: int, keys_like: mx.array, values_like: mx.array, step: int = STEP, expected: int = 0
) -> KV:
    """Buffers with room for `capacity` rows, rounded up to `step`; old rows are kept, new ones are zeros.

    Buffers that have to grow, and so to be copied, grow to as many rows as are `expected`.
    `keys_like` and `values_like` `[B, H, *, D]` give the shapes and dtypes of a buffer that does not exist yet.
    """
    have = 0 if kv is None else kv.keys.shape[2]
    if have >= capacity:
        return kv
    missing = -(-max(capacity, expected) // step) * step - have

    def grown(buffer: mx.array | None, like: mx.array) -> mx.array:
        B, H, _, D = like.shape
        room = mx.zeros((B, H, missing, D), dtype=like.dtype)
        return room if buffer is None else mx.concatenate([buffer, room], axis=2)

    old = (None, None) if kv is None else kv
    return KV(grown(old[0], keys_like), grown(old[1], values_like))


def write(kv: KV, keys: mx.array, values: mx.array, start: int | mx.array) -> KV:
    """The buffers with rows `[B, H, T, D]` written at `start`, an int or an int32 array `[B]` on the device.

    Functional; mlx reuses the memory when nothing else refers to the old buffers at evaluation.
    """
    old_keys, old_values = kv
    if isinstance(start, int) or len(keys) == 1:
        at = mx.array([start]) if isinstance(start, int) else start.reshape(1)
        return KV(mx.slice_update(old_keys, keys, at, axes=(2,)), mx.slice_update(old_values, values, at, axes=(2,)))
    for i in range(len(keys)):
        at = mx.stack([mx.array(i, dtype=start.dtype), start[i]])
        old_keys = mx.slice_update(old_keys, keys[i : i + 1], at, axes=(0, 2))
        old_values = mx.slice_update(old_values, values[i : i + 1], at, axes=(0, 2))
    return KV(old_keys, old_values)


def visible(q_positions: mx.array, length: int) -> mx.array:
    """Boolean mask `[B, 1, T, length]`: the query at position p sees row j iff j <= p."""
    return mx.arange(length) <= q_positions[:, None, :, None]


def merge(parts: Sequence[tuple[KV | None, int]]) -> KV | None:
    """The lanes of several buffers in one, zeros behind the shorter ones; a part is (buffers or None, its lanes)."""
    like = next((kv for kv, _ in parts if kv is not None), None)
    if like is None:
        return None
    capacity = max(kv.capacity for kv, _ in parts if kv is not None)

    def joined(which: int) -> mx.array:
        example = like.arrays()[which]
        _, H, _, *rest = example.shape
        columns = []
        for kv, lanes in parts:
            have = [] if kv is None else [kv.arrays()[which]]
            missing = capacity - (0 if kv is None else kv.capacity)
            room = [mx.zeros((lanes, H, missing, *rest), dtype=example.dtype)] if missing else []
            columns.append(mx.concatenate([*have, *room], axis=2) if len(have + room) > 1 else (have + room)[0])
        return mx.concatenate(columns)

    return like.with_arrays([joined(which) for which in range(len(like.arrays()))])


def take(kv: KV, lanes: mx.array, rows: int | None = None) -> KV:
    """The buffers of some lanes, by their indices `[b]`, as long as `rows` rows need them."""
    capacity = kv.capacity if rows is None else -(-max(rows, 1) // STEP) * STEP
    return kv.with_arrays([buffer[:, :, :capacity][lanes] for buffer in kv.arrays()])
