"""What a block drafter remembers of one conversation (or of B lanes): the context rows' keys and values."""

from collections.abc import Sequence

import mlx.core as mx

from specmlx.cache.kv import KV, merge, take

# Rows beyond two windows and blocks that a sliding layer may pile up before the old ones are dropped.
SLACK = 256


class Rows:
    """The rows of all layers that share a window.

    Row j of lane b's buffers stands at the absolute position base[b] + j; rows from length[b] on are stale,
    finite, and masked. `max_length` is what the host knows of the lengths: no lane has more rows. `before` holds both
    as they were when the newest rows were appended. No block looks at more than the last `keep` rows.
    """

    def __init__(self, layers: Sequence[int], window: int | None, batch: int, start: int, most: int | None = None):
        self.layers = tuple(layers)
        self.window = window
        keeps = [n for n in (window and window - 1, most) if n is not None]
        self.keep = min(keeps) if keeps else None
        self.base = mx.full((batch,), start, dtype=mx.int32)
        self.length = mx.zeros((batch,), dtype=mx.int32)
        self.max_length = 0
        self.before = (self.length, self.max_length)
        self.kvs: dict[int, KV | None] = dict.fromkeys(layers)

    def advance(self, skip: int) -> None:
        """Forget all rows, and leave out the next `skip` as well: those after them fill the window."""
        self.base = self.base + self.length + skip
        self.length = mx.zeros_like(self.length)
        self.max_length = 0

    def drop(self, keep: int) -> None:
        """Keep each lane's newest `keep` rows: the others lie before every window that is still to come."""
        keep = min(keep, self.max_length)
        dropped = mx.maximum(self.length - keep, 0)
        rows = (dropped[:, None] + mx.arange(keep, dtype=mx.int32))[:, None, :, None]
        for i, kv in self.kvs.items():
            self.kvs[i] = KV(*(mx.take_along_axis(buffer, rows, axis=2) for buffer in kv))
        self.base = self.base + dropped
        self.length = self.length - dropped
        self.max_length = keep


class Context:
    """All that a block drafter keeps of a request: one `Rows` per window, none of more than `most` rows."""

    def __init__(self, windows: Sequence[int | None], batch: int = 1, start: int = 0, most: int | None = None):
        self.windows, self.batch, self.most = tuple(windows), batch, most
        self.groups = [
            Rows([i for i, w in enumerate(windows) if w == window], window, batch, start, most)
            for window in dict.fromkeys(windows)
        ]

    @property
    def position(self) -> mx.array:
        """The anchor's absolute position, `[B]` int32: rows observed plus where the context started."""
        rows = self.groups[0]
        return rows.base + rows.length

    def settle(self, count: int | Sequence[int]) -> None:
        """See `drafters.proposal.Context`."""
        added = count if isinstance(count, int) else mx.array(count, dtype=mx.int32)
        most = count if isinstance(count, int) else max(count)
        for rows in self.groups:
            length, max_length = rows.before
            rows.length, rows.max_length = length + added, max_length + most

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate for the context to stand on its own, as after a prefill step."""
        buffers = [x for rows in self.groups for kv in rows.kvs.values() if kv is not None for x in kv]
        return [x for rows in self.groups for x in (rows.base, rows.length)] + buffers

    def joined(self, others: "Sequence[Context]") -> "Context":
        """See `drafters.proposal.Joinable`."""
        contexts = [self, *others]
        joined = Context(self.windows, sum(context.batch for context in contexts), most=self.most)
        for rows, parts in zip(joined.groups, zip(*(c.groups for c in contexts), strict=True), strict=True):
            rows.base = mx.concatenate([part.base for part in parts])
            rows.length = mx.concatenate([part.length for part in parts])
            rows.max_length = max(part.max_length for part in parts)
            rows.before = (rows.length, rows.max_length)
            for i in rows.layers:
                rows.kvs[i] = merge([(part.kvs[i], len(part.base)) for part in parts])
        return joined

    def lanes(self, indices: Sequence[int]) -> "Context":
        at = mx.array(indices, dtype=mx.int32)
        some = Context(self.windows, len(indices), most=self.most)
        for rows, mine in zip(some.groups, self.groups, strict=True):
            rows.base, rows.length, rows.max_length = mine.base[at], mine.length[at], mine.max_length
            rows.before = (rows.length, rows.max_length)
            rows.kvs = {i: None if kv is None else take(kv, at) for i, kv in mine.kvs.items()}
        return some

    def pack(self, lane: int = 0) -> dict[str, mx.array]:
        """One lane's newest rows, as many as a window can still see, in buffers of their own; see `Packable`."""
        packed = {}
        for rows in self.groups:
            length = rows.length[lane].item()
            keep = length if rows.keep is None else min(length, rows.keep)
            key = str(rows.layers[0])
            packed[f"{key}.base"] = rows.base[lane : lane + 1] + (length - keep)
            packed[f"{key}.length"] = mx.array([keep], dtype=mx.int32)
            for i, kv in rows.kvs.items():
                if kv is not None and keep:
                    parts = (mx.contiguous(x[lane : lane + 1, :, length - keep : length]) for x in kv)
                    packed |= dict(zip((f"{i}.keys", f"{i}.values"), parts, strict=True))
        return packed

    def unpack(self, packed: dict[str, mx.array]) -> None:
        for rows in self.groups:
            key = str(rows.layers[0])
            rows.base, rows.length = packed[f"{key}.base"], packed[f"{key}.length"]
            rows.max_length = rows.length.item()
            for i in rows.layers:
                rows.kvs[i] = KV(packed[f"{i}.keys"], packed[f"{i}.values"]) if rows.max_length else None
