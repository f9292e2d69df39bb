"""Conversations and prompts in files: how layers become arrays with names, and arrays layers."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import numpy as np

from specmlx.cache import checks
from specmlx.cache.conversation import Conversation
from specmlx.cache.kv import KV, of_arrays
from specmlx.cache.layers import Layer, LayerStates
from specmlx.cache.recurrent import Recurrent
from specmlx.cache.snapshots import Piece, Snapshot
from specmlx.formats.config import read
from specmlx.formats.sealed import format_of, load_sealed, save_sealed

CONVERSATION = "specmlx-conversation-2"
PROMPTS = "specmlx-prompts-3"
# 1 held states of another form of the delta rule, which are not those of a cold run; 2 named its arrays otherwise.
_FORMER_PROMPTS = ("specmlx-prompts-1", "specmlx-prompts-2")
_FIELDS = ("model", "kv_format", "max_kv_size", "layers", "processed", "pending", "metadata")
_MOST_LAYERS, _MOST_ID = 10_000, (1 << 31) - 1

Held = tuple[str, Snapshot, int]
"""A snapshot with its namespace and its class."""


def save_conversation(path: str | Path, conversation: Conversation, metadata: dict[str, str] | None = None) -> None:
    """Write the target's state to a safetensors file that only its owner may read, replacing it atomically.

    Drafter contexts are not kept.
    """
    states = conversation.states
    layers = [x.mapped(lambda rows: rows[:, :, : states.length]) if isinstance(x, KV) else x for x in states.folded()]
    fields = {
        "model": conversation.model,
        "kv_format": states.kv_format and asdict(states.kv_format),
        "max_kv_size": conversation.max_kv_size,
        "layers": len(layers),
        "processed": conversation.processed,
        "pending": conversation.pending,
        "metadata": metadata or {},
    }
    header = {name: json.dumps(value) for name, value in fields.items()}
    save_sealed(Path(path), _arrays(dict(enumerate(layers))), header, CONVERSATION)


def load_conversation(path: str | Path) -> tuple[Conversation, dict[str, str]]:
    """The conversation and the metadata of a saved file. Raises ValueError in one line for what is none, or damaged."""
    arrays, header = load_sealed(Path(path), CONVERSATION)
    with checks.damaged(path):
        fields = {name: json.loads(header[name]) for name in _FIELDS}
        processed = read(fields, "processed", [int], [], least=0, most=_MOST_ID)
        found = _layers(arrays, len(processed))
        layers = [found.pop(i, None) for i in range(checks.natural(fields, "layers", below=_MOST_LAYERS))]
        if found or processed and None in layers:
            raise ValueError(f"it has {len(layers)} layers, and other ones' arrays")
        _all_known(arrays)
        mx.eval(layers)
        states = LayerStates.holding(len(processed), layers, kv_format=checks.kv_format(fields["kv_format"]))
        conversation = Conversation(states, processed, checks.natural(fields, "pending", None))
        conversation.model = read(fields, "model", str, None)
        conversation.max_kv_size = checks.natural(fields, "max_kv_size", None)
        return conversation, checks.texts(fields["metadata"])


def save_prompts(path: str | Path, held: Iterable[Held], metadata: dict[str, str] | None = None) -> None:
    """Write snapshots as `save_conversation` does; pieces that they share are there once.

    Snapshots of mlx-lm's caches are left out.
    """
    arrays: dict[str, mx.array] = {}
    numbers: dict[Piece | None, int | None] = {None: None}
    before, snapshots = [], []
    for namespace, snapshot, kind in held:
        if snapshot.caches is not None:
            continue
        for piece in snapshot.piece.chain():
            if piece not in numbers:
                n = numbers[piece] = len(before)
                before.append(numbers[piece.before])
                arrays |= {f"piece.{n}.ids": mx.array(piece.ids)} | _arrays(piece.kvs, f"piece.{n}.")
        at = f"snapshot.{len(snapshots)}."
        arrays |= _arrays(snapshot.recurrent, at)
        for drafter, packed in snapshot.drafts.items():
            arrays |= {f"{at}draft.{drafter}.{name}": x for name, x in packed.items()}
        snapshots.append({"namespace": namespace, "class": kind, "piece": numbers[snapshot.piece]})
    fields = {"pieces": before, "snapshots": snapshots, "metadata": metadata or {}}
    save_sealed(Path(path), arrays, {name: json.dumps(value) for name, value in fields.items()}, PROMPTS)


def load_prompts(path: str | Path) -> tuple[list[Held], dict[str, str]]:
    """The snapshots and the metadata of a saved file. Raises ValueError in one line for what is none, or damaged.

    Nothing, with a warning, of a file of a former version.
    """
    if format_of(Path(path)) in _FORMER_PROMPTS:
        warnings.warn(f"{path} is of an older specmlx: its prompts are run again", stacklevel=2)
        return [], {}
    arrays, header = load_sealed(Path(path), PROMPTS)
    with checks.damaged(path):
        befores, snapshots, metadata = (json.loads(header[name]) for name in ("pieces", "snapshots", "metadata"))
        pieces: list[Piece] = []
        for n, before in enumerate(befores):
            ids = arrays.pop(f"piece.{n}.ids")
            if ids.ndim != 1 or not ids.size or ids.dtype != mx.int32 or ids.min().item() < 0:
                raise ValueError(f"piece {n} has no tokens")
            before = None if before is None else pieces[checks.natural({"before": before}, "before", n, n)]
            pieces.append(Piece(np.array(ids), _layers(arrays, ids.size, f"piece.{n}."), before))
        held = []
        for n, entry in enumerate(snapshots):
            at = f"snapshot.{n}."
            recurrent = _layers(arrays, 0, at)
            drafts: dict[str, dict[str, mx.array]] = {}
            for name in [name for name in arrays if name.startswith(f"{at}draft.")]:
                drafter, _, part = name.removeprefix(f"{at}draft.").partition(".")
                drafts.setdefault(drafter, {})[part] = arrays.pop(name)
            piece = pieces[checks.natural(entry, "piece", len(pieces), len(pieces))]
            snapshot = Snapshot(piece, recurrent, drafts, from_file=True)
            mx.eval([piece.kvs for piece in piece.chain()], recurrent, drafts)
            held.append((read(entry, "namespace", str), snapshot, checks.natural(entry, "class", below=2)))
        _all_known(arrays)
        return held, checks.texts(metadata)


def holds_prompts(path: str | Path) -> bool:
    """Whether a file says that it is a saved `PromptCache`, of whatever version."""
    return (format_of(Path(path)) or "").startswith(PROMPTS.rpartition("-")[0])


def _arrays(layers: Mapping[int, Layer], at: str = "") -> dict[str, mx.array]:
    """What layers hold, by names that begin with `at`."""
    named = {}
    for i, layer in layers.items():
        if isinstance(layer, Recurrent):
            named |= {f"{at}{i}.S": layer.S, f"{at}{i}.conv": layer.conv}
        elif layer is not None:
            named |= {f"{at}{i}.kv.{part}": x for part, x in enumerate(layer.arrays())}
    return named


def _layers(arrays: dict[str, mx.array], rows: int, at: str = "") -> dict[int, Layer]:
    """Take out of `arrays` the layers that `_arrays` named.

    rows: how many rows keys and values have; 0 where there must be none. Raises ValueError for layers that can't be.
    """
    parts: dict[int, dict[str, mx.array]] = {}
    for name in sorted(arrays):
        if found := re.fullmatch(r"(\d{1,4})\.(S|conv|kv\.\d)", name[len(at) :] if name.startswith(at) else ""):
            parts.setdefault(int(found[1]), {})[found[2]] = arrays.pop(name)
    layers: dict[int, Layer] = {}
    for i, named in parts.items():
        layers[i] = Recurrent(named.pop("S"), named.pop("conv")) if "S" in named else of_arrays([*named.values()])
        checks.check_layer(layers[i], rows, f"{at}{i}")
        if isinstance(layers[i], Recurrent) and named:
            raise ValueError(f"{at}{i} is of two kinds")
    return layers


def _all_known(arrays: Mapping[str, mx.array]) -> None:
    if arrays:
        raise ValueError(f"nothing in it names {min(arrays)[:40]!r}")
