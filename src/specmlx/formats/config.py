"""Fields of a config.json, each of the kind and in the range that its reader can use."""

import reprlib
from dataclasses import MISSING, Field
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

REQUIRED: Any = object()
# Of a matrix or a vocabulary: what a file that is no model might say would take all memory.
MOST = 1 << 28
_LARGEST = 1e15
_NAMES = {int: "integer", float: "number", bool: "true or false", str: "name", dict: "object"}


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
    if not _fits(value, kind, above, least, most):
        found = f"config.json lacks {key}" if value is None else f"{key} is {shown(value)}"
        raise ValueError(f"{found}: it must be {_wanted(kind, above, least, most)}")
    return value


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


def _fits(value: Any, kind: Any, above: float | None, least: float | None, most: float | None) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(item, kind[0], above, least, most) for item in value)
    if kind not in (int, float):
        return isinstance(value, kind)
    # bool is an int to isinstance; NaN fails every comparison.
    if type(value) is not int and (kind is int or type(value) is not float) or not -_LARGEST < value < _LARGEST:
        return False
    return (above is None or value > above) and (least is None or value >= least) and (most is None or value <= most)


def _wanted(kind: Any, above: float | None, least: float | None, most: float | None) -> str:
    if isinstance(kind, list):
        return f"a list, each {_wanted(kind[0], above, least, most)}"
    if kind is bool:
        return _NAMES[kind]
    name = f"positive {_NAMES[kind]}" if above == 0 else _NAMES[kind]
    bounds = [f"above {above}"] if above else []
    bounds += [f"at least {least}"] if least is not None else []
    bounds += [f"at most {most}"] if most is not None and (above is not None or least is not None) else []
    article = "an" if name[0] in "aeiou" else "a"
    return " ".join([article, name, " and ".join(bounds)]).strip()
