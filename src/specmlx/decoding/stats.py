"""What a generation did, counted as it was delivered."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest


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
