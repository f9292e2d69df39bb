"""mlx-lm's own caches as the states of one conversation, with the same transaction as ours."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from specmlx.cache.kv import KV
from specmlx.cache.layers import Pass, States
from specmlx.cache.window import WindowCache

# Accepted rows that may run again in front of the next pass; where there are more, they take a pass of their own.
MOST_REPLAYED = 16


class CacheStates(States):
    """Caches that are trimmed where their class allows it, and else taken back to a snapshot of the first `base` rows.

    After a pass that was not accepted whole, what is accepted behind a snapshot has to run again: `begin` puts it in
    front of the next pass. Sliding windows are kept as `WindowCache`, which can be trimmed.
    """

    batch = 1
    # mlx-lm's caches are written as a pass is built, so none can be built ahead.
    looks_ahead = False
    rows_left = None

    def __init__(self, caches: list, length: int = 0):
        self.layers = self.caches = [in_order(cache) for cache in caches]
        self.base = length
        self.count = 0
        self._replay: mx.array | None = None
        self._ids: mx.array | None = None
        self.outputs: list[mx.array] = []
        self._open = False
        self._leaves = [leaf for cache in self.caches for leaf in _leaves(cache)]
        self._fixed = [leaf for leaf in self._leaves if not _trimmable(leaf)]
        self._snapshots = [_copied(vars(leaf)) for leaf in self._fixed]

    @property
    def replays(self) -> bool:
        """Whether accepted rows may have to run twice, since some cache can't be trimmed."""
        return bool(self._fixed)

    @property
    def length(self) -> int:
        """Rows that are in."""
        return self.base + self.replayed + self.count

    @property
    def replayed(self) -> int:
        """Rows in front of the last pass that had been accepted before it."""
        return 0 if self._replay is None else self._replay.shape[1]

    @property
    def whole(self) -> bool:
        """Whether the caches hold the rows that are in, or can be trimmed to them."""
        return not self.replays or self._ids is None or self.replayed + self.count == self._ids.shape[1]

    @property
    def overdue(self) -> bool:
        """Whether the accepted rows behind the snapshot should enter it by a pass of their own."""
        return not self.whole and self.replayed + self.count > MOST_REPLAYED

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in arrays(self._leaves))

    def reserve(self, rows: int) -> None:
        """mlx-lm's caches grow as they do."""

    def begin(self, rows: mx.array) -> mx.array:
        """Open a pass over ids `[1, T]`: sets the caches to where it starts, and returns the ids that have to run.

        Raises RuntimeError, before anything changes, while the last pass is neither committed nor aborted.
        """
        self.refuse(open=self._open)
        kept, replay = self.replayed + self.count, None
        if self.whole:
            self.base += kept
            self._snapshots = [_copied(vars(leaf)) for leaf in self._fixed]
        else:
            replay = self._ids[:, :kept] if kept else None
            for leaf, held in zip(self._fixed, self._snapshots, strict=True):
                vars(leaf).update(_copied(held))
        _trim(self._leaves, self.base)
        self._replay, self.outputs = replay, []
        self._ids = rows if replay is None else mx.concatenate([replay, rows], axis=1)
        self.count, self._open = 0, True
        return self._ids

    def copy(self) -> "CacheStates":
        """The rows that are in, evaluated, for another to go on from; ValueError where some have to run again."""
        if not self.whole:
            raise ValueError("the last tokens of this conversation have to run again before it can be copied")
        copied = clones(self)
        mx.eval(arrays(copied))
        return CacheStates(copied, self.length)

    def dispatch(self, new: Pass, *arrays: Any) -> Pass:
        """Send the open pass and `arrays` to the device, without waiting for them."""
        self._evaluate(mx.async_eval, *self._held(), *arrays)
        return new

    def evaluate(self, *arrays: Any) -> None:
        """Evaluate the caches, the open pass's `outputs` and `arrays`. Should that raise, no further use."""
        self._evaluate(mx.eval, *self._held(), *arrays)

    def _held(self) -> list:
        # Snapshots too: a copy that is still lazy could only be evaluated in this thread.
        return [arrays([*self._leaves, *self._snapshots]), self.outputs]

    def commit(self, count: int | mx.array) -> None:
        """Let the first `count` rows of the last pass in; may be repeated with more. An array is read.

        Raises RuntimeError without a pass, ValueError for a count outside 0..T or below the last one.
        """
        if self._ids is None:
            raise RuntimeError("nothing to commit: run a pass first")
        n, rows = int(count), self._ids.shape[1] - self.replayed
        if not 0 <= n <= rows:
            raise ValueError(f"can't commit {n} rows: the pass has {rows}")
        if n < self.count:
            raise ValueError(f"can't commit {n} rows: {self.count} are committed already")
        self.count, self._open = n, False

    def abort(self) -> None:
        """Drop the open pass as if it had never run; a pass that is committed stays."""
        self._open = False

    def export(self, caches: list) -> None:
        """Bring caches of mlx-lm's, from which these were made, to the rows that are in; all of them must have run."""
        _trim(self._leaves, self.length)
        for ours, theirs in zip(self.caches, caches, strict=True):
            for own, stock in zip(_leaves(ours), _leaves(theirs), strict=True):
                if isinstance(own, WindowCache):
                    own.export(stock)


def clones(states: CacheStates) -> list:
    """The caches as they are once the rows that are in have run; what becomes of the originals doesn't change them."""
    found = [clone(cache) for cache in states.caches]
    _trim([leaf for cache in found for leaf in _leaves(cache)], states.length)
    return found


def clone(cache: Any) -> Any:
    """Another cache that holds the same."""
    if type(cache) is CacheList:
        return CacheList(*map(clone, cache.caches))
    new = type(cache).__new__(type(cache))
    vars(new).update(_copied(vars(cache)))
    return new


def arrays(value: Any) -> list[mx.array]:
    """All that caches hold, or lists and attributes of theirs."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in arrays(item)]
    held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return arrays([*held.values()])


def _copied(value: Any) -> Any:
    # mlx-lm writes into key buffers in place, through the array object: another object keeps what it shows.
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, KV):
        return value.mapped(mx.array)
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return {name: _copied(item) for name, item in value.items()} if isinstance(value, dict) else value


def in_order(cache: Any, spare: int = 0) -> Any:
    """A cache of mlx-lm's, sliding windows as `WindowCache` with so many rows to spare; any other as it is."""
    if type(cache) is CacheList:
        return CacheList(*(in_order(inner, spare) for inner in cache.caches))
    return WindowCache.of(cache, spare) if type(cache) is RotatingKVCache and cache.keep == 0 else cache


def _leaves(cache: Any) -> list:
    return [leaf for inner in cache.caches for leaf in _leaves(inner)] if type(cache) is CacheList else [cache]


def _trim(leaves: list, length: int) -> None:
    for leaf in leaves:
        if _trimmable(leaf):
            leaf.offset = length


def _trimmable(cache: Any) -> bool:
    return type(cache) in (KVCache, QuantizedKVCache, WindowCache)
