"""What a check or a race needs to know of an operator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import mlx.core as mx

STOCK = "stock"
FIXED = "stock-32"  # stock mlx on a fixed number of rows: one kernel of its for few rows and for fewer
METAL = "metal"  # our kernel, of operators that have one
REFERENCE = "reference"  # the readable form that others are compared with
TOGETHER = 32 * 17  # rows of a pass: 32 lanes of the widest block
Key = Mapping[str, Any]  # shape, format and dtype, as JSON can hold them


@dataclass(frozen=True)
class Operator:
    """An operator with kernels of ours, each of which gives a row the same bits whatever the number of rows.

    factory: makes the kernels. name: as `specmlx kernels` shows it. rows: the row counts to check, and to race.
    raced: whether row counts go to the fastest variant, which stock mlx may be; else the first of `variants` that is
    right serves all. together: how many rows lanes have together at most, none of which must part from its lane alone.
    roundings: of a result to its dtype.
    """

    factory: Callable = mx.fast.metal_kernel

    name: ClassVar[str]
    rows: ClassVar[tuple[int, ...]] = (1, 8, 16)
    raced: ClassVar[bool] = False
    together: ClassVar[int] = TOGETHER
    roundings: ClassVar[int] = 1

    @property
    def address(self) -> str:
        """From where the child process imports it, "module:attribute"."""
        return f"{type(self).__module__}:{self.name.upper()}"

    def variants(self, key: Key) -> tuple[str, ...]:
        """Our kernels that take it; STOCK too where mlx's own is not trusted unchecked."""
        return (METAL,)

    def small(self, key: Key) -> Key:
        """The same operator on an input small enough for the reference."""
        return key

    def nbytes(self, key: Key) -> int:
        """Bytes of the weights of one input, of operators that are raced."""
        raise NotImplementedError

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> Any:
        """Random inputs: `exact` ones for a check, or those whose cost is what a race is about."""
        raise NotImplementedError

    def run(self, variant: str, inputs: Any) -> mx.array:
        """The result of a variant, of mlx's own operation for "stock", or of the reference."""
        raise NotImplementedError

    def tolerance(self, key: Key) -> float:
        """The largest error that is right, relative to the largest value of the result."""
        return self.roundings * {"bfloat16": 2**-7, "float16": 2**-10}.get(key["dtype"], 1e-5)

    def function(self, variant: str, package: ModuleType, name: str) -> Callable:
        """The function of this name of a package's kernels or, unless the variant is theirs, of its reference."""
        if variant == METAL:
            return partial(getattr(package.metal, name), factory=self.factory)
        return getattr(package.reference, name)
