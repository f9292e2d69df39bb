"""Snapshots of conversations: everything that the first rows of one left behind, for another to begin with.

Keys and values are cut into pieces that are never written again and that snapshots of one conversation share. A
conversation begins with a copy of them in a buffer of its own, so neither a failed evaluation nor another thread can
reach what a snapshot holds.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from specmlx.cache import mlx_lm as caches
from specmlx.cache.conversation import Conversation
from specmlx.cache.kv import KV, joined, reserve
from specmlx.cache.layers import LayerStates
from specmlx.cache.mlx_lm import CacheStates
from specmlx.cache.recurrent import Recurrent


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows `start`..`stop` of the attention layers (`kvs` by layer), behind those of the piece `before`.

    `ids` are the rows' tokens, int32.
    """

    ids: np.ndarray
    kvs: dict[int, KV]
    before: "Piece | None" = None

    @cached_property
    def start(self) -> int:
        return 0 if self.before is None else self.before.stop

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @cached_property
    def nbytes(self) -> int:
        return self.ids.nbytes + sum(kv.nbytes for kv in self.kvs.values())

    def chain(self) -> "list[Piece]":
        """All pieces from the first row on."""
        pieces, piece = [], self
        while piece is not None:
            pieces.append(piece)
            piece = piece.before
        return pieces[::-1]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A conversation after its first `length` rows.

    recurrent: the Gated DeltaNet layers' states by layer, without tapes.
    drafts: by drafter, its packed context at the same boundary (see `drafters.context.Rows`).
    caches: mlx-lm's own, of a model that is run by its own code; the piece has ids only.
    from_file: nobody has seen yet whether it fits the model that it names.
    """

    piece: Piece
    recurrent: dict[int, Recurrent]
    drafts: dict[str, dict[str, mx.array]] = field(default_factory=dict)
    caches: list | None = None
    from_file: bool = False

    @property
    def length(self) -> int:
        return self.piece.stop

    @cached_property
    def ids(self) -> np.ndarray:
        """The processed tokens, int32 `[length]`."""
        return np.concatenate([piece.ids for piece in self.piece.chain()])

    @cached_property
    def key(self) -> bytes:
        """The ids' digest."""
        return next(digests(self.ids, [self.length]))

    @cached_property
    def nbytes(self) -> int:
        """Bytes without the pieces, which may be shared."""
        arrays = [x for packed in self.drafts.values() for x in packed.values()]
        arrays += [] if self.caches is None else caches.arrays(self.caches)
        return sum(x.nbytes for x in arrays) + sum(layer.nbytes for layer in self.recurrent.values())


def digests(ids: np.ndarray, lengths: Sequence[int]) -> Iterator[bytes]:
    """Digests of the first n ids, for growing n."""
    digest, done = blake2b(digest_size=16), 0
    for n in lengths:
        digest.update(np.ascontiguousarray(ids[done:n], dtype="<i4").tobytes())
        done = n
        yield digest.digest()


def take(
    conversation: Conversation,
    before: Piece | None = None,
    drafter: str | None = None,
    packed: dict[str, mx.array] | None = None,
) -> Snapshot:
    """The conversation as it is, evaluated. `before` are rows of it that an earlier snapshot holds already.

    `packed` is the context of the drafter with the fingerprint `drafter`, at the same boundary.
    """
    length, start = conversation.states.length, 0 if before is None else before.stop
    ids = np.array(conversation.processed[:length], dtype=np.int32)
    drafts = {} if drafter is None or packed is None else {drafter: packed}
    if isinstance(conversation.states, CacheStates):
        copies = caches.clones(conversation.states)
        mx.eval(caches.arrays(copies), drafts)
        return Snapshot(Piece(ids[start:], {}, before), {}, drafts, copies)
    kvs, recurrent = {}, {}
    for i, layer in enumerate(conversation.states.folded()):
        if isinstance(layer, Recurrent):
            recurrent[i] = Recurrent(mx.contiguous(layer.S), mx.contiguous(layer.conv))
        elif layer is not None:
            kvs[i] = layer.mapped(lambda x: mx.contiguous(x[:, :, start:length]))
    mx.eval([*(kv.arrays() for kv in kvs.values())], [x[:2] for x in recurrent.values()], drafts)
    piece = before if start == length and before is not None else Piece(ids[start:], kvs, before)
    return Snapshot(piece, recurrent, drafts)


def restore(snapshot: Snapshot, empty: LayerStates | CacheStates, capacity: int) -> Conversation:
    """A conversation that goes on from a snapshot, its buffers with room for `capacity` rows; `empty` says its layers.

    Nothing that it does reaches the snapshot.
    """
    if snapshot.caches is not None:
        states = CacheStates([caches.clone(cache) for cache in snapshot.caches], snapshot.length)
        return Conversation(states, snapshot.ids.tolist())
    pieces = snapshot.piece.chain()
    layers = []
    for i, layer in enumerate(empty.layers):
        if i in snapshot.recurrent:
            layers.append(snapshot.recurrent[i])
        else:
            kvs = [piece.kvs[i] for piece in pieces if i in piece.kvs]
            if empty.kv_format and snapshot.length >= empty.kv_format.start:
                kvs = [empty.kv_format.converted(kv) for kv in kvs]
            layers.append(reserve(joined(kvs), capacity, kvs[0], step=1) if kvs else layer)
    mx.eval(layers)
    states = LayerStates.holding(snapshot.length, layers, kv_format=empty.kv_format)
    return Conversation(states, snapshot.ids.tolist())


def prefill_chunks(
    start: int, stop: int, checkpoints: Collection[int], window: int | None
) -> Iterator[tuple[int, bool]]:
    """Where a prefill of rows `start`..`stop` pauses, and whether a drafter that sees `window` rows needs those before.

    It needs the last `window` rows before each of `checkpoints`, where its context is kept, and before `stop`.
    """
    ends = [at for at in checkpoints if start < at < stop] + [stop]
    needed = [(max(end - window, 0) if window else 0, end) for end in ends]
    cuts = sorted({cut for cut in (*ends, *(first for first, _ in needed)) if start < cut <= stop})
    for cut in cuts:
        yield cut, any(first <= start and cut <= end for first, end in needed)
        start = cut
