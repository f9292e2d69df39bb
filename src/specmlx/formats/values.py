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


# Of each option the least integer, other values, and how a message says what is right (None: by the least integer).
CHECKS: dict[str, tuple[float, tuple, str | None]] = {
    "max_tokens": (1, (-1,), "an integer of at least 1, or -1 for no limit"),
    "num_draft_tokens": (0, ("auto", "full", None), "an integer of at least 0, 'auto' or 'full'"),
    "seed": (0, (None,), None),
    "prefill_step_size": (1, (), None),
    "max_lanes": (1, (), None),
    "max_waiting": (1, (), None),
    "max_kv_size": (1, (None,), None),
    "kv_bits": (math.inf, (2, 3, 4, 5, 6, 8, "int8", None), "2, 3, 4, 5, 6, 8, int8 or None"),
    "kv_group_size": (math.inf, (32, 64, 128), "32, 64 or 128"),
    "quantized_kv_start": (0, (), None),
}


def check(name: str, value: Any) -> Any:
    """The value of an option, as Python's own. Raises ValueError with its name, the value and what is allowed."""
    least, others, allowed = CHECKS[name]
    if (value is None or isinstance(value, str)) and value in others:
        return value
    allowed = allowed or f"an integer of at least {least}"
    found = integer(name, value, allowed=allowed)
    return found if found in others else integer(name, found, least, allowed=allowed)


def option(default: Any = None, help: str | None = None, **attrs: Any) -> Any:
    """A field of a dataclass that is an option of the command line too.

    attrs: what click gets besides; `names` besides that of the field, `least` value of a number.
    """
    return field(default=default, metadata={"help": help, **attrs})
