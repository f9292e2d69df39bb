"""Who runs an operator on this chip, by shape, dtype and number of rows: a kernel of ours, or mlx.

Products are raced against mlx's, and the choices are put into a model's layers (`chosen`). The other operators are
`Dispatched` when they are called: ours runs where it was found right.
"""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, update_wrapper
from itertools import groupby
from types import ModuleType
from typing import Any

import mlx.core as mx

from specmlx.kernels.choice.operator import FIXED, STOCK, Key, Operator
from specmlx.kernels.choice.race import NoRace, race
from specmlx.kernels.choice.table import Outcome, Table, entry_name

OFF = "SPECMLX_KERNELS"  # 0 in the environment: no kernel of ours is used


def on_metal() -> bool:
    """Whether mlx runs on a Metal device."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def metal_factory() -> Callable | None:
    """What makes a Metal kernel of its source, or None: not on a Metal device, or kernels are switched off."""
    return mx.fast.metal_kernel if on_metal() and os.environ.get(OFF) != "0" else None


class Dispatched:
    """A function that runs our kernel where there is Metal and the kernel is right for the arguments, else mlx.

    operator: as `OPERATORS` names it. reference, metal: where the function of this name is mlx's operations, and the
    kernel's launch, which takes `factory` too. key: of the same arguments, as of `kernel`.
    """

    def __init__(
        self, operator: str, reference: ModuleType, metal: ModuleType, name: str, key: Callable[..., dict | None]
    ):
        self.operator, self.key = operator, key
        self.reference, self.metal = getattr(reference, name), getattr(metal, name)
        update_wrapper(self, self.reference)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if metal_factory() is None or (factory := kernel(self.operator, self.key(*args, **options))) is None:
            return self.reference(*args, **options)
        return self.metal(*args, **options, factory=factory)

    def on_kernel(self, *args: Any) -> bool:
        """Whether a kernel of ours runs for these arguments."""
        return metal_factory() is not None and kernel(self.operator, self.key(*args)) is not None


def kernel(operator: str, key: dict | None) -> Callable | None:
    """What makes the operator's kernels, or None where mlx runs it: not on Metal, off, or not right.

    key: dtype and shape; None where the kernels don't take it. A shape that is new on this chip is checked first, which
    takes some seconds.
    """
    factory = metal_factory()
    return factory if factory is not None and key is not None and serves(operator, tuple(key.items())) else None


@lru_cache
def serves(operator: str, key: tuple) -> bool:
    """Whether the operator's kernels are right for this key, as of `dict.items`, on this chip."""
    # It imports the kernels' packages, which import this module.
    from specmlx.kernels.choice.operators import OPERATORS

    [known] = (each for each in OPERATORS if each.name == operator)
    named = {name: dtype_name(value) if isinstance(value, mx.Dtype) else value for name, value in key}
    return _chooser().choose(known, named).variant(1) != STOCK


def why_not(operator: str) -> str:
    """Why `kernel` has none for this operator."""
    if os.environ.get(OFF) == "0":
        return f"the kernel of {operator} is off: {OFF}=0"
    return _chooser().refused.get(operator, f"{operator} has no kernel for heads like this model's")


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


@lru_cache
def _chooser() -> "Chooser":
    return Chooser(tell=to_stderr)


@dataclass(frozen=True)
class Choice:
    """The variant that serves a shape, by the number of rows; stock mlx beyond the last of `by_rows`."""

    by_rows: tuple[str, ...]  # for 1, 2, ... rows

    @classmethod
    def same(cls, operator: Operator, variant: str, together: bool = False) -> "Choice":
        """One variant up to the last row count of a race, or up to that of many lanes together."""
        return cls((variant,) * (operator.together if together else operator.rows[-1]))

    def variant(self, rows: int) -> str:
        return self.by_rows[rows - 1] if rows <= len(self.by_rows) else STOCK

    def __str__(self) -> str:
        """`1: stock, 2-32: A`, or the variant alone."""
        if len(set(self.by_rows)) == 1:
            return self.by_rows[0]
        parts, last = [], 0
        for variant, run in groupby(self.by_rows):
            begun, last = last + 1, last + len(list(run))
            parts.append(f"{begun}{f'-{last}' if last > begun else ''}: {variant}")
        return ", ".join(parts)


def to_stderr(line: str) -> None:
    """A `tell` for those who would wonder why loading takes longer."""
    print(f"specmlx: {line}", file=sys.stderr)


@dataclass(kw_only=True)
class Chooser:
    """Picks the kernel of each (operator, shape) and keeps what it picked.

    consistent: one variant of a product for every row count, so that a row has the same bits in a pass of one row and
    of many. table: what is known of the chip; default: its file. race: how an unknown shape is decided; `available`:
    whether kernels can run here at all. tell: takes a line before a race, which takes some seconds, once for a shape
    and chip. refused: why mlx runs operators that aren't raced, by name. no_race: why no race can be held.
    """

    consistent: bool = False
    table: Table = field(default_factory=Table.read)
    race: Callable[[Operator, Key], Outcome] = race
    available: bool = field(default_factory=on_metal)
    tell: Callable[[str], None] = lambda line: None
    choices: dict[str, Choice] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    no_race: str | None = None

    def off(self, operator: Operator) -> str | None:
        """Why stock mlx serves this operator in any case, or None."""
        if not self.available:
            return "mlx does not run on a Metal device here"
        if os.environ.get(OFF) == "0":
            return f"{OFF}=0"
        if operator.name in self.table.off:
            return f"switched off (specmlx kernels --on {operator.name} undoes it)"
        return None

    def choose(self, operator: Operator, key: Key) -> Choice:
        """The choice for a shape; a shape that is new on this chip is raced or checked first, in some seconds."""
        name = entry_name(operator, key)
        if name not in self.choices:
            self.choices[name] = self._choose(operator, key, name)
        return self.choices[name]

    def _choose(self, operator: Operator, key: Key, name: str) -> Choice:
        if reason := self.off(operator):
            self.refused[operator.name] = f"the kernel of {operator.name} is off: {reason}"
            if self.consistent and self.available and operator.raced:
                return Choice.same(operator, FIXED, together=True)
            return Choice.same(operator, STOCK)
        outcome = self.table.entries.get(name) or self._raced(operator, key, name)
        if not operator.raced:
            right = [variant for variant in operator.variants(key) if variant not in outcome.dropped]
            if not right:
                why = "; ".join(dict.fromkeys(outcome.dropped.values()))
                self.refused[operator.name] = f"the kernel of {name} is not used on {self.table.chip}: {why}"
            return Choice.same(operator, right[0] if right else STOCK)
        if self.consistent:
            variant = outcome.for_every_row_count(operator.variants(key))
            return Choice.same(operator, FIXED if variant == STOCK else variant, together=True)
        return Choice(tuple(outcome.fastest(n) for n in range(1, operator.rows[-1] + 1)))

    def _raced(self, operator: Operator, key: Key, name: str) -> Outcome:
        """What a race finds, kept in the table; where none can be held nothing is kept, and no variant is right."""
        if self.no_race is None:
            shape = " ".join(str(value) for value in key.values())
            self.tell(f"choosing the kernel of {operator.name} {shape} on {self.table.chip}, once")
            try:
                outcome = self.table.entries[name] = self.race(operator, key)
            except NoRace as problem:
                # The next shape would wait for the same.
                self.no_race = str(problem)
                warnings.warn(f"kernels that were not checked before are not used: {problem}", stacklevel=5)
        if self.no_race is not None:
            return Outcome(dropped=dict.fromkeys(operator.variants(key), self.no_race))
        for why in dict.fromkeys(outcome.dropped.values()):
            variants = ", ".join(v for v in outcome.dropped if outcome.dropped[v] == why)
            warnings.warn(f"kernel {variants} of {name} is not used on {self.table.chip}: {why}", stacklevel=5)
        self.table.write()
        return outcome

    def race_again(self, operator: Operator, key: Key) -> Choice:
        """Race a shape that is known already; what is known stays where no race can be held."""
        name = entry_name(operator, key)
        known = self.table.entries.pop(name, None)
        self.choices.pop(name, None)
        self.choose(operator, key)
        if known is not None and name not in self.table.entries:
            self.table.entries[name] = known
            del self.choices[name]
        return self.choose(operator, key)
