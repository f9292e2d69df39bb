"""Plain and speculative decoding of the same prompts, by turns, and what may be claimed of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from specmlx.decoding.draft_length import FULL
from specmlx.decoding.round import OnProposal
from specmlx.decoding.stats import summed
from specmlx.drafters.proposal import Drafter, Proposal
from specmlx.evaluation.answer import Answer, answer
from specmlx.generation.scheduler import Scheduler

PLAIN = "plain"
MODES = (PLAIN, FULL, "auto")
# Each mode's answers to a prompt.
Turn = dict[str, list[Answer]]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls(*[values[0]] * 3)
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)

    @property
    def conclusive(self) -> bool:
        """Of a ratio: whether its distance from 1 is larger than its quartiles' from one another."""
        return abs(self.median - 1) > self.high - self.low


@dataclass(frozen=True)
class Row:
    """One mode's figures over some prompts. The ratios are to plain decoding in the same turn; None for plain itself.

    acceptance: of the rounds, how many delivered slot 1, slot 2, …
    """

    mode: str
    answers: int
    tokens: int
    acceptance_length: float
    accept_histogram: tuple[int, ...]
    acceptance: tuple[float, ...]
    plain_rounds: float
    ttft: Spread
    decode_tps: Spread
    end_to_end_tps: Spread
    decode_ratio: Spread | None = None
    end_to_end_ratio: Spread | None = None


@dataclass
class AlwaysWrong:
    """Has the ids after a drafter's verified instead of its own: as much work, and hardly ever the target's."""

    vocab_size: int
    name: str = "wrong"

    def __call__(self, proposal: Proposal) -> Proposal:
        return Proposal((proposal.tokens + 1) % self.vocab_size)


def measure(
    model: Any,
    tokenizer: Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    runs: int = 3,
    max_tokens: int = 128,
    progress: Callable[[], None] = lambda: None,
    on_proposal: OnProposal | None = None,
) -> list[list[Turn]]:
    """By prompt and turn, two answers of each mode: plain decoding, all that the drafter proposes, and "auto".

    A turn runs the modes one after the other and then backwards (ABBA), so that a machine that slows down is unfair to
    none. The first prompt is answered in every mode before, which isn't measured.
    """

    def ask(mode: str, prompt: Sequence[int]) -> Answer:
        drafting = {} if mode == PLAIN else {"num_draft_tokens": mode, "on_proposal": on_proposal}
        return answer(Scheduler(model, tokenizer, drafter if drafting else None, **drafting), prompt, max_tokens)

    def turn(prompt: Sequence[int]) -> Turn:
        answers: Turn = {mode: [] for mode in MODES}
        for mode in (*MODES, *reversed(MODES)):
            answers[mode].append(ask(mode, prompt))
            progress()
        return answers

    for mode in MODES:
        ask(mode, prompts[0])

    return [[turn(prompt) for _ in range(runs)] for prompt in prompts]


def differing(measured: Sequence[Sequence[Turn]]) -> list[int]:
    """The prompts whose answers are not the same tokens in every mode and turn."""
    texts = [{each.tokens for turn in turns for found in turn.values() for each in found} for turns in measured]
    return [index for index, different in enumerate(texts) if len(different) > 1]


def table(measured: Sequence[Sequence[Turn]]) -> list[Row]:
    """A row a mode, plain decoding first; ratios only where every answer was the same in all modes."""
    turns = [turn for of_prompt in measured for turn in of_prompt]
    same = not differing(measured)
    return [_row(mode, turns, same and mode != PLAIN) for mode in turns[0]]


def _row(mode: str, turns: Sequence[Turn], ratios: bool) -> Row:
    answers = [each for turn in turns for each in turn[mode]]
    sums = summed(each.stats for each in answers)
    histogram = sums.accept_histogram

    def ratio(seconds: Callable[[Answer], float]) -> Spread | None:
        return Spread.of([sum(map(seconds, t[PLAIN])) / sum(map(seconds, t[mode])) for t in turns]) if ratios else None

    return Row(
        mode=mode,
        answers=len(answers),
        tokens=sums.generation_tokens,
        acceptance_length=sums.acceptance_length,
        accept_histogram=tuple(histogram),
        acceptance=tuple(sum(histogram[slot:]) / sums.rounds for slot in range(1, len(histogram))),
        plain_rounds=sums.plain_share,
        ttft=Spread.of([each.ttft for each in answers]),
        decode_tps=Spread.of([len(each.tokens) / max(each.stats.decode_seconds, 1e-9) for each in answers]),
        end_to_end_tps=Spread.of([len(each.tokens) / each.seconds for each in answers]),
        decode_ratio=ratio(lambda each: each.stats.decode_seconds),
        end_to_end_ratio=ratio(lambda each: each.seconds),
    )
