"""mlx-lm's own caches as the states of one conversation, with the same transaction as ours."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from specmlx.state.kv import KV
from specmlx.state.layers import Pass
from specmlx.state.window import WindowCache

# Accepted rows that may run again in front of the next pass; where there are more, they take a pass of their own.
MOST_REPLAYED = 16


class CacheStates:
    """Caches that are trimmed where their class allows it, and else taken back to a snapshot of the first `base` rows.

    After a pass that was not accepted whole, what is accepted behind a snapshot has to run again: `begin` puts it in
    front of the next pass. Sliding windows are kept as `WindowCache`, which can be trimmed.
    """

    batch = 1
    # mlx-lm's caches are written as a pass is built, so none can be built ahead.
    looks_ahead = False
    room = None

    def __init__(self, caches: list, length: int = 0):
        self.caches = [in_order(cache) for cache in caches]
        self.base = length
        self.count = 0
        self._replay: mx.array | None = None
        self._ids: mx.array | None = None
        self._ran = 0
        self.outputs: list[mx.array] = []
        self._open = False
        self._broken: str | None = None
        self._leaves = [leaf for cache in self.caches for leaf in _leaves(cache)]
        self._snapshots = [_Snapshot(leaf) for leaf in self._leaves if not _trimmable(leaf)]

    @property
    def layers(self) -> list:
        return self.caches

    @property
    def replays(self) -> bool:
        """Whether accepted rows may have to run twice, since some cache can't be trimmed."""
        return bool(self._snapshots)

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
        return not self.replays or self.replayed + self.count == self._ran

    @property
    def overdue(self) -> bool:
        """Whether the accepted rows behind the snapshot should enter it by a pass of their own."""
        return not self.whole and self.replayed + self.count > MOST_REPLAYED

    @property
    def broken(self) -> bool:
        """Whether an evaluation failed half-way, so that all further use is refused."""
        return self._broken is not None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for leaf in self._leaves for x in _arrays(leaf))

    def expect(self, rows: int) -> None:
        """mlx-lm's caches grow as they do."""

    def begin(self, rows: mx.array) -> mx.array:
        """Open a pass over ids `[1, T]`: sets the caches to where it starts, and returns the ids that have to run.

        Raises RuntimeError, before anything changes, while the last pass is neither committed nor aborted.
        """
        if self._broken:
            raise RuntimeError(f"this conversation can't go on ({self._broken}): start a new one")
        if self._open:
            raise RuntimeError("the last pass was neither committed nor aborted: call commit(n) or abort() first")
        kept, whole = self.replayed + self.count, self.whole
        if whole:
            self.base, replay = self.base + kept, None
        else:
            replay = self._ids[:, :kept] if kept else None
        for leaf in self._leaves:
            if _trimmable(leaf):
                leaf.offset = self.base
        for snapshot in self._snapshots:
            snapshot.take() if whole else snapshot.restore()
        self._replay, self.outputs = replay, []
        self._ids = rows if replay is None else mx.concatenate([replay, rows], axis=1)
        self._ran, self.count, self._open = self._ids.shape[1], 0, True
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
        self._evaluate(mx.async_eval, *arrays)
        return new

    def evaluate(self, *arrays: Any) -> None:
        """Evaluate the caches, the open pass's `outputs` and `arrays`. Should that raise, no further use."""
        self._evaluate(mx.eval, *arrays)

    def _evaluate(self, by: Callable, *arrays: Any) -> None:
        try:
            # Snapshots too: a copy that is still lazy could only be evaluated in this thread.
            held = [list(snapshot.held.values()) for snapshot in self._snapshots]
            by([_arrays(leaf) for leaf in self._leaves], _arrays(held), self.outputs, *arrays)
        except Exception as error:
            self._broken = f"an evaluation failed: {error}"
            raise

    def commit(self, count: int | mx.array) -> None:
        """Let the first `count` rows of the last pass in; may be repeated with more. An array is read.

        Raises RuntimeError without a pass, ValueError for a count outside 0..T or below the last one.
        """
        if self._ids is None:
            raise RuntimeError("nothing to commit: run a pass first")
        n, rows = int(count), self._ran - self.replayed
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
        for leaf in self._leaves:
            if _trimmable(leaf):
                leaf.offset = self.length
        for ours, theirs in zip(self.caches, caches, strict=True):
            for own, stock in zip(_leaves(ours), _leaves(theirs), strict=True):
                if isinstance(own, WindowCache):
                    own.export(stock)


def clones(states: CacheStates) -> list:
    """The caches as they are once the rows that are in have run; what becomes of the originals doesn't change them."""
    found = [clone(cache) for cache in states.caches]
    for leaf in (leaf for cache in found for leaf in _leaves(cache)):
        if _trimmable(leaf):
            leaf.offset = states.length
    return found


def clone(cache: Any) -> Any:
    """Another cache that holds the same."""
    if type(cache) is CacheList:
        return CacheList(*map(clone, cache.caches))
    new = type(cache).__new__(type(cache))
    vars(new).update({name: _copied(value) for name, value in vars(cache).items()})
    return new


def arrays(caches: list) -> list[mx.array]:
    """All that caches hold."""
    return _arrays(caches)


class _Snapshot:
    """What a cache held, to be put back: its attributes, with copies of their lists and of the array objects."""

    def __init__(self, cache: Any):
        self.cache = cache
        self.take()

    def take(self) -> None:
        self.held = {name: _copied(value) for name, value in vars(self.cache).items()}

    def restore(self) -> None:
        vars(self.cache).update({name: _copied(value) for name, value in self.held.items()})


def _copied(value: Any) -> Any:
    # mlx-lm writes into key buffers in place, through the array object: another object keeps what it shows.
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, KV):
        return value.with_arrays(_copied(value.arrays()))
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


def in_order(cache: Any, spare: int = 0) -> Any:
    """A cache of mlx-lm's, sliding windows as `WindowCache` with so many rows to spare; any other as it is."""
    if type(cache) is CacheList:
        return CacheList(*(in_order(inner, spare) for inner in cache.caches))
    return WindowCache.of(cache, spare) if type(cache) is RotatingKVCache and cache.keep == 0 else cache


def _leaves(cache: Any) -> list:
    return [leaf for inner in cache.caches for leaf in _leaves(inner)] if type(cache) is CacheList else [cache]


def _trimmable(cache: Any) -> bool:
    return type(cache) in (KVCache, QuantizedKVCache, WindowCache)


def _arrays(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in _arrays(item)]
    return _arrays(list(vars(value).values())) if hasattr(value, "__dict__") else []
