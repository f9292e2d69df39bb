"""Fields of a config.json, each of the kind and in the range that its reader can use."""

import reprlib
from dataclasses import MISSING, Field
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

REQUIRED: Any = object()
# Of a matrix or a vocabulary: what a file that is no model might say would take all memory.
MOST = 1 << 28
_LARGEST = 1e15
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a name", dict: "an object"}


def read(
    config: dict[str, Any],
    key: str,
    kind: Any,
    default: Any = REQUIRED,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """The value of a field, or `default` where it is missing or null.

    kind: int, float (any finite number), bool, str, dict, or [kind] for a list of them.
    above, least, most: the range of a number, or of each in a list; `above` itself is outside.

    Raises ValueError, one line, for a missing field that has no default, another kind and a number outside the range.
    """
    value = config.get(key)
    if value is None and default is not REQUIRED:
        return default
    item, values = (kind[0], value) if isinstance(kind, list) else (kind, [value])

    def fits(x: Any) -> bool:
        if item not in (int, float):
            return isinstance(x, item)
        # bool is an int to isinstance; NaN fails every comparison.
        if type(x) not in (int, item) or not -_LARGEST < x < _LARGEST:
            return False
        return (above is None or x > above) and (least is None or x >= least) and (most is None or x <= most)

    if isinstance(values, list) and all(map(fits, values)):
        return value
    bounds = [f"above {above}"] if above else []
    bounds += [f"at least {least}"] if least is not None else []
    bounds += [f"at most {most}"] if most is not None and (above is not None or least is not None) else []
    name = f"a positive {_NAMES[item].split()[-1]}" if above == 0 else _NAMES[item]
    wanted = f"{'a list, each ' * (item is not kind)}{name} {' and '.join(bounds)}".strip()
    found = f"config.json lacks {key}" if value is None else f"{key} is {shown(value)}"
    raise ValueError(f"{found}: it must be {wanted}")


def read_field(config: dict[str, Any], field: Field, **bounds: float) -> Any:
    """The value of a dataclass's field, of its annotated kind and with its default (None for a factory).

    `bounds` and what raises are those of `read`.
    """
    kind = field.type
    if isinstance(kind, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    kind = list(get_args(kind)) if get_origin(kind) is list else get_origin(kind) or kind
    optional = field.default_factory is not MISSING
    default = None if optional else REQUIRED if field.default is MISSING else field.default
    return read(config, field.name, kind, default, **(bounds if kind in (int, float, [int]) else {}))


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the fields of its `text_config`, which count first."""
    return {**config, **read(config, "text_config", dict, {})}


def shown(value: Any) -> str:
    """A value as a message shows it: in one line of at most 60 characters."""
    text = reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
