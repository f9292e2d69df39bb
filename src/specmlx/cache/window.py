"""Keys and values of a sliding-window layer in their order, so that rows can be taken back."""

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from specmlx.cache.kv import KV, reserve, write

# Rows leave the buffer this many at a time: fewer masked rows in front change no bit on the CPU.
_GRID = 256


class WindowCache:
    """In place of mlx-lm's RotatingKVCache (keep 0): a query sees the same rows, and they stay in order.

    `offset` may be set back to where the last writing began. Past the window the sums of attention run in the order
    of the rows, in RotatingKVCache in rotated order: equal up to rounding.
    """

    def __init__(self, max_size: int, spare: int = 0):
        """`spare`: rows kept in front of the window, so that `trim` may take back as many."""
        self.max_size = max_size
        self.spare = spare
        self.offset = 0
        self._kv: KV | None = None
        self._first = 0

    @classmethod
    def of(cls, cache: RotatingKVCache, spare: int = 0) -> "WindowCache":
        """The rows of a cache of mlx-lm's, in order."""
        own = cls(cache.max_size, spare)
        if not cache.empty():
            own._kv = KV(cache._temporal_order(cache.keys), cache._temporal_order(cache.values))
            own.offset = cache.offset
            own._first = cache.offset - own._kv.capacity
        return own

    def export(self, cache: RotatingKVCache) -> None:
        """Write the window's rows into a cache of mlx-lm's, in place."""
        if self._kv is None:
            return
        end = self.offset - self._first
        first = max(0, end - self.max_size)
        cache.keys, cache.values = (mx.contiguous(x[:, :, first:end]) for x in self._kv)
        cache.offset, cache._idx = self.offset, end - first

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows `[B, H, T, D]`; all rows of the buffer up to them."""
        gone, held = self._split()
        if gone:
            self._kv = self._kv.mapped(lambda x: x[:, :, gone : gone + held])
            self._first += gone
        end = held + keys.shape[2]
        rows = KV(keys, values)
        self._kv = write(reserve(self._kv, end, rows), rows, held)
        self.offset = self._first + end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows of the buffer, for layers that share another one's."""
        end = self.offset - self._first
        return self._kv.keys[:, :, :end], self._kv.values[:, :, :end]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """The mask of the next N rows over what `update_and_fetch` will return for them."""
        window = window_size or self.max_size
        _, held = self._split()
        if held + N <= window and not return_array:
            return "causal" if N > 1 else None
        rows, queries = mx.arange(held + N), mx.arange(held, held + N)[:, None]
        return (rows <= queries) & (queries - rows < window)

    def _split(self) -> tuple[int, int]:
        """Rows in front that no later query sees, on the grid, and the rows held behind them."""
        held = self.offset - self._first
        gone = max(0, held - self.max_size + 1 - self.spare) // _GRID * _GRID
        return gone, held - gone

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Take the last n rows back, no more than `spare` at a time."""
        n = min(self.offset - self._first, n)
        self.offset -= n
        return n

    def arrays(self) -> list[mx.array]:
        return [] if self._kv is None else list(self._kv)

    state = property(arrays)

    def empty(self) -> bool:
        return self._kv is None

    @property
    def nbytes(self) -> int:
        return 0 if self._kv is None else self._kv.nbytes
