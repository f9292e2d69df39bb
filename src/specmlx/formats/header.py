"""The header of a safetensors file, each number checked before it is used."""

import json
import math
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

# Bits of a value, by safetensors' names.
_NAMES = "F4 U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 I16 U16 F16 BF16 I32 U32 F32 I64 U64 F64 C64"
BITS = {"BOOL": 8} | {name: int(re.search(r"\d+", name)[0]) for name in _NAMES.split()}
# Bytes of a header, as in the safetensors library, and of any other file that is read whole.
MOST = 100_000_000
# Characters of a tensor's name, which messages show.
MOST_NAME = 200


class Entry(NamedTuple):
    """A tensor of a file: its dtype by safetensors' name, its shape, the place of its bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def regular_size(file: Path, most: float = math.inf) -> int:
    """Bytes of a regular file, links followed. Raises ValueError in one line for any other kind, and more than `most`.

    Opening a FIFO would wait for a writer, and a device may never end.
    """
    try:
        found = file.stat()
    except OSError as error:
        raise ValueError(f"can't read {file}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise ValueError(f"{file} is {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}, not a regular file")
    if found.st_size > most:
        raise ValueError(f"{file} has {found.st_size} bytes: no such file has more than {most}")
    return found.st_size


def read_small(file: Path, most: int = MOST) -> bytes:
    """The bytes of a regular file. Raises ValueError as `regular_size`, and where the file can't be read."""
    regular_size(file, most)
    try:
        with file.open("rb") as stream:
            return stream.read(most)
    except OSError as error:
        raise ValueError(f"can't read {file}: {error.strerror}") from None


def read_json(file: Path, most: int = MOST) -> Any:
    """The value in a JSON file. Raises ValueError in one line as `read_small`, and for what is not JSON."""
    text = read_small(file, most)
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({' '.join(str(error).split())[:200]})") from None


def check_small_files(folder: Path) -> None:
    """Raise ValueError as `read_small` for a config or tokenizer file that a library will open by itself."""
    for pattern in ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*"):
        for file in folder.glob(pattern):
            if not file.is_dir():
                regular_size(file, MOST)


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a whole safetensors file. Raises ValueError, one line with the file's name, for any other."""
    try:
        return entries(*header_text(file))
    except ValueError as error:
        raise ValueError(f"{file} is corrupt: {error}; download it again") from None


def header_text(file: Path) -> tuple[bytes, int]:
    """The header of a safetensors file, and how many bytes follow it. Raises ValueError where there is none."""
    size = regular_size(file)
    with file.open("rb") as stream:
        length = header_length(stream.read(8), size)
        return stream.read(length), size - 8 - length


def header_length(first: bytes, size: int) -> int:
    """Bytes of the header, from the first 8 of a file of `size` bytes. Raises ValueError where there can be none."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(size - 8, MOST):
        raise ValueError("it has no safetensors header")
    return length


def entries(text: bytes, size: int) -> dict[str, Entry]:
    """The tensors of a header that `size` bytes follow. Raises ValueError for a header that can't be."""
    header, end = parsed(text), 0
    found = {name: _entry(name, value) for name, value in header.items() if name != "__metadata__"}
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise ValueError(f"its header leaves a gap or an overlap before {name[:80]!r}")
        end = entry.end
    if end != size:
        raise ValueError(f"it has {size} bytes behind its header, which says {end} bytes")
    return found


def metadata(text: bytes) -> dict[str, str]:
    """The metadata of a header. Raises ValueError where they are not strings by name."""
    found = parsed(text).get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its header's metadata are no strings")
    return found


def parsed(text: bytes) -> dict[str, Any]:
    """A header as an object. Raises ValueError for any other text, and for a name that is there twice."""
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its safetensors header is no object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _entry(name: str, value: Any) -> Entry:
    value = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    whole = isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not whole or dtype not in BITS or not all(type(n) is int and 0 <= n < 1 << 63 for n in [*shape, *offsets]):
        raise ValueError(f"its header's entry for {name[:80]!r} is none of safetensors'")
    if len(name) > MOST_NAME or not name.isprintable():
        raise ValueError(f"its header has {name[:40]!r}, which is no name of a tensor")
    start, end = offsets
    if not start <= end or math.prod(shape) * BITS[dtype] != 8 * (end - start):
        raise ValueError(f"its header says {end - start} bytes for {name[:80]!r}, a {dtype} of {str(shape)[:80]}")
    return Entry(dtype, tuple(shape), start, end)
