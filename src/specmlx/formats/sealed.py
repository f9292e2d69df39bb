"""Safetensors files with a format's name and a checksum: written whole, private, refused when not as written."""

import hashlib
from pathlib import Path

import mlx.core as mx

from specmlx.formats.atomic import write_atomically
from specmlx.formats.checkpoint import DTYPES, header_bytes, safetensors
from specmlx.formats.header import entries, header_text, metadata, parsed, regular_size

_CHUNK = 1 << 23


def save_sealed(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str], format: str) -> None:
    """Write arrays and metadata under a versioned `format` like `name-2`; only the file's owner may read it.

    Raises OSError, with what was there before as it was.
    """
    metadata = metadata | {"format": format}
    digest = hashlib.blake2b(digest_size=16)
    for part in safetensors(arrays, metadata):
        digest.update(part)
    write_atomically(path, safetensors(arrays, metadata | {"checksum": digest.hexdigest()}), private=True)


def format_of(path: Path) -> str | None:
    """The format that a safetensors file names; None for other files, and for those that name none."""
    try:
        return metadata(header_text(path)[0]).get("format")
    except (OSError, ValueError):
        return None


def load_sealed(path: Path, format: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays, which are still to be read, and metadata of a file of this format.

    Raises ValueError in one line for a file that is missing, foreign, of another version, cut, changed or appended to.
    """
    regular_size(path)
    found, name = format_of(path), format.rpartition("-")[0]
    if found is None or found.rpartition("-")[0] != name:
        raise ValueError(f"{path} is no {name} file, or it is cut")
    if found != format:
        raise ValueError(f"{path} is of the format {found[:40]}, this specmlx reads {format}: make it again")
    try:
        text, size = header_text(path)
        if unknown := {entry.dtype for entry in entries(text, size).values()} - {*DTYPES.values()}:
            raise ValueError(f"it holds {unknown.pop()}")
        kept = metadata(text)
        checksum = kept.pop("checksum", None)
        digest = hashlib.blake2b(header_bytes(parsed(text) | {"__metadata__": kept}), digest_size=16)
        with path.open("rb") as stream:
            stream.seek(8 + len(text))
            while part := stream.read(_CHUNK):
                digest.update(part)
        if checksum != digest.hexdigest():
            raise ValueError("its checksum is not that of its contents")
        return mx.load(str(path), format="safetensors"), kept
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
