"""Bytes that a finished generation moved, from the arrays in memory and what its stats counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from specmlx.cache.quantized import KVFormat
from specmlx.decoding.stats import Stats
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.dspark import DSpark
from specmlx.drafters.mtp import MTP
from specmlx.drafters.ngram import NGram
from specmlx.drafters.proposal import Drafter
from specmlx.evaluation import tensors
from specmlx.evaluation.machine import Bandwidth, known_bandwidth
from specmlx.evaluation.tensors import Rule, rule_of
from specmlx.targets.config import FULL
from specmlx.targets.hybrid import Model


@dataclass(frozen=True)
class GroupTraffic:
    """One group of arrays: their bytes, and how often a generation read (or wrote) them."""

    label: str
    nbytes: int
    times: float

    @property
    def total(self) -> float:
        return self.nbytes * self.times


@dataclass(frozen=True)
class Traffic:
    """What decoding moved, prefill apart: a floor, since every weight counts once a pass, and activations nothing.

    Args:
        left_out: what the models' kinds do not let us count.
    """

    moved: tuple[GroupTraffic, ...]
    rounds: int
    tokens: int
    seconds: float
    bandwidth: Bandwidth | None = None
    left_out: str | None = None

    @property
    def total(self) -> float:
        return sum(group.total for group in self.moved)

    @property
    def bytes_per_token(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def bytes_per_round(self) -> float:
        return self.total / self.rounds if self.rounds else 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Over the time of decoding."""
        return self.total / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def share(self) -> float | None:
        """Of the memory bus, 1 being all of it; None where its bandwidth is not known."""
        return None if self.bandwidth is None else self.gigabytes_per_second / self.bandwidth.gigabytes_per_second

    def ceiling(self, gigabytes_per_second: float) -> float:
        """At most so many tok/s with this acceptance length on a machine of that bandwidth."""
        return gigabytes_per_second * 1e9 / self.bytes_per_token if self.tokens else 0.0


def account(
    model: Any,
    stats: Stats,
    drafter: Drafter | None = None,
    bandwidth: Bandwidth | None = None,
    kv_format: KVFormat | None = None,
) -> Traffic:
    """Turn a generation's counts into bytes moved by decoding, by groups of tensors.

    For a generation that had the model to itself: lanes of a batch share the weights that each of them counts.

    Args:
        drafter: the one that proposed; default, where there were proposals, `model.draft_model`.
        bandwidth: the machine's; default, where it is known, this machine's.
        kv_format: how keys and values were kept, where that was not the model's dtype.

    A pass reads the target once for all its rows. A proposal reads the drafter and the target's head, and before it the
    drafter's key and value matrices and its context projection, for the rows since the last one. Which experts the rows
    of a pass choose is not known: as many as rows × experts a token, up to all of them.
    """
    moved = list(_target(model, stats))
    left_out = []
    if isinstance(model, Model):
        moved += _states(model, stats, kv_format)
    else:
        left_out.append("keys, values and states: only their model knows their sizes")
    if stats.draft_passes:
        drafter = drafter or model.draft_model
        moved += _drafter(model, drafter, stats)
        if not isinstance(drafter, BlockDrafter | MTP | NGram):
            left_out.append("what the drafter reads")
    return Traffic(
        moved=tuple(group for group in moved if group.total),
        rounds=stats.rounds,
        tokens=stats.generation_tokens,
        seconds=stats.decode_seconds,
        bandwidth=known_bandwidth() if bandwidth is None else bandwidth,
        left_out="; ".join(left_out) or None,
    )


def grouped(module: Any, rules: Sequence[Rule]) -> dict[str, int]:
    """Bytes of a module's arrays in memory by the names of the rules."""
    found = {rule.name: 0 for rule in rules}
    for path, array in tree_flatten(module.parameters()):
        found[rule_of(path, rules).name] += array.nbytes
    return found


def _target(model: Any, stats: Stats) -> Iterator[GroupTraffic]:
    nbytes = grouped(model, tensors.TARGET)
    # A tied embedding is the head; else single rows of it are gathered.
    head = nbytes.pop(tensors.HEAD) or nbytes[tensors.EMBEDDING]
    nbytes.pop(tensors.EMBEDDING)
    for label, size in nbytes.items():
        chosen = 1.0
        if label == tensors.EXPERTS and size:
            chosen = min(1.0, stats.rows / stats.rounds * model.config.num_experts_per_tok / model.config.num_experts)
        yield GroupTraffic(label, size, stats.rounds * chosen)
    yield GroupTraffic(tensors.HEAD, head, stats.rounds)


def _states(model: Model, stats: Stats, kv_format: KVFormat | None) -> Iterator[GroupTraffic]:
    config = model.config
    recurrent = [layer for layer in model.new_states().layers if layer is not None]
    yield GroupTraffic("GDN state, read and written", sum(layer.nbytes for layer in recurrent), 2 * stats.rounds)
    row = mx.zeros((1, 1, 1, config.head_dim), dtype=recurrent[0].conv.dtype)
    # From its start on all rows are in the format; most passes decide.
    late = kv_format is not None and stats.context >= kv_format.start * stats.rounds
    parts = kv_format.quantized(row) if late else (row,)
    token = 2 * config.layer_types.count(FULL) * model.kv_heads * sum(x.nbytes for x in parts)
    yield GroupTraffic("keys and values", token, stats.context + 2 * stats.rows)


def _drafter(model: Any, drafter: Drafter, stats: Stats) -> Iterator[GroupTraffic]:
    passes, slots = stats.draft_passes, stats.proposed
    own_head = None
    if isinstance(drafter, MTP):
        # One layer, run once a slot.
        times = {tensors.CONTEXT: slots + passes, tensors.KEYS: slots + passes, tensors.LAYERS: slots}
        heads, window, dtype = slots, (None,), drafter.model.norm.weight.dtype
    elif isinstance(drafter, BlockDrafter):
        times = {tensors.CONTEXT: passes, tensors.KEYS: 2 * passes, tensors.LAYERS: passes, tensors.GATES: slots}
        # Of the best tokens' rows only, W2 is gathered.
        whole = isinstance(drafter, DSpark) and drafter.markov_top_k is None
        times[tensors.MARKOV] = slots if whole else 0
        heads, dtype = passes, drafter.model.dtype
        window = tuple(drafter.draft_window if rows is None else rows for rows in drafter.config.windows)
        if drafter.shortlist is not None or drafter.config.own_head or drafter.config.own_embedding:
            own_head = drafter.head()
    else:
        return
    if own_head is not None:
        yield GroupTraffic(tensors.HEADS, sum(x.nbytes for _, x in tree_flatten(own_head.parameters())), heads)
    else:
        target = grouped(model, tensors.TARGET)
        yield GroupTraffic("LM head, for the drafter", target[tensors.HEAD] or target[tensors.EMBEDDING], heads)
    nbytes = grouped(drafter.model, tensors.DRAFTER)
    for label, count in times.items():
        yield GroupTraffic(label, nbytes[label], count)
    # Rows that a draft pass looks back at: all, or a window's.
    config, before = drafter.model.config, stats.context / stats.rounds
    seen = sum(before if rows is None else min(before, rows) for rows in window)
    row = 2 * config.num_key_value_heads * config.head_dim * dtype.size
    yield GroupTraffic("drafter's keys and values", row, seen * heads)
