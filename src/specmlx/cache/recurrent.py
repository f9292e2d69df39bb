"""What a Gated DeltaNet layer remembers: a base that only accepted rows have entered, and the tape of the last pass."""

from typing import NamedTuple

import mlx.core as mx

from specmlx.kernels.gated_delta import Tape, advance, fold


class Recurrent(NamedTuple):
    """`S` float32 `[B, Hv, Dv, Dk]`, the last K - 1 conv inputs `conv` `[B, K-1, C]`, and the rows not yet applied.

    `tape` and its conv inputs `conv_rows` `[B, T, C]` are None where every row is in the base.
    """

    S: mx.array
    conv: mx.array
    tape: Tape | None = None
    conv_rows: mx.array | None = None

    def folded(self, count: int | mx.array) -> "Recurrent":
        """The layer with the first `count` tape rows applied (an int, or int32 `[B]` on the device) and no tape."""
        if self.tape is None:
            return self
        return Recurrent(fold(self.S, self.tape, count), self.conv_after(count))

    def advance(self, count: int | mx.array, *rows: mx.array) -> tuple[mx.array, mx.array, Tape]:
        """S with the first `count` tape rows applied, the outputs of new rows from there, and the new rows' tape.

        rows: q, k, v, g and beta, as `gated_delta.advance` takes them.
        """
        return advance(self.S, self.tape, count, *rows)

    def conv_after(self, count: int | mx.array) -> mx.array:
        """The last conv inputs `[B, K-1, C]` once the first `count` tape rows are in."""
        if self.conv_rows is None:
            return self.conv
        rows = mx.concatenate([self.conv, self.conv_rows], axis=1)
        keep = self.conv.shape[1]
        if isinstance(count, int):
            return rows[:, count : count + keep]
        at = count[:, None] + mx.arange(keep)
        return mx.take_along_axis(rows, at[..., None], axis=1)

    def arrays(self) -> list[mx.array]:
        """Everything that the layer holds."""
        tape = [] if self.tape is None else [*self.tape, self.conv_rows]
        return [self.S, self.conv, *tape]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays())
