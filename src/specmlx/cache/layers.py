"""The states of all layers for B lanes, and the transaction that a pass over the target is."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from specmlx.cache import kv
from specmlx.cache.kv import KV, QuantizedKV
from specmlx.cache.quantized import KVFormat
from specmlx.cache.recurrent import Recurrent

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


class States:
    """What is refused once an evaluation has failed, or while a pass is open."""

    _broken: str | None = None

    @property
    def broken(self) -> bool:
        """Whether an evaluation failed half-way, so that all further use is refused."""
        return self._broken is not None

    def refuse(self, open: bool = False) -> None:
        """Raises RuntimeError if they are broken, or if the last pass is `open`."""
        if self._broken:
            raise RuntimeError(f"this conversation can't go on ({self._broken}): start a new one")
        if open:
            raise RuntimeError("the last pass was neither committed nor aborted: call commit(n) or abort() first")

    def _evaluate(self, by: Callable, *arrays: Any) -> None:
        try:
            by(*arrays)
        except Exception as error:
            self._broken = f"an evaluation failed: {error}"
            raise


class LayerStates(States):
    """Layer states where a pass counts only once committed: `open`, then `commit(n)` with growing n, or `abort()`.

    `start` rows were in before the last committed pass and `count` of its rows are in too: ints while all lanes
    agree and the host knows them, else int32 `[B]` on the device. Recurrent layers are installed by the first commit.
    KV buffers are replaced when a pass opens, since it writes only beyond the rows that are in.
    Attributes change in one call into C, so that a Ctrl-C falls before or after it.
    looks_ahead: whether a pass may be verified before the one before it is committed.
    kv_format: how attention layers keep their rows from the format's `start` on; None: as they are.
    capacity: how many rows buffers that have to grow make room for.
    """

    looks_ahead = True

    def __init__(self, layers: list[Layer], batch: int = 1, kv_format: KVFormat | None = None):
        self.layers = layers
        self.batch = batch
        self.kv_format = kv_format
        self.start: int | mx.array = 0
        self.count: int | mx.array = 0
        self.max_length = 0
        self.capacity = 0
        self._counts: list[int] | None = [0] * batch
        self._pass: Pass | None = None
        self._committed = True

    @property
    def length(self) -> int | mx.array:
        """Rows that are in: an int, or int32 `[B]` where lanes differ or the host has not read the counts."""
        return self.start + self.count

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def origin(self, T: int) -> Origin:
        """Where the next T rows start. Raises RuntimeError while a pass is neither committed nor aborted."""
        self.refuse(open=not self._committed)
        return Origin(self.length, self.count, self.max_length + T)

    def reserve(self, rows: int) -> None:
        """Tell how many rows there will be, so that buffers grow, and are copied, once."""
        self.capacity = max(self.capacity, rows)

    def keep_in(self, kv_format: KVFormat) -> None:
        """Keep attention rows in a format from its start on. Raises ValueError where they are in another already."""
        if self.kv_format not in (None, kv_format):
            raise ValueError(f"the conversation's keys are kept as {self.kv_format.name}, not as {kv_format.name}")
        self.kv_format = kv_format

    @property
    def rows_left(self) -> int | None:
        """How many rows the next pass may have at most, since none may be both before `kv_format`'s start and behind.

        None: any number. Where lanes' lengths are unread, no lane is longer than what this counts from.
        """
        if self.kv_format is None or any(isinstance(layer, QuantizedKV) for layer in self.layers):
            return None
        left = self.kv_format.start - (self.length if isinstance(self.length, int) else self.max_length)
        return left if left > 0 else None

    def format_of(self, T: int) -> KVFormat | None:
        """The format in which attention layers keep the next `T` rows, and from then on all rows before them.

        Raises ValueError where some of these would be before the format's start and some behind it.
        """
        if (left := self.rows_left) is None:
            return self.kv_format
        if T > left:
            raise ValueError(f"a pass of {T} rows crosses row {self.kv_format.start}: it may have {left}")
        return None

    def open(self, new: Pass) -> Pass:
        """Take a pass whose layers have all been built."""
        layers = [b if isinstance(b, KV) else a for a, b in zip(self.layers, new.layers, strict=True)]
        vars(self).update(layers=layers, _pass=new, _committed=False, _length_before=self.max_length)
        return new

    def ahead(self, count: int | mx.array) -> "LayerStates":
        """What a commit of `count` rows (an int, or int32 `[B]`, which is not read) of the open pass would give.

        A pass that is verified from there, before the rows are committed here, is taken over by `dispatch` and, once
        they are, by `open`. Nothing of it is in these states if it is dropped instead.
        """
        self.refuse()
        layers = [a if isinstance(a, KV) else b for a, b in zip(self.layers, self._pass.layers, strict=True)]
        states = LayerStates(layers, self.batch, self.kv_format)
        states.capacity = self.capacity
        states.start, states.count = self.length, count
        states.max_length = self._length_before + (count if isinstance(count, int) else self._pass.rows)
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

    def commit(self, count: Count) -> None:
        """Let the first `count` rows of the open pass in (per lane: a sequence, or int32 `[B]`, which is not read).

        Raises RuntimeError without an open pass and ValueError for a count outside 0..T or below the last one; both
        before anything changes.
        """
        if self._broken:
            self.refuse()
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
        new = dict(count=count, _counts=counts, max_length=self._length_before + most)
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
        self.refuse()
        return [x.folded(self.count) if isinstance(x, Recurrent) else x for x in self.layers]

    def copy(self) -> "LayerStates":
        """The rows that are in, evaluated, for another to go on from."""
        rows = self.length
        layers = [x.mapped(lambda x: mx.contiguous(x[:, :, :rows])) if isinstance(x, KV) else x for x in self.folded()]
        mx.eval(layers)
        return LayerStates.holding(rows, layers, self.batch, self.kv_format)

    @classmethod
    def holding(
        cls, rows: int, layers: list[Layer], batch: int = 1, kv_format: KVFormat | None = None
    ) -> "LayerStates":
        """States that `rows` rows left behind, which `layers` are."""
        states = cls(layers, batch, kv_format)
        states.start = states.max_length = rows
        return states

    @classmethod
    def merged(cls, parts: "Sequence[LayerStates]") -> "LayerStates":
        """The lanes of several states in one, in order; the parts must not be used further."""
        kv_format, lengths, batches = (
            parts[0].kv_format,
            [part.length for part in parts],
            [part.batch for part in parts],
        )
        columns = zip(*(part.folded() for part in parts), strict=True)
        states = cls([_merged(column, batches, kv_format) for column in columns], sum(batches), kv_format)
        if all(isinstance(length, int) for length in lengths) and len(set(lengths)) == 1:
            states.start = lengths[0]
        else:
            each = zip(lengths, batches, strict=True)
            states.start = mx.concatenate([mx.broadcast_to(mx.array(n, dtype=mx.int32), (b,)) for n, b in each])
        states.max_length = max(part.max_length for part in parts)
        return states

    def lanes(self, indices: Sequence[int], longest: int | None = None) -> "LayerStates":
        """Some lanes in states of their own, copied; `longest`: no fewer rows than any of them has, if that is known.

        What other lanes needed longer buffers for is left behind.
        """
        at, rows = mx.array(indices, dtype=mx.int32), self.max_length if longest is None else longest
        layers = [
            kv.take(x, at, rows) if isinstance(x, KV) else x and Recurrent(x.S[at], x.conv[at]) for x in self.folded()
        ]
        states = LayerStates(layers, len(indices), self.kv_format)
        length = self.length
        states.start = length if isinstance(length, int) else length[at]
        states.max_length = rows
        return states


def _merged(layers: Sequence[Layer], batches: Sequence[int], kv_format: KVFormat | None) -> Layer:
    """The lanes of one layer of several states; keys and values are quantized where some of them are."""
    if isinstance(layers[0], Recurrent):
        return Recurrent(*(mx.concatenate(list(parts)) for parts in zip(*(layer[:2] for layer in layers), strict=True)))
    if any(isinstance(layer, QuantizedKV) for layer in layers):
        layers = [kv_format.converted(layer) if isinstance(layer, KV) else layer for layer in layers]
    return kv.merge(list(zip(layers, batches, strict=True)))
