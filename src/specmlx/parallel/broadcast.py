"""One decision for several processes: what they share the target's layers for has to take the same way everywhere.

Sums are the same bits in all of them, but drafters and clocks are each process's own: proposals, what is kept of them
and the width are therefore the first process's, sent to the others.
"""

import os
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specmlx.decoding.draft_length import FixedLength
from specmlx.decoding.policy import Policy
from specmlx.decoding.processors import Processor
from specmlx.decoding.rng import Noise
from specmlx.decoding.sampling import Sampler
from specmlx.drafters.proposal import Drafter

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
    num_draft_tokens: int | FixedLength | None,
    stop: tuple,
    limits: tuple,
) -> dict[str, Any]:
    """Everything that has to be the same in all processes for their passes to be the same, by the names of `ASKED`."""
    ours = [
        x if isinstance(x, (Sampler, Processor)) else type(x).__name__ for x in (policy.sampler, *policy.processors)
    ]
    named = getattr(drafter, "fingerprint", None)
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


class SharedLength(FixedLength):
    """Numbers of drafted tokens that the first process chooses by its own clock, a round earlier than it would alone.

    A decision is sent behind the round that is under way and taken for the one after the next, so that nobody waits for
    it: when it is looked at, the round that it was sent behind has been read.
    """

    def __init__(self, length: FixedLength, group: mx.distributed.Group):
        """length: what chooses in the first process; it is not asked in the others, which don't know its `reason`."""
        super().__init__(length.most)
        self.length, self.done = length, False
        self._first, self._group, self._sent = group.rank() == 0, group, None

    @property
    def reason(self) -> str | None:
        """See `FixedLength`; None in the other processes."""
        return self.length.reason if self._first else None

    def choose(self) -> int:
        """See `FixedLength.choose`; plain rounds once a `Measurement` is done in the first process."""
        n = 0
        if self._first:
            n = -1 if getattr(self.length, "done", False) else self.length.choose()
        sent, self._sent = self._sent, from_first(self._group, mx.array(n))
        mx.async_eval(self._sent)
        found = (self._sent if sent is None else sent).item()
        self.done = found < 0
        return max(found, 0)

    def observed(self, n: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        """See `FixedLength.observed`."""
        if self._first:
            self.length.observed(n, accepted, seconds, others)
