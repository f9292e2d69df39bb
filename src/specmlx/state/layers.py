"""The states of all layers for B lanes, and the transaction that a pass over the target is."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from specmlx.state import kv, recurrent
from specmlx.state.kv import KV
from specmlx.state.quantized_kv import KVFormat, QuantizedKV
from specmlx.state.recurrent import Recurrent

Layer = KV | Recurrent | None
Count = int | Sequence[int] | mx.array


class Pass(NamedTuple):
    """T rows that went through the target and are not committed.

    logits `[B, T, V]` (None in prefill), features `[B, T, F]` (None without taps), and the layers' new states.
    """

    rows: int
    layers: list[Layer]
    logits: mx.array | None = None
    features: mx.array | None = None


class Origin(NamedTuple):
    """Where a pass starts: its first row, the committed rows of the tape before it, the buffer length that it sees."""

    start: int | mx.array
    count: int | mx.array
    length: int


class LayerStates:
    """Layer states where a pass counts only once committed: `open`, then `commit(n)` with growing n, or `abort()`.

    `start` rows were in before the last committed pass and `count` of its rows are in too: ints while all lanes
    agree and the host knows them, else int32 `[B]` on the device. Recurrent layers are installed by the first commit.
    KV buffers are replaced when a pass opens, since it writes only beyond the rows that are in.
    looks_ahead: whether a pass may be verified before the one before it is committed.
    kv_format: how attention layers keep their rows from the format's `start` on; None: as they are.
    expected: how many rows buffers that have to grow make room for.
    """

    looks_ahead = True

    def __init__(self, layers: list[Layer], batch: int = 1, kv_format: KVFormat | None = None):
        self.layers = layers
        self.batch = batch
        self.kv_format = kv_format
        self.start: int | mx.array = 0
        self.count: int | mx.array = 0
        self.bound = 0
        self.expected = 0
        self._counts: list[int] | None = [0] * batch
        self._pass: Pass | None = None
        self._committed = True
        self._broken: str | None = None

    @property
    def length(self) -> int | mx.array:
        """Rows that are in: an int, or int32 `[B]` where lanes differ or the host has not read the counts."""
        return self.start + self.count

    @property
    def broken(self) -> bool:
        """Whether an evaluation failed half-way, so that all further use is refused."""
        return self._broken is not None

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def origin(self, T: int) -> Origin:
        """Where the next T rows start. Raises RuntimeError while a pass is neither committed nor aborted."""
        self._refuse_if_broken()
        if not self._committed:
            raise RuntimeError("the last pass was neither committed nor aborted: call commit(n) or abort() first")
        return Origin(self.length, self.count, self.bound + T)

    def expect(self, rows: int) -> None:
        """Tell how many rows there will be, so that buffers grow, and are copied, once."""
        self.expected = max(self.expected, rows)

    def keep_in(self, kv_format: KVFormat) -> None:
        """Keep attention rows in a format from its start on. Raises ValueError where they are in another already."""
        if self.kv_format not in (None, kv_format):
            raise ValueError(f"the conversation's keys are kept as {self.kv_format.name}, not as {kv_format.name}")
        self.kv_format = kv_format

    @property
    def room(self) -> int | None:
        """How many rows the next pass may have at most, since none may be both before `kv_format`'s start and behind.

        None: any number. Where lanes' lengths are unread, no lane is longer than what this counts from.
        """
        if self.kv_format is None or any(isinstance(layer, QuantizedKV) for layer in self.layers):
            return None
        left = self.kv_format.start - (self.length if isinstance(self.length, int) else self.bound)
        return left if left > 0 else None

    def format_of(self, T: int) -> KVFormat | None:
        """The format in which attention layers keep the next `T` rows, and from then on all rows before them.

        Raises ValueError where some of these would be before the format's start and some behind it.
        """
        if (room := self.room) is None:
            return self.kv_format
        if T > room:
            raise ValueError(f"a pass of {T} rows crosses row {self.kv_format.start}: it may have {room}")
        return None

    def open(self, new: Pass) -> Pass:
        """Take a pass whose layers have all been built."""
        layers = [b if isinstance(b, KV) else a for a, b in zip(self.layers, new.layers, strict=True)]
        # One call into C, as all updates here: a Ctrl-C falls before or after it.
        vars(self).update(layers=layers, _pass=new, _committed=False, _bound_before=self.bound)
        return new

    def ahead(self, count: int | mx.array) -> "LayerStates":
        """What a commit of `count` rows (an int, or int32 `[B]`, which is not read) of the open pass would give.

        A pass that is verified from there, before the rows are committed here, is taken over by `dispatch` and, once
        they are, by `open`. Nothing of it is in these states if it is dropped instead.
        """
        self._refuse_if_broken()
        layers = [a if isinstance(a, KV) else b for a, b in zip(self.layers, self._pass.layers, strict=True)]
        states = LayerStates(layers, self.batch, self.kv_format)
        states.expected = self.expected
        states.start, states.count = self.length, count
        states.bound = self._bound_before + (count if isinstance(count, int) else self._pass.rows)
        return states

    def dispatch(self, new: Pass, *arrays: mx.array) -> Pass:
        """Send a pass, the open one or one ahead, and `arrays` to the device, without waiting for them.

        Returns the pass without its KV buffers. These states have them from here on, and nothing else must: the next
        pass is to write in place. It wrote only beyond the rows that are in, and so did this one.
        """
        layers = [b if isinstance(b, KV) else a for a, b in zip(self.layers, new.layers, strict=True)]
        kept = new._replace(layers=[None if isinstance(layer, KV) else layer for layer in new.layers])
        vars(self).update(layers=layers, _pass=kept if self._pass is new else self._pass)
        self._evaluate(mx.async_eval, new, *arrays)
        return kept

    def evaluate(self, *arrays: mx.array) -> None:
        """Evaluate the open pass and `arrays`. Should that raise, KV rows may be half written: no further use."""
        self._evaluate(mx.eval, self._pass, *arrays)

    def _evaluate(self, by: Callable, *arrays) -> None:
        try:
            by(*arrays)
        except Exception as error:
            self._broken = f"an evaluation failed: {error}"
            raise

    def commit(self, count: Count) -> None:
        """Let the first `count` rows of the open pass in (per lane: a sequence, or int32 `[B]`, which is not read).

        Raises RuntimeError without an open pass and ValueError for a count outside 0..T or below the last one; both
        before anything changes.
        """
        if self._broken:
            self._refuse_if_broken()
        if self._pass is None:
            raise RuntimeError("nothing to commit: run a pass first")
        counts, most = None, self._pass.rows
        if isinstance(count, mx.array):
            count = count.astype(mx.int32)
        else:
            counts = [count] * self.batch if isinstance(count, int) else list(count)
            if len(counts) != self.batch:
                raise ValueError(f"commit got {len(counts)} counts for {self.batch} lanes")
            before = self._counts if self._committed and self._counts else [0] * self.batch
            for n, least in zip(counts, before, strict=True):
                if not 0 <= n <= most:
                    raise ValueError(f"can't commit {n} rows: the pass has {most}")
                if n < least:
                    raise ValueError(f"can't commit {n} rows: {least} are committed already")
            most, count = max(counts), counts[0] if len(set(counts)) == 1 else mx.array(counts, dtype=mx.int32)
        new = dict(count=count, _counts=counts, bound=self._bound_before + most)
        if not self._committed:
            layers = [a if isinstance(a, KV) else b for a, b in zip(self.layers, self._pass.layers, strict=True)]
            new |= dict(start=self.length, layers=layers, _committed=True)
        vars(self).update(new)

    def abort(self) -> None:
        """Drop the open pass as if it had never run; a pass that is committed stays."""
        if not self._committed:
            vars(self).update(_pass=None, _committed=True)

    def folded(self) -> list[Layer]:
        """The layers with every committed row applied and no tape: what a snapshot or a save keeps."""
        self._refuse_if_broken()
        return [x.folded(self.count) if isinstance(x, Recurrent) else x for x in self.layers]

    def copy(self) -> "LayerStates":
        """The rows that are in, evaluated, for another to go on from."""
        layers = [
            x.with_arrays([mx.contiguous(part[:, :, : self.length]) for part in x.arrays()]) if isinstance(x, KV) else x
            for x in self.folded()
        ]
        mx.eval(layers)
        return LayerStates.holding(self.length, layers, self.batch, self.kv_format)

    @classmethod
    def holding(
        cls, rows: int, layers: list[Layer], batch: int = 1, kv_format: KVFormat | None = None
    ) -> "LayerStates":
        """States that `rows` rows left behind, which `layers` are."""
        states = cls(layers, batch, kv_format)
        if rows:
            states.open(Pass(rows, layers))
            states.commit(rows)
        return states

    @classmethod
    def merged(cls, parts: "Sequence[LayerStates]") -> "LayerStates":
        """The lanes of several states in one, in order; the parts must not be used further."""
        folded, kv_format = [part.folded() for part in parts], parts[0].kv_format
        columns = [_in_one_format(column, kv_format) for column in zip(*folded, strict=True)]
        layers = [_merged(column, [part.batch for part in parts]) for column in columns]
        states = cls(layers, sum(part.batch for part in parts), kv_format)
        states._start_at([part.length for part in parts], [part.batch for part in parts])
        states.bound = max(part.bound for part in parts)
        return states

    def lanes(self, indices: Sequence[int], longest: int | None = None) -> "LayerStates":
        """Some lanes in states of their own, copied; `longest`: no fewer rows than any of them has, if that is known.

        What other lanes needed longer buffers for is left behind.
        """
        at, rows = mx.array(indices, dtype=mx.int32), self.bound if longest is None else longest
        layers = [
            None if x is None else kv.take(x, at, rows) if isinstance(x, KV) else x.take(at) for x in self.folded()
        ]
        states = LayerStates(layers, len(indices), self.kv_format)
        length = self.length
        states.start = length if isinstance(length, int) else length[at]
        states.bound = rows
        return states

    def _start_at(self, lengths: Sequence[int | mx.array], batches: Sequence[int]) -> None:
        if all(isinstance(length, int) for length in lengths) and len(set(lengths)) == 1:
            self.start = lengths[0]
            return
        columns = zip(lengths, batches, strict=True)
        self.start = mx.concatenate([mx.broadcast_to(mx.array(n, dtype=mx.int32), (b,)) for n, b in columns])

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise RuntimeError(f"this conversation can't go on ({self._broken}): start a new one")


def _in_one_format(layers: Sequence[Layer], kv_format: KVFormat | None) -> Sequence[Layer]:
    """Keys and values of several lanes quantized where some of them are."""
    if not any(isinstance(layer, QuantizedKV) for layer in layers):
        return layers
    return [kv_format.converted(layer) if isinstance(layer, KV) else layer for layer in layers]


def _merged(layers: Sequence[Layer], batches: Sequence[int]) -> Layer:
    if isinstance(layers[0], Recurrent):
        return recurrent.merge(layers)
    return kv.merge(list(zip(layers, batches, strict=True)))
