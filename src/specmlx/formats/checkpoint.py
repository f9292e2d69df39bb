"""The files of a checkpoint directory, and what is wrong with them in one line."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx


def read_config(path: Path, name: str = "config.json") -> dict[str, Any]:
    """A directory's config.json. Raises ValueError where there is none, or no JSON object in it."""
    file = path / name
    if not file.is_file():
        raise ValueError(f"{file} not found: a model is a directory with config.json and *.safetensors, or a Hub id")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not an object")
    return config


def weight_files(path: Path) -> list[Path]:
    """A directory's safetensors files, each found whole. Raises ValueError where there is none, or one is cut.

    mx.load reads lazily: without this a cut file would only be noticed at its last tensor, or not at all.
    """
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {path}: the download may be incomplete")
    for file in files:
        _check_whole(file)
    return files


def save_atomically(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """Write a safetensors file so that a crash leaves the old one or the new one, never half of one."""
    temporary = path.with_name(f".{path.stem}.partial.safetensors")
    mx.save_safetensors(str(temporary), arrays, metadata=metadata)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _check_whole(file: Path) -> None:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise ValueError
            header = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is corrupt: it has no safetensors header; download it again") from None
    if 8 + length + end != size:
        raise ValueError(f"{file} has {size} bytes, its header says {8 + length + end}: download it again")
