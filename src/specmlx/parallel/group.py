"""Several processes that generate one text: that all of them can, and were asked for the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import mlx.core as mx


def several(group: mx.distributed.Group | None) -> mx.distributed.Group | None:
    """The group, None where it is of one process."""
    return group if group is not None and group.size() > 1 else None


class FailedElsewhere(RuntimeError):
    """Another process has failed; it says why."""


class AskedDifferently(ValueError):
    """The processes were not asked for the same; each of them knows."""


@contextmanager
def agreed(group: mx.distributed.Group | None, *names: str) -> Iterator[dict[str, Any]]:
    """Work that every process does by itself: it succeeds in all of them, or raises in all of them.

    The facts with these names, which the work puts into the dict, have to be the same everywhere. Raises
    FailedElsewhere where another process failed (the first one, if several did), AskedDifferently where one has other
    facts than the first.
    """
    facts: dict[str, Any] = {}
    if group is None:
        yield facts
        return
    try:
        yield facts
    except Exception as error:
        report = _report(group, True, [0] * len(names))
        if group.rank() and report[0][0]:
            raise FailedElsewhere(f"rank 0 failed too: {error}") from error
        raise
    report = _report(group, False, [_digest(facts.get(name)) for name in names])
    if ranks := [rank for rank, (failed, *_) in enumerate(report) if failed]:
        raise FailedElsewhere(f"rank {ranks[0]} could not do its part: what it said is the reason")
    for rank, (_, *others) in enumerate(report):
        for name, own, first in zip(names, others, report[0][1:], strict=True):
            if own != first:
                raise AskedDifferently(f"rank {rank} has another {name} than rank 0: all have to be asked for the same")


def _report(group: mx.distributed.Group, failed: bool, digests: list[int]) -> list[list[int]]:
    mine = mx.array([[int(failed), *digests]], dtype=mx.int32)
    return mx.distributed.all_gather(mine, group=group).tolist()


def _digest(fact: Any) -> int:
    return int.from_bytes(blake2b(repr(fact).encode(), digest_size=4).digest(), "little") >> 1
