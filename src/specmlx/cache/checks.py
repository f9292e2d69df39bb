"""What a file says of a conversation, checked before it is used: in itself as it is read, then against the model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.cache.kv import KV
from specmlx.cache.layers import Layer
from specmlx.cache.quantized import INT8, KVFormat
from specmlx.cache.recurrent import Recurrent
from specmlx.formats.config import read, shown

# By how many arrays a layer's keys and values are kept in: the kinds of the keys', which are the values' too.
_PARTS = {2: (mx.floating,), 4: (mx.int8, mx.float32), 6: (mx.uint32, mx.floating, mx.floating)}


@contextmanager
def damaged(path: str | Path) -> Iterator[None]:
    """Turn what reading a file's parts raises into a ValueError of one line that names the file."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        raise ValueError(f"{path} is damaged: {' '.join(what.split())[:160]}") from None


def natural(fields: Mapping[str, Any], name: str, default: int | None = 0, below: int = 1 << 31) -> int | None:
    """A field that is a whole number from 0 up, or its default. Raises ValueError for anything else."""
    return read(fields, name, int, default, least=0, most=below - 1)


def texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Fields that are texts. Raises ValueError for anything else."""
    return {name: read(fields, name, str) for name in fields}


def kv_format(fields: Mapping[str, Any] | None) -> KVFormat | None:
    """What `asdict` made of a format. Raises ValueError for anything else."""
    if fields is None:
        return None
    bits, group = (fields[name] for name in ("bits", "group_size"))
    if group is None and bits != 8:
        raise ValueError(f"its keys are in {shown(bits)} bits")
    return KVFormat.read(INT8 if group is None else bits, group or 64, natural(fields, "start"))


def check_layer(layer: KV | Recurrent, rows: int, what: str) -> None:
    """Raise ValueError where a layer can't be one of a single conversation of so many rows; `what`: its name."""
    if isinstance(layer, Recurrent):
        whole = layer.S.ndim == 4 and layer.conv.ndim == 3 and layer.S.shape[0] == layer.conv.shape[0] == 1
        if not whole or layer.S.dtype != mx.float32 or not mx.issubdtype(layer.conv.dtype, mx.floating):
            raise ValueError(f"{what} is no state: {_named(layer.arrays())}")
    else:
        arrays = layer.arrays()
        if len(arrays) not in _PARTS:
            raise ValueError(f"{what} is in {len(arrays)} arrays")
        whole = all(x.ndim == 4 and x.shape[:3] == (1, arrays[0].shape[1], rows) for x in arrays)
        for x, kind in zip(arrays, _PARTS[len(arrays)] * 2, strict=True):
            if not rows or not whole or not mx.issubdtype(x.dtype, kind):
                raise ValueError(f"{what} is none of {rows} rows: {_named(arrays)}")


def check_fit(
    layers: Mapping[int, Layer],
    empty: Mapping[int, Layer],
    heads: tuple[int, int],
    kv_format: KVFormat | None = None,
    what: str = "layer",
) -> None:
    """Raise ValueError, naming the layer, where layers that hold rows can't be those of a model.

    empty: the model's layers before their first row; heads: its key-value heads and their size; kv_format: what keys
    and values may be kept in besides the model's dtype.
    """
    row = mx.zeros((1, heads[0], 1, heads[1]))
    formats = [KV(row, row), *([kv_format.converted(KV(row, row))] if kv_format else [])]
    for i, own in empty.items():
        layer = layers.get(i)
        if isinstance(own, Recurrent):
            fits = isinstance(layer, Recurrent) and layer.S.shape[1:] == own.S.shape[1:]
            fits = fits and layer.conv.shape[1:] == own.conv.shape[1:]
        else:
            fits = isinstance(layer, KV) and any(_sizes(layer) == _sizes(known) for known in formats)
        if not fits:
            found = "nothing" if layer is None else _named(layer.arrays())
            raise ValueError(f"{what} {i} is another model's: {found}")


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for an id that the model does not have."""
    if len(tokens) and max(tokens) >= vocab_size:
        raise ValueError(f"token {max(tokens)} is another model's: this one has {vocab_size}")


def packed_fits(packed: Mapping[str, mx.array], known: Mapping[str, mx.array], rows: int, vocab_size: int) -> bool:
    """Whether a drafter's packed context of a conversation of so many rows is of the same kind as one that is known."""
    if packed.keys() != known.keys():
        return False
    for name, x in packed.items():
        own = known[name]
        if x.dtype != own.dtype or x.ndim != own.ndim:
            return False
        whole = mx.issubdtype(x.dtype, mx.integer)
        # Where rows are: the last axis of ids, the one before it of keys and values.
        along = 2 if x.ndim == 4 else 1 if whole else None
        if any(a != b and axis != along for axis, (a, b) in enumerate(zip(x.shape, own.shape, strict=True))):
            return False
        if along is not None and x.ndim > along and not 0 < x.shape[along] <= rows:
            return False
        if whole and not (0 <= x.min().item() and x.max().item() < (rows + 1 if x.ndim == 1 else vocab_size)):
            return False
    # Each length that is named is that of keys and values, and of nothing longer.
    lengths = {x.item() for x in packed.values() if x.ndim == 1}
    return all(x.ndim != 4 or x.shape[2] in lengths for x in packed.values())


def _sizes(kv: KV) -> list[tuple]:
    return [(x.shape[1], x.shape[3], mx.issubdtype(x.dtype, mx.floating)) for x in kv.arrays()]


def _named(arrays: Sequence[mx.array]) -> str:
    return ", ".join(f"{str(x.dtype).rpartition('.')[2]} {list(x.shape)}" for x in arrays)[:160]
