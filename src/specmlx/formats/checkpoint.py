"""The files of a checkpoint directory, and what is wrong with them in one line."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.formats.config import shown
from specmlx.formats.header import MOST, Entry, read_header, read_json

DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.bool_: "BOOL"}
DTYPES |= {getattr(mx, f"{kind}{n}"): f"{kind[0].upper()}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)}

# Bytes of a config.json.
MOST_CONFIG = 1 << 24
# What the name of an index ends with.
INDEX = ".safetensors.index.json"
# Weights that torch and NumPy write.
_OTHER_FORMATS = (".bin", ".pth", ".pt", ".ckpt", ".npz")
# Where a folder says how the drafter in it is trained; its config.json comes at the end.
TRAINING = "training/run.json"


def read_config(path: Path, name: str = "config.json", most: int = MOST_CONFIG) -> dict[str, Any]:
    """A directory's config.json. Raises ValueError where there is none, or no JSON object in it."""
    file = path / name
    if not file.exists():
        if (path / TRAINING).is_file():
            raise ValueError(f"{path} holds an unfinished training: go on with specmlx train … --out {path} --resume")
        raise ValueError(f"{file} not found: a model is a directory with config.json and *.safetensors, or a Hub id")
    if not isinstance(config := read_json(file, most), dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not an object")
    return config


def eos_token_ids(config: dict[str, Any], path: Path) -> dict[str, list[int]]:
    """{"eos_token_id": all that a config.json, its text_config and the directory's generation_config.json name}.

    Empty where none is named, since a model's code may have stop tokens of its own for that case.
    Raises ValueError in one line for what is neither a token id nor a list of them.
    """
    name = "generation_config.json"
    generation = read_config(path, name) if os.path.lexists(path / name) else {}
    found: dict[int, None] = {}
    for where, part in (("config.json", config), ("text_config", config.get("text_config")), (name, generation)):
        value = part.get("eos_token_id") if isinstance(part, dict) else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if bad := [i for i in ids if type(i) is not int or i < 0]:
            raise ValueError(f"{path}: eos_token_id of {where} is {shown(value)}: {shown(bad[0])} is no token id")
        found |= dict.fromkeys(ids)
    return {"eos_token_id": list(found)} if found else {}


def shards_of(path: Path, stem: str = "model") -> dict[Path, dict[str, Entry]]:
    """A directory's safetensors files that count, each with the tensors that are taken from it, by the files' headers.

    Raises ValueError in one line as `chosen_shards`, and for a file that is cut or corrupt, which mx.load, being lazy,
    would notice at the last tensor only.
    """
    name = f"{stem}{INDEX}"
    index = read_config(path, name, MOST) if os.path.lexists(path / name) else None
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names and index is None:
        if others := sorted(file.name for file in path.iterdir() if file.suffix in _OTHER_FORMATS):
            raise ValueError(f"{path} has no *.safetensors but {others[0]}: save it with safetensors")
        raise ValueError(f"no *.safetensors in {path}: the download may be incomplete")
    chosen = chosen_shards(names, index, lambda name: read_header(path / name), path, stem)
    return {path / name: entries for name, entries in chosen.items()}


def chosen_shards(
    names: list[str],
    index: dict[str, Any] | None,
    read: Callable[[str], dict[str, Entry]],
    where: Path | str,
    stem: str = "model",
) -> dict[str, dict[str, Entry]]:
    """Of a folder's safetensors files those that count, each with the tensors that are taken from it.

    Args:
        index: what the folder's index holds. Its weight_map says which files count, and which of them a tensor is
            taken from. Without it every file counts whose name begins with `stem`, or every file if none does.
        read: gives a file's tensors.

    Raises ValueError in one line for an index that names no files of its folder or that the files contradict, and for a
    tensor that two files hold.
    """
    if index is None:
        named, files = {}, [name for name in names if name.startswith(stem)] or names
    else:
        named, file = index.get("weight_map"), f"{where}/{stem}{INDEX}"
        if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
            raise ValueError(f"{file} has no weight_map from tensors to files: download it again")
        files = sorted(set(named.values()))
        if outside := [name for name in files if name in (".", "..") or Path(name).name != name]:
            raise ValueError(f"{file} names {outside[0][:80]!r}: a model's files are in the folder of its index")
        if lost := sorted(set(files) - set(names)):
            raise ValueError(
                f"{where} lacks {lost[0]}, which {stem}{INDEX} names: download it, or delete the index if it is stale"
            )
    chosen: dict[str, dict[str, Entry]] = {}
    found: dict[str, str] = {}
    for file in files:
        chosen[file] = {name: entry for name, entry in read(file).items() if named.get(name, file) == file}
        for name in chosen[file]:
            if (other := found.setdefault(name, file)) != file:
                raise ValueError(f"{where}: {name} is in {other} and in {file}: delete the one that isn't the model's")
    if lost := [name for name in named if name not in found]:
        raise ValueError(f"{where}: {named[lost[0]]} lacks {lost[0]}, which the index says is there: download both")
    return chosen


def tensors_of(path: Path) -> dict[str, Entry]:
    """All tensors of a directory's safetensors files. Raises ValueError as `shards_of`."""
    return {name: entry for entries in shards_of(path).values() for name, entry in entries.items()}


def read_weights(path: Path, stem: str = "model") -> dict[str, mx.array]:
    """The arrays of a directory's safetensors files, read once evaluated. Raises ValueError as `shards_of`."""
    weights: dict[str, mx.array] = {}
    for file, entries in shards_of(path, stem).items():
        try:
            arrays = mx.load(str(file), format="safetensors")
        except RuntimeError as error:
            raise ValueError(f"{file} can't be read: {' '.join(str(error).split())[:300]}") from None
        weights |= {name: arrays[name] for name in entries}
    return weights


def header_bytes(header: dict[str, Any]) -> bytes:
    """The first bytes of a safetensors file: the header's length and its text."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors(arrays: dict[str, mx.array], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, part by part: header, then the tensors by name."""
    header, end = {"__metadata__": dict(sorted(metadata.items()))}, 0
    for name, x in sorted(arrays.items()):
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    first = header_bytes(header)
    yield from (first[:8], first[8:])
    for _, x in sorted(arrays.items()):
        if x.size:
            # As bytes, since Python's buffers know no bfloat16.
            yield memoryview(mx.contiguous(x.reshape(-1)).view(mx.uint8))
