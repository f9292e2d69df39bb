"""Snapshots in a file and back."""

import json
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from specmlx.state import checks
from specmlx.state.prefix import Piece, Snapshot
from specmlx.state.quantized_kv import of_arrays
from specmlx.state.recurrent import Recurrent

FORMAT = "specmlx-prompts-2"
# Its states were computed by another form of the delta rule: they are not those of a cold run.
FORMER = "specmlx-prompts-1"

Held = tuple[str, Snapshot, int]


def pack(held: Iterable[Held]) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Arrays and a description (JSON) of snapshots, each with its namespace and class; shared pieces are there once.

    Snapshots of mlx-lm's caches are left out.
    """
    arrays: dict[str, mx.array] = {}
    numbers: dict[Piece, int] = {}
    pieces, snapshots = [], []
    for namespace, snapshot, kind in held:
        if snapshot.caches is not None:
            continue
        for piece in snapshot.piece.chain():
            if piece in numbers:
                continue
            n = numbers[piece] = len(pieces)
            before = None if piece.before is None else numbers[piece.before]
            parts = {i: len(kv.arrays()) for i, kv in piece.kvs.items()}
            pieces.append({"before": before, "parts": parts})
            arrays[f"piece.{n}.ids"] = mx.array(piece.ids)
            for i, kv in piece.kvs.items():
                arrays |= {f"piece.{n}.{i}.{part}": x for part, x in enumerate(kv.arrays())}
        n = len(snapshots)
        for i, layer in snapshot.recurrent.items():
            arrays |= {f"snapshot.{n}.{i}.S": layer.S, f"snapshot.{n}.{i}.conv": layer.conv}
        for drafter, packed in snapshot.drafts.items():
            arrays |= {f"snapshot.{n}.{drafter}.{name}": x for name, x in packed.items()}
        snapshots.append(
            {
                "namespace": namespace,
                "class": kind,
                "piece": numbers[snapshot.piece],
                "layers": sorted(snapshot.recurrent),
                "drafts": {drafter: sorted(packed) for drafter, packed in snapshot.drafts.items()},
            }
        )
    return arrays, {"pieces": pieces, "snapshots": snapshots}


def unpack(arrays: dict[str, mx.array], description: str) -> list[Held]:
    """What `pack` was given. Raises ValueError and other errors, see `checks.damaged`, where the two don't fit."""
    parsed = json.loads(description)
    pieces: list[Piece] = []
    known: set[str] = set()

    def named(name: str) -> mx.array:
        known.add(name)
        return arrays[name]

    for n, entry in enumerate(parsed["pieces"]):
        before = None if entry["before"] is None else pieces[checks.natural(entry["before"], "piece", n)]
        ids = named(f"piece.{n}.ids")
        if ids.ndim != 1 or not ids.size or ids.dtype != mx.int32 or ids.min().item() < 0:
            raise ValueError(f"piece {n} has no tokens")
        kvs = {
            int(i): of_arrays([named(f"piece.{n}.{i}.{part}") for part in range(checks.parts(parts) or 2)])
            for i, parts in entry["parts"].items()
        }
        for i, kv in kvs.items():
            checks.check_layer(kv, ids.size, f"layer {i} of piece {n}")
        pieces.append(Piece(np.array(ids), kvs, before))
    held = []
    for n, entry in enumerate(parsed["snapshots"]):
        at = f"snapshot.{n}"
        recurrent = {i: Recurrent(named(f"{at}.{i}.S"), named(f"{at}.{i}.conv")) for i in entry["layers"]}
        for i, layer in recurrent.items():
            checks.check_layer(layer, 0, f"layer {checks.natural(i, 'layer')} of snapshot {n}")
        drafts = {d: {name: named(f"{at}.{d}.{name}") for name in names} for d, names in entry["drafts"].items()}
        piece = pieces[checks.natural(entry["piece"], "piece", len(pieces))]
        snapshot = Snapshot(piece, recurrent, drafts, from_file=True)
        held.append((checks.text(entry["namespace"], "model"), snapshot, checks.natural(entry["class"], "class", 2)))
    checks.all_known(arrays, known)
    mx.eval(arrays)
    return held
