"""Options as people give them: each is checked here, for every function and command that takes it."""

import math
import numbers
import operator
import sys
from dataclasses import field
from typing import Any

MOST = sys.float_info.max
"""The largest finite number."""


def integer(name: str, value: Any, least: int | None = None, most: int | None = None, allowed: str = "") -> int:
    """The value as an int, NumPy's integers too. Raises ValueError for anything else: bools, floats and text.

    allowed: how the message says what is right.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        limits = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{name} is {value!r}: it must be {allowed or f'an integer{limits}'}")
    return found


def number(name: str, value: Any, least: float = -MOST, most: float = MOST, hint: str = "") -> float:
    """The value as a float, NumPy's numbers too. Raises ValueError for anything else, bools and NaN included."""
    found = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not least <= found <= most:
        limits = f" from {least} to {most}" if most < MOST else "" if least <= -MOST else f" of at least {least}"
        raise ValueError(f"{name} is {value!r}: it must be a finite number{limits}{f' ({hint})' if hint else ''}")
    return found


def _max_tokens(name: str, value: Any) -> int:
    allowed = "an integer of at least 1, or -1 for no limit"
    found = integer(name, value, -1, allowed=allowed)
    return found if found else integer(name, value, 1, allowed=allowed)


def _num_draft_tokens(name: str, value: Any) -> int | str | None:
    if value is None or (isinstance(value, str) and value in ("auto", "full")):
        return value
    return integer(name, value, 0, allowed="an integer of at least 0, 'auto' or 'full'")


def _optional(least: int) -> Any:
    return lambda name, value: None if value is None else integer(name, value, least)


def _at_least(least: int) -> Any:
    return lambda name, value: integer(name, value, least)


def _one_of(*choices: Any) -> Any:
    allowed = f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"

    def chosen(name: str, value: Any) -> Any:
        if value is None and None in choices or isinstance(value, str) and value in choices:
            return value
        found = integer(name, value, allowed=allowed)
        return found if found in choices else integer(name, value, found + 1, allowed=allowed)

    return chosen


CHECKS = {
    "max_tokens": _max_tokens,
    "num_draft_tokens": _num_draft_tokens,
    "seed": _optional(0),
    "prefill_step_size": _at_least(1),
    "max_lanes": _at_least(1),
    "max_waiting": _at_least(1),
    "max_kv_size": _optional(1),
    "kv_bits": _one_of(2, 3, 4, 5, 6, 8, "int8", None),
    "kv_group_size": _one_of(32, 64, 128),
    "quantized_kv_start": _at_least(0),
}


def check(name: str, value: Any) -> Any:
    """The value of an option, as Python's own. Raises ValueError with its name, the value and what is allowed."""
    return CHECKS[name](name, value)


def option(default: Any = None, help: str | None = None, **attrs: Any) -> Any:
    """A field of a dataclass that is an option of the command line too.

    attrs: what click gets besides; `names` besides that of the field, `least` value of a number.
    """
    return field(default=default, metadata={"help": help, **attrs})
