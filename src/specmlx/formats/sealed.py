"""Safetensors files with a format's name and a checksum: written whole, private, refused when not as written."""

import hashlib
import json
import os
from pathlib import Path
from types import ModuleType

import mlx.core as mx

from specmlx.formats.checkpoint import safetensors, save_atomically

_CHUNK = 1 << 23


def save_sealed(
    path: Path, arrays: dict[str, mx.array], metadata: dict[str, str], format: str, system: ModuleType = os
) -> None:
    """Write arrays and metadata under a versioned `format` like `name-2`; only the file's owner may read it.

    Raises OSError, with what was there before as it was.
    """
    metadata = metadata | {"format": format}
    digest = hashlib.blake2b(digest_size=16)
    for part in safetensors(arrays, metadata):
        digest.update(part)
    save_atomically(path, arrays, metadata | {"checksum": digest.hexdigest()}, private=True, system=system)


def format_of(path: Path) -> str | None:
    """The format that a safetensors file names; None for other files, and for those that name none."""
    header = _header(path)
    found = None if header is None else header.get("__metadata__", {}).get("format")
    return found if isinstance(found, str) else None


def load_sealed(path: Path, format: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of a file of this format.

    Raises ValueError in one line for a file that is missing, foreign, of another version, cut or changed.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    found, name = format_of(path), format.rpartition("-")[0]
    if found is None or found.rpartition("-")[0] != name:
        raise ValueError(f"{path} is no {name} file, or it is cut")
    if found != format:
        raise ValueError(f"{path} is of the format {found}, this specmlx reads {format}: make it again")
    try:
        arrays, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
        checksum = metadata.pop("checksum", None)
        digest = hashlib.blake2b(digest_size=16)
        for part in safetensors(arrays, metadata):
            digest.update(part)
    except RuntimeError as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    if digest.hexdigest() != checksum:
        raise ValueError(f"{path} is damaged: its checksum is not that of its contents")
    return arrays, metadata


def _header(path: Path) -> dict | None:
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > path.stat().st_size - 8:
                return None
            header = json.loads(stream.read(length))
            return header if isinstance(header, dict) and isinstance(header.get("__metadata__", {}), dict) else None
    except (OSError, ValueError):
        return None
