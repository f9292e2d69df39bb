"""`PromptCache`: snapshots of many prompts, found by the longest prefix, kept within a budget of bytes."""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from specmlx.cache.files import load_prompts, save_prompts
from specmlx.cache.snapshots import Snapshot, digests

# Of the memory that the device recommends to use (on the CPU: of the machine's).
SHARE = 0.25
CHECKPOINT, TURN = 0, 1

Key = tuple[str, bytes]


@dataclass(frozen=True)
class CacheCounters:
    """What a `PromptCache` did so far, and what it holds.

    hits, misses: requests that began with a snapshot, and those that did not. reused_tokens: prompt tokens that were
    not run again. evictions: snapshots that made room. snapshots, bytes: what is held now.
    """

    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    evictions: int = 0
    snapshots: int = 0
    bytes: int = 0


@dataclass
class _Entry:
    snapshot: Snapshot
    kind: int
    pins: int = 0


class PromptCache:
    """A store over many prompts, given as `prompt_cache=` to `generate`, whose prompts then are whole conversations.

    max_bytes: the budget; default: a quarter of the device's recommended working set (on the CPU: of the RAM).
    checkpoint_every: tokens between two snapshots inside of a long prompt.
    keep_answers: whether the state after an answer is kept as well; None asks the tokenizer's chat template whether the
        next prompt will hold the answer as it was generated.

    It may be used from several threads. Snapshots never change: one that is evicted while it is in use lives as long.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        *,
        checkpoint_every: int = 4096,
        keep_answers: bool | None = None,
    ):
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}: it must be 0 or more")
        if checkpoint_every < 1:
            raise ValueError(f"checkpoint_every is {checkpoint_every}: it must be at least 1")
        self.max_bytes = int(SHARE * usable_memory()) if max_bytes is None else max_bytes
        self.checkpoint_every = checkpoint_every
        self.keep_answers = keep_answers
        self._lock = threading.RLock()
        # Least recently used first.
        self._entries: dict[Key, _Entry] = {}
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> CacheCounters:
        with self._lock:
            return CacheCounters(**self._counters, snapshots=len(self._entries), bytes=self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held; what snapshots share counts once."""
        held = [snapshot for _, snapshot, _ in self.snapshots()]
        pieces = {piece for snapshot in held for piece in snapshot.piece.chain()}
        return sum(each.nbytes for each in (*held, *pieces))

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget every snapshot; the counters go on."""
        with self._lock:
            self._entries.clear()

    def snapshots(self) -> list[tuple[str, Snapshot, int]]:
        """Namespace, snapshot and class of everything held, least recently used first."""
        with self._lock:
            return [(key[0], entry.snapshot, entry.kind) for key, entry in self._entries.items()]

    def save(self, path: str | Path, metadata: dict[str, str] | None = None) -> None:
        """Write everything held to a safetensors file that only its owner may read, replacing it atomically."""
        save_prompts(path, self.snapshots(), metadata)

    def load(self, path: str | Path, namespace: str | None = None) -> dict[str, str]:
        """Take in what `save` wrote, as far as the budget goes, and get its metadata.

        `namespace`: a model's fingerprint. Raises ValueError in one line, with nothing changed, for a file that is
        missing, foreign, cut, changed or of another version, and where all of it is another model's.
        """
        held, metadata = load_prompts(path)
        spaces = {space for space, _, _ in held}
        if namespace is not None and spaces and not any(space.startswith(namespace) for space in spaces):
            raise ValueError(f"{path} holds prompts of another model ({min(spaces)[:8]}, this one is {namespace[:8]})")
        for space, snapshot, kind in held:
            self.put(space, snapshot, kind)
        return metadata

    @contextmanager
    def find(self, namespace: str, ids: Sequence[int]) -> Iterator[Snapshot | None]:
        """The longest snapshot that leaves at least one of `ids` to run; it is pinned while the context lasts."""
        ids = np.asarray(ids, dtype=np.int32)
        with self._lock:
            entry = self._longest(namespace, ids)
            if entry is not None:
                entry.pins += 1
            self._counters["misses" if entry is None else "hits"] += 1
            self._counters["reused_tokens"] += 0 if entry is None else entry.snapshot.length
        try:
            yield None if entry is None else entry.snapshot
        finally:
            if entry is not None:
                with self._lock:
                    entry.pins -= 1
                    self._make_room()

    def common(self, namespace: str, ids: Sequence[int]) -> int:
        """How many first ids the snapshot that has most of them in common has in common, the last of `ids` left out."""
        ids = np.asarray(ids, dtype=np.int32)[:-1]
        most = 0
        for held, snapshot, _ in self.snapshots():
            if held != namespace or snapshot.length <= most:
                continue
            n = min(len(ids), snapshot.length)
            parted = np.flatnonzero(ids[:n] != snapshot.ids[:n])
            most = max(most, int(parted[0]) if len(parted) else n)
        return most

    def put(self, namespace: str, snapshot: Snapshot, kind: int = TURN) -> Snapshot:
        """Keep a snapshot, and get the one that now stands for its ids: the first, with all drafters' contexts."""
        key = (namespace, snapshot.key)
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                entry = _Entry(snapshot, kind)
            else:
                held = entry.snapshot
                drafts = snapshot.drafts | held.drafts
                entry.snapshot = replace(held, drafts=drafts, from_file=held.from_file or snapshot.from_file)
                entry.kind = max(kind, entry.kind)
            self._entries[key] = entry
            self._make_room()
            return entry.snapshot

    def demote(self, namespace: str, snapshot: Snapshot) -> None:
        """A later snapshot of the same conversation serves from now on: this one goes first when room is made."""
        with self._lock:
            entry = self._entries.get((namespace, snapshot.key))
            if entry is not None:
                entry.kind = CHECKPOINT

    def _longest(self, namespace: str, ids: np.ndarray) -> _Entry | None:
        held = {entry.snapshot.length for (space, _), entry in self._entries.items() if space == namespace}
        for digest in reversed([*digests(ids, sorted(n for n in held if n < len(ids)))]):
            entry = self._entries.get((namespace, digest))
            if entry is not None:
                self._entries[namespace, digest] = self._entries.pop((namespace, digest))
                return entry
        return None

    def _make_room(self) -> None:
        while self.nbytes > self.max_bytes:
            free = [(entry.kind, key) for key, entry in self._entries.items() if not entry.pins]
            if not free:
                return
            # The first of the lowest class: entries are in the order of their last use.
            del self._entries[min(free, key=lambda found: found[0])[1]]
            self._counters["evictions"] += 1


def usable_memory() -> int:
    """The bytes that the device recommends to use; on the CPU the machine's memory."""
    info = mx.device_info() if mx.default_device() == mx.gpu else {}
    recommended = info.get("max_recommended_working_set_size")
    return recommended or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
