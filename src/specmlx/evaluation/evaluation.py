"""What a drafter is worth on given prompts: acceptance by slot and category, calibration, the same text or not."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from specmlx.decoding.stats import Stats, summed
from specmlx.drafters.proposal import Drafter, Proposal
from specmlx.evaluation.answer import answer
from specmlx.evaluation.chips import Chip
from specmlx.evaluation.traffic import account
from specmlx.generation.scheduler import Scheduler


@dataclass
class Acceptance:
    """What was counted over the prompts of one category.

    identical: prompts whose text is plain decoding's.
    confidences: (the drafter's own estimate, whether the token was kept) of every slot that the target decided on.
    plain, speculative: the stats of each decoding.
    """

    identical: int = 0
    confidences: list[tuple[float, bool]] = field(default_factory=list)
    plain: list[Stats] = field(default_factory=list)
    speculative: list[Stats] = field(default_factory=list)

    @property
    def prompts(self) -> int:
        return len(self.speculative)

    @property
    def sums(self) -> Stats:
        """Of the speculative decodings; its acceptance length counts everything that was delivered."""
        return summed(self.speculative)

    def slots(self) -> list[float]:
        """For each slot, how often its token was kept where the slots before it were."""
        histogram = self.sums.accept_histogram
        reached = [sum(histogram[k:]) for k in range(len(histogram) + 1)]
        return [after / before for before, after in zip(reached, reached[1:], strict=False) if before][:-1]

    def calibration(self, bins: int = 10) -> list[tuple[float, float, int]]:
        """(mean estimate, share kept, count) of the slots by their estimate, in tenths; empty without estimates."""
        groups: dict[int, list[tuple[float, bool]]] = defaultdict(list)
        for estimate, kept in self.confidences:
            groups[min(int(estimate * bins), bins - 1)].append((estimate, kept))
        means = ((group, len(group)) for _, group in sorted(groups.items()))
        return [(sum(e for e, _ in group) / n, sum(k for _, k in group) / n, n) for group, n in means]

    def __iadd__(self, other: "Acceptance") -> "Acceptance":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class _Confidences(list):
    """What a drafter thought of its proposals, in order."""

    name = "evaluated"

    def __call__(self, proposal: Proposal) -> Proposal:
        self.append(proposal.confidence)
        return proposal


def evaluate(
    model: Any,
    tokenizer: Any,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    categories: Sequence[str],
    *,
    max_tokens: int = 256,
    **options: Any,
) -> Iterator[tuple[str, Acceptance]]:
    """Answer every prompt plainly and with the drafter at full width; yields each prompt's category and sums.

    Options are `Scheduler.request`'s; sampling needs a seed, or the two texts have nothing in common.
    """
    for prompt, category in zip(prompts, categories, strict=True):
        confidences = _Confidences()
        drafting = Scheduler(model, tokenizer, drafter, drafter.max_width, on_proposal=confidences)
        schedulers = (Scheduler(model, tokenizer, None), drafting)
        plain, drafted = (answer(scheduler, prompt, max_tokens, **options) for scheduler in schedulers)
        judged = list(_judged(confidences, drafted.kept, drafter.max_width))
        yield category, Acceptance(int(drafted.tokens == plain.tokens), judged, [plain.stats], [drafted.stats])


def byte_limit(model: Any, drafter: Drafter, found: Acceptance, chip: Chip) -> dict[str, Any]:
    """Estimate: tok/s that a chip's bandwidth allows for what was measured, speculative and plain, and their ratio.

    By bytes alone, every weight read once a pass: real passes of several rows cost more.
    """

    def rate(runs: list[Stats], used: Drafter | None) -> float:
        moved = sum(account(model, stats, used).total for stats in runs)
        return chip.bandwidth * 1e9 * summed(runs).generation_tokens / moved

    speculative, plain = rate(found.speculative, drafter), rate(found.plain, None)
    limits = {"speculative_tps": speculative, "plain_tps": plain, "ratio": speculative / plain}
    return {"chip": chip.name, "bandwidth": chip.bandwidth} | limits


def _judged(confidences: list[mx.array | None], kept: Sequence[int], width: int) -> Iterator[tuple[float, bool]]:
    """Each estimate that the target decided on, with its decision; not of the last round, which may have been cut."""
    for confidence, count in zip(confidences, kept[:-1], strict=False):
        if confidence is None:
            return
        estimates = confidence[0].tolist()
        yield from ((estimate, True) for estimate in estimates[:count])
        if count < min(width, len(estimates)):
            yield estimates[count], False
