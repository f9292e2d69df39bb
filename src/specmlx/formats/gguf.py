"""The header of a GGUF file (versions 2 and 3, little-endian), each number checked before it is used."""

import itertools
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specmlx.formats.header import MOST_NAME, regular_size

# ggml's types of tensors by values in a block: number, name and bytes of a block.
_BLOCKS = {
    1: "0 F32 4, 1 F16 2, 30 BF16 2",
    32: "2 Q4_0 18, 3 Q4_1 20, 6 Q5_0 22, 7 Q5_1 24, 8 Q8_0 34, 9 Q8_1 36, 20 IQ4_NL 18, 39 MXFP4 17",
    256: "10 Q2_K 84, 11 Q3_K 110, 12 Q4_K 144, 13 Q5_K 176, 14 Q6_K 210, 15 Q8_K 292, 34 TQ1_0 54, 35 TQ2_0 66, "
    "16 IQ2_XXS 66, 17 IQ2_XS 74, 18 IQ3_XXS 98, 19 IQ1_S 50, 21 IQ3_S 110, 22 IQ2_S 82, 23 IQ4_XS 136, 29 IQ1_M 56",
}
# Name of a type, values in a block of it, bytes of a block.
TYPES = {
    int(number): (name, values, int(size))
    for values, types in _BLOCKS.items()
    for number, name, size in map(str.split, types.split(", "))
}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEPTH = 4
# Bytes of a header and items of an array; the largest published vocabularies take some 15 MB and half a million merges.
_MOST, _MOST_ITEMS = 1 << 26, 1 << 22


class TensorInfo(NamedTuple):
    """A tensor in a file: `shape` with the fastest axis last, its blocks of `size` bytes from `start` to `end`."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int
    size: int


class GGUF:
    """What the header of a file says: `metadata`, and `tensors` by name."""

    def __init__(self, path: Path, stream: Any, size: int):
        self.path, self._stream, self._size, self._at = path, stream, size, 0
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"its version is {version}, not 2 or 3")
        tensors, pairs = self._number("Q"), self._number("Q")
        # A tensor's entry takes at least 24 bytes, a pair 13.
        if tensors * 24 + pairs * 13 > self._size:
            raise ValueError(f"{self._size} bytes can't hold {tensors} tensors and {pairs} pairs")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            if (key := self._name()) in self.metadata:
                raise ValueError(f"it has two values of {key}")
            self.metadata[key] = self._value(self._number("I"))
        entries = [self._entry() for _ in range(tensors)]
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or not 1 <= align <= self._size or align & (align - 1):
            raise ValueError(f"its alignment is {align!r}")
        start = -(-self._at // align) * align
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, (kind, values, size), offset in entries:
            if shape[-1] % values:
                raise ValueError(f"tensor {name} is {list(shape)}: {kind} comes in rows of {values}")
            first = start + offset
            end = first + math.prod(shape) // values * size
            if offset % align or end > self._size:
                raise ValueError(f"tensor {name} would lie at {first} to {end} of {self._size} bytes: it may be cut")
            if name in self.tensors:
                raise ValueError(f"it has two tensors named {name}")
            self.tensors[name] = TensorInfo(kind, shape, first, end, size)
        spans = sorted((info.start, info.end, name) for name, info in self.tensors.items())
        for (_, end, one), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                raise ValueError(f"tensors {one} and {other} overlap")

    def blocks(self, name: str) -> np.ndarray:
        """A tensor's bytes `[blocks, bytes of a block]`, mapped."""
        info = self.tensors[name]
        return np.memmap(self.path, np.uint8, "r", info.start, (info.end - info.start,)).reshape(-1, info.size)

    def _entry(self) -> tuple[str, tuple[int, ...], tuple[str, int, int], int]:
        name, axes = self._name(), self._number("I")
        if not 1 <= axes <= 4:
            raise ValueError(f"tensor {name[:80]} has {axes} axes")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        if not 1 <= math.prod(shape) <= 8 * self._size:
            raise ValueError(f"tensor {name[:80]} is {list(shape)}, which {self._size} bytes can't hold")
        if (kind := self._number("I")) not in TYPES:
            raise ValueError(f"tensor {name} has type {kind}, which is none that is known")
        return name, shape, TYPES[kind], self._number("Q")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _DEPTH:
            raise ValueError(f"a value has type {kind} at depth {depth}")
        kind, length = self._number("I"), self._number("Q")
        if length > _MOST_ITEMS:
            raise ValueError(f"it has an array of {length} values: no model needs so many")
        if kind in _NUMBERS:
            data = self._bytes(length * struct.calcsize(f"<{_NUMBERS[kind]}"))
            return list(struct.unpack(f"<{length}{_NUMBERS[kind]}", data))
        return [self._value(kind, depth + 1) for _ in range(length)]

    def _name(self) -> str:
        name = self._string()
        if len(name) > MOST_NAME or not name.isprintable():
            raise ValueError(f"{name[:40]!r} is no name of a tensor or a key")
        return name

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]

    def _bytes(self, length: int) -> bytes:
        self._at += length
        if self._at > self._size:
            raise ValueError(f"it ends at {self._size} bytes, in the middle of its header")
        if self._at > _MOST:
            raise ValueError(f"its header has more than {_MOST} bytes: no model's is so large")
        return self._stream.read(length)


def read_gguf(path: Path) -> GGUF:
    """The header of a file. Raises ValueError, one line with the file's name, for what is no whole GGUF file."""
    size = regular_size(path)
    try:
        with path.open("rb") as stream:
            return GGUF(path, stream, size)
    except (ValueError, OverflowError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"{path} is no whole GGUF file: {' '.join(str(error).split())[:200]}") from None
