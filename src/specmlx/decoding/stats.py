"""What a generation did, counted as it was delivered, and where its time goes."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import mlx.core as mx

DRAFT, OBSERVE, VERIFY, ACCEPT = "draft", "observe", "verify", "accept"
READ, COMMIT, DETOKENIZE = "send and read", "commit", "detokenize"
OTHER = "other host work"
"""Python between the phases: the width, handing tokens out, counting."""
PHASES = (DRAFT, VERIFY, ACCEPT, READ, COMMIT, OBSERVE, DETOKENIZE, OTHER)
HOST = (COMMIT, DETOKENIZE, OTHER)
"""What is Python alone: a commit is an integer, whose rows the next verify folds."""


@dataclass
class Stats:
    """Counts and times of one generation.

    rounds: verify passes, each over the whole target once; prefill is apart.
    proposed: drafted tokens that were verified. accepted: drafted tokens that were delivered.
    accept_histogram: rounds by how many drafted tokens they delivered, index 0..width.
    context: sum over rounds of the rows that were in the state before each round's own (keys are read up to there).
    draft_passes: rounds with a proposal.
    first_accepted: drafted tokens that were delivered while no more than 100 had been proposed.
    commit_seconds, device_seconds: of decode_seconds, what letting rows in took, and what handing rounds to the device
        and waiting for them took.
    phases: decoding's seconds by phase, where it was profiled (else empty).
    mode: "speculative" or "plain"; reason: why it is plain, why rows are handled one by one, or which kernels differ by
        the number of rows.
    """

    mode: str = "plain"
    reason: str | None = None
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    generation_tokens: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    context: int = 0
    draft_passes: int = 0
    first_accepted: int = 0
    commit_seconds: float = 0.0
    device_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows that the verify passes ran: each round's anchor and proposal."""
        return self.rounds + self.proposed

    @property
    def acceptance_length(self) -> float:
        """Tokens delivered per round (τ); 0 before the first round."""
        return self.generation_tokens / self.rounds if self.rounds else 0.0

    @property
    def plain_share(self) -> float:
        """Of the rounds, those without a proposal."""
        return 1 - self.draft_passes / self.rounds if self.rounds else 0.0

    def begin_round(self, proposed: int, context: int = 0) -> None:
        """Count a verify pass over `proposed` drafted tokens after `context` rows; none is delivered yet."""
        self.rounds += 1
        self.proposed += proposed
        self.context += context
        self.draft_passes += proposed > 0
        if proposed:
            self.mode = "speculative"
        if not self.accept_histogram:
            self.accept_histogram.append(0)
        self.accept_histogram[0] += 1
        self._in_round = 0

    def explain(self, request: str | None, width: str | None) -> None:
        """Say why rounds are as they are, by the request and the width; if by this and none drafted, they are plain."""
        self.reason = "; ".join(filter(None, (request, width))) or None
        if width and not self.proposed:
            self.mode = "plain"

    def deliver(self, from_draft: bool) -> None:
        """Count a token that leaves to the user in the running round."""
        self.generation_tokens += 1
        if from_draft:
            self.accepted += 1
            self.first_accepted += self.proposed <= 100
            self.accept_histogram[self._in_round] -= 1
            self._in_round += 1
            if self._in_round == len(self.accept_histogram):
                self.accept_histogram.append(0)
            self.accept_histogram[self._in_round] += 1

    def snapshot(self) -> "Stats":
        """A copy that later rounds do not change."""
        return replace(self, accept_histogram=list(self.accept_histogram), phases=dict(self.phases))


def summed(several: Iterable[Stats]) -> Stats:
    """The counts and seconds of several generations together; their mode, reason and phases are left out."""
    several = list(several)
    histogram = [sum(rounds) for rounds in zip_longest(*(each.accept_histogram for each in several), fillvalue=0)]
    total = Stats(accept_histogram=histogram)
    for name, value in vars(total).items():
        if type(value) in (int, float):
            setattr(total, name, sum(getattr(each, name) for each in several))
    return total


class Timer:
    """Seconds of decoding by phase, kept in a request's stats.

    Each phase waits for the device at its end, so nothing overlaps.
    """

    def __init__(self, stats: Stats):
        self.stats = stats
        self._begin = 0.0

    def start(self) -> None:
        """A phase begins."""
        self._begin = time.perf_counter()

    def lap(self, phase: str, arrays: Any = ()) -> None:
        """The phase ends once `arrays` are evaluated, and the next one begins."""
        mx.eval(arrays)
        begin, self._begin = self._begin, time.perf_counter()
        self.stats.phases[phase] = self.stats.phases.get(phase, 0.0) + self._begin - begin

    def finish(self) -> None:
        """Call what decoding took beside its phases by its name."""
        stats = self.stats
        found = stats.phases | {READ: stats.device_seconds, COMMIT: stats.commit_seconds}
        inside = sum(seconds for name, seconds in found.items() if name != DETOKENIZE)
        found[OTHER] = max(0.0, stats.decode_seconds - inside)
        stats.phases = {name: found[name] for name in PHASES if name in found}


def host_share(phases: Mapping[str, float]) -> float:
    """Of profiled decoding, the share of Python outside the calls of target, drafter and acceptance."""
    return sum(phases.get(name, 0.0) for name in HOST) / max(sum(phases.values()), 1e-9)
