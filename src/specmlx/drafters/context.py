"""What drafters remember of B sequences: rows in buffers, of which each sequence has a number of its own."""

from collections.abc import Sequence
from copy import copy

import mlx.core as mx

from specmlx.cache.kv import KV, merge, reserve, take, write


class Rows:
    """The keys and values of layers that see the same rows; a subclass may add arrays `[B, ...]` of its own.

    Row j of sequence b stands at the absolute position base[b] + j; rows from length[b] on are stale, finite, and
    masked. `max_length` is what the host knows of the lengths: no sequence has more rows. `start` and `max_start` are
    both as they were when the newest rows were appended. No proposal reads more than the last `keep` rows (None: all).
    """

    def __init__(
        self, batch: int, layers: Sequence[int] = (), window: int | None = None, keep: int | None = None, start: int = 0
    ):
        self.layers, self.window, self.keep = layers, window, keep
        self.base = mx.full((batch,), start, dtype=mx.int32)
        self.length = self.start = mx.zeros((batch,), dtype=mx.int32)
        self.max_length = self.max_start = 0
        self.kvs: dict[int, KV] = {}

    def write(self, layer: int, keys: mx.array, values: mx.array) -> KV:
        """Put a layer's keys and values `[B, H, T, D]` behind its rows, where the next ones overwrite them.

        Returns all rows, with these. They stay if `append` counts them.
        """
        new, length = KV(keys, values), self.max_length + keys.shape[2]
        # Kept, so that nothing else refers to the old buffers and mlx writes in place.
        kv = self.kvs[layer] = write(reserve(self.kvs.get(layer), length, new), new, self.length)
        return KV(kv.keys[:, :, :length], kv.values[:, :, :length])

    def append(self, count: int | mx.array, most: int) -> None:
        """Count the first `count` rows (int, or int32 `[B]`) of those just written, no more than `most`."""
        self.start, self.max_start = self.length, self.max_length
        self.length, self.max_length = self.length + count, self.max_length + most

    def settle(self, count: int | Sequence[int]) -> None:
        """See `drafters.proposal.Context`."""
        self.length = self.start + mx.array(count, dtype=mx.int32)
        self.max_length = self.max_start + (count if isinstance(count, int) else max(count))

    def drop(self, keep: int) -> None:
        """Keep each sequence's newest `keep` rows: the others lie before every window that is still to come."""
        keep = min(keep, self.max_length)
        dropped = mx.maximum(self.length - keep, 0)
        rows = (dropped[:, None] + mx.arange(keep, dtype=mx.int32))[:, None, :, None]
        for i, kv in self.kvs.items():
            self.kvs[i] = kv.mapped(lambda buffer: mx.take_along_axis(buffer, rows, axis=2))
        self.base, self.length, self.max_length = self.base + dropped, self.length - dropped, keep

    def arrays(self) -> list[mx.array]:
        own = [value for value in vars(self).values() if isinstance(value, mx.array)]
        return own + [x for kv in self.kvs.values() for x in kv]

    def joined(self, others: "Sequence[Rows]") -> "Rows":
        """A context of all sequences, these first."""
        parts, joined = [self, *others], copy(self)
        for name, value in vars(self).items():
            if isinstance(value, mx.array):
                setattr(joined, name, _stacked([getattr(part, name) for part in parts]))
        joined.max_length, joined.max_start = map(max, zip(*((p.max_length, p.max_start) for p in parts), strict=True))
        layers = self.layers if joined.max_length else ()
        joined.kvs = {i: merge([(part.kvs.get(i), len(part.length)) for part in parts]) for i in layers}
        return joined

    def lanes(self, indices: Sequence[int]) -> "Rows":
        """A context of some sequences, copied."""
        at, some = mx.array(indices, dtype=mx.int32), copy(self)
        for name, value in vars(self).items():
            if isinstance(value, mx.array):
                setattr(some, name, value[at])
        some.kvs = {i: take(kv, at) for i, kv in self.kvs.items()}
        return some

    def pack(self, lane: int = 0) -> dict[str, mx.array]:
        """One sequence's newest rows, as many as a proposal may read, in arrays that stand on their own."""
        length, key = self.length[lane].item(), self.layers[0]
        keep = length if self.keep is None else min(length, self.keep)
        packed = {f"{key}.base": self.base[lane : lane + 1] + (length - keep)}
        packed[f"{key}.length"] = mx.array([keep], dtype=mx.int32)
        for i, kv in self.kvs.items() if keep else ():
            for name, x in zip(("keys", "values"), kv, strict=True):
                packed[f"{i}.{name}"] = mx.contiguous(x[lane : lane + 1, :, length - keep : length])
        return packed

    def unpack(self, packed: dict[str, mx.array]) -> None:
        """Become, from an empty context of one sequence, what `pack` was given; the arrays are never written to."""
        key = self.layers[0]
        self.base, self.length = packed.get(f"{key}.base", self.base), packed[f"{key}.length"]
        self.start, self.max_length = self.length, self.length.item()
        self.max_start = self.max_length
        layers = self.layers if self.max_length else ()
        self.kvs = {i: KV(packed[f"{i}.keys"], packed[f"{i}.values"]) for i in layers}


def _stacked(parts: Sequence[mx.array]) -> mx.array:
    """Arrays `[b, ...]` behind one another, with zeros where a part is smaller in another axis."""
    shape = [max(sizes) for sizes in zip(*(x.shape[1:] for x in parts), strict=True)]
    widths = [[(0, 0), *((0, most - n) for most, n in zip(shape, x.shape[1:], strict=True))] for x in parts]
    return mx.concatenate([mx.pad(x, width) for x, width in zip(parts, widths, strict=True)])


class Context:
    """All that a block drafter keeps of B sequences: the `Rows` of each window's layers."""

    def __init__(self, groups: Sequence[Rows]):
        self.groups = list(groups)

    def settle(self, count: int | Sequence[int]) -> None:
        """See `drafters.proposal.Context`."""
        for rows in self.groups:
            rows.settle(count)

    def arrays(self) -> list[mx.array]:
        return [x for rows in self.groups for x in rows.arrays()]

    def joined(self, others: "Sequence[Context]") -> "Context":
        """See `Rows`."""
        parts = zip(self.groups, *(other.groups for other in others), strict=True)
        return Context([rows.joined(same) for rows, *same in parts])

    def lanes(self, indices: Sequence[int]) -> "Context":
        return Context([rows.lanes(indices) for rows in self.groups])

    def pack(self, lane: int = 0) -> dict[str, mx.array]:
        """See `Rows`."""
        return {name: x for rows in self.groups for name, x in rows.pack(lane).items()}

    def unpack(self, packed: dict[str, mx.array]) -> None:
        for rows in self.groups:
            rows.unpack(packed)
