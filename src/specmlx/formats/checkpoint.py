"""The files of a checkpoint directory, and what is wrong with them in one line."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from specmlx.formats.atomic import write_atomically
from specmlx.formats.header import Entry, read_header, read_small

_DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int64: "I64",
    mx.int32: "I32",
    mx.int16: "I16",
    mx.int8: "I8",
    mx.uint64: "U64",
    mx.uint32: "U32",
    mx.uint16: "U16",
    mx.uint8: "U8",
    mx.bool_: "BOOL",
}

# Bytes of a config.json.
MOST_CONFIG = 1 << 24
# Where a folder says how the drafter in it is trained; its config.json comes at the end.
TRAINING = "training/run.json"


def read_config(path: Path, name: str = "config.json") -> dict[str, Any]:
    """A directory's config.json. Raises ValueError where there is none, or no JSON object in it."""
    file = path / name
    if not file.exists():
        if (path / TRAINING).is_file():
            raise ValueError(f"{path} holds an unfinished training: go on with specmlx train … --out {path} --resume")
        raise ValueError(f"{file} not found: a model is a directory with config.json and *.safetensors, or a Hub id")
    text = read_small(file, MOST_CONFIG)
    try:
        config = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({' '.join(str(error).split())[:200]})") from None
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
        read_header(file)
    return files


def tensors_of(path: Path) -> dict[str, Entry]:
    """All tensors of a directory's safetensors files, by the files' headers. Raises ValueError as `weight_files`."""
    return {name: entry for file in weight_files(path) for name, entry in read_header(file).items()}


def save_atomically(
    path: Path,
    arrays: dict[str, mx.array],
    metadata: dict[str, str],
    private: bool = False,
    system: ModuleType = os,
) -> None:
    """Write a safetensors file so that a crash leaves the old one or the new one (see `write_atomically`)."""
    write_atomically(path, safetensors(arrays, metadata), private, system)


def safetensors(arrays: dict[str, mx.array], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, part by part: header, then the tensors by name."""
    header, end = {"__metadata__": dict(sorted(metadata.items()))}, 0
    names = sorted(arrays)
    for name in names:
        x = arrays[name]
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        if arrays[name].size:
            # As bytes, since Python's buffers know no bfloat16.
            yield memoryview(mx.contiguous(arrays[name].reshape(-1)).view(mx.uint8))
