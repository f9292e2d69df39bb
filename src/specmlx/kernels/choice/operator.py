"""What a race needs to know of an operator, and what it finds out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import mlx.core as mx

STOCK = "stock"
FIXED = "stock-32"  # stock mlx on a fixed number of rows: one kernel of its for few rows and for fewer
TOGETHER = 32 * 17  # rows of a pass: 32 lanes of the widest block
Key = Mapping[str, Any]  # shape, format and dtype, as JSON can hold them


class Operator(Protocol):
    """An operator with kernels of ours.

    name: as `specmlx kernels` shows it. address: "module:attribute", from where the child process imports it.
    one_order: the variants that give a row the same bits whatever the number of rows. rows: the row counts to race.
    by_rows: whether row counts may be served by different variants. firm: whether a kernel of ours that is right serves
    whatever the race says. fixed: whether stock mlx can be held to one kernel, as FIXED. together: how many rows lanes
    have together at most, none of which must part from its lane alone.
    """

    name: str
    address: str
    one_order: tuple[str, ...]
    rows: tuple[int, ...]
    by_rows: bool
    firm: bool
    fixed: bool
    together: int

    def variants(self, key: Key) -> tuple[str, ...]:
        """Our kernels that take it; STOCK too where mlx's own is not trusted unchecked."""

    def small(self, key: Key) -> Key:
        """The same operator on an input small enough for the reference."""

    def nbytes(self, key: Key) -> int:
        """Bytes of the weights of one input."""

    def inputs(self, key: Key, rows: int, seed: int, exact: bool) -> Any:
        """Random inputs. `exact`: such that the reference holds for them; otherwise only their cost matters."""

    def run(self, variant: str, inputs: Any) -> mx.array:
        """The result of a variant, or of mlx's own operation for "stock"."""

    def reference(self, inputs: Any) -> mx.array:
        """The result by the readable reference."""

    def tolerance(self, key: Key) -> float:
        """The largest error that is right, relative to the largest value of the result."""


def import_operator(address: str) -> Operator:
    module, _, attribute = address.partition(":")
    return getattr(import_module(module), attribute)


@dataclass
class Outcome:
    """Of a race: seconds of a call by row count and variant, and why variants were dropped."""

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def fastest(self, rows: int) -> str:
        """The variant for `rows`, by the next row count that was measured; stock beyond the last."""
        measured = min((n for n in self.seconds if n >= rows), default=None)
        times = self.seconds.get(measured, {})
        return min(times, key=times.__getitem__, default=STOCK)

    def for_every_row_count(self, variants: tuple[str, ...]) -> str:
        """The fastest over all row counts together of those variants that ran in each; stock if none did."""
        ran = [v for v in variants if self.seconds and all(v in times for times in self.seconds.values())]
        return min(ran, key=lambda v: sum(times[v] for times in self.seconds.values()), default=STOCK)
