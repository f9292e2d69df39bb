"""One decision for several processes: what they share the target's layers for has to take the same way everywhere.

Sums are the same bits in all of them, but drafters and clocks are each process's own: proposals, what is kept of them
and the width are therefore the first process's, sent to the others.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.decoding.draft_length import AutoWidth, Widths
from specmlx.decoding.policy import Policy
from specmlx.decoding.processors import Processor
from specmlx.decoding.rng import Noise
from specmlx.decoding.sampling import Sampler
from specmlx.drafters.proposal import Drafter, Fingerprinted

ASKED = ("prompt", "sampling", "drafter", "width", "stop", "limits")
"""What processes compare before they generate."""


def from_first(group: mx.distributed.Group, x: mx.array) -> mx.array:
    """The first process's integers, in all processes. Lazy.

    Every process builds the same graph, since the collectives in it have to run in the same order.
    """
    return mx.distributed.all_sum(mx.where(group.rank() == 0, x, mx.zeros_like(x)), group=group)


def what_is_asked(
    ids: Sequence[int],
    policy: Policy,
    drafter: Drafter | None,
    num_draft_tokens: int | Widths | None,
    stop: tuple,
    limits: tuple,
) -> dict[str, Any]:
    """Everything that has to be the same in all processes for their passes to be the same, by the names of `ASKED`."""
    ours = [
        x if isinstance(x, (Sampler, Processor)) else type(x).__name__ for x in (policy.sampler, *policy.processors)
    ]
    named = drafter.fingerprint if isinstance(drafter, Fingerprinted) else None
    found = (
        list(ids),
        [*ours, policy.seed],
        drafter and (type(drafter).__name__, drafter.max_width, drafter.tap_ids, named),
        num_draft_tokens if isinstance(num_draft_tokens, int) else type(num_draft_tokens).__name__,
        stop,
        limits,
    )
    return dict(zip(ASKED, found, strict=True))


def nobodys_noise(group: mx.distributed.Group) -> Noise:
    """Noise that is the same in all processes, for a request without a seed."""
    words = from_first(group, mx.array(list(os.urandom(16)), dtype=mx.int32))
    return Noise(int.from_bytes(bytes(words.tolist()), "little"))


class SharedWidths(AutoWidth):
    """Widths that the first process chooses by its own clock, a round earlier than it would alone.

    A decision is sent behind the round that is under way and taken for the one after the next, so that nobody waits for
    it: when it is looked at, the round that it was sent behind has been read.
    """

    def __init__(self, most: int, group: mx.distributed.Group, file: Path | None = None):
        self._first = group.rank() == 0
        super().__init__(most, file=file if self._first else None)
        self._group = group
        self._sent: mx.array | None = None

    @property
    def reason(self) -> str | None:
        """See `Widths`; None in the other processes, which don't know."""
        return super().reason if self._first else None

    def choose(self) -> int:
        """See `Widths.choose`."""
        width = super().choose() if self._first else 0
        sent, self._sent = self._sent, from_first(self._group, mx.array(width))
        mx.async_eval(self._sent)
        return (self._sent if sent is None else sent).item()

    def observed(self, width: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        """See `Widths.observed`."""
        if self._first:
            super().observed(width, accepted, seconds, others)
