"""Plain and speculative decoding of the same prompts, by turns, and what may be claimed of it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specmlx.decoding.draft_length import FULL
from specmlx.decoding.round import OnProposal
from specmlx.decoding.stats import Stats, summed
from specmlx.drafters.proposal import Drafter, Proposal
from specmlx.generation.scheduler import Scheduler

PLAIN = "plain"


@dataclass(frozen=True)
class Sample:
    """One answer. ttft: seconds to the first token; seconds: to the last one, the prompt included."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    ttft: float
    seconds: float
    peak_memory: float
    stats: Stats


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
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
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


class AlwaysWrong:
    """Has the ids after a drafter's verified instead of its own: as much work, and hardly ever the target's."""

    name = "wrong"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __call__(self, proposal: Proposal) -> Proposal:
        return Proposal((proposal.tokens + 1) % self.vocab_size)


def answer(model: Any, tokenizer: Any, prompt: Sequence[int], max_tokens: int, **options: Any) -> Sample:
    """Decode one prompt greedily, by options of `Scheduler`; nothing is under way on the device before and after."""
    mx.synchronize()
    begin, first, tokens, response = time.perf_counter(), 0.0, [], None
    scheduler = Scheduler(model, tokenizer, **options)
    for response in scheduler.answer(scheduler.request(prompt, max_tokens)):
        tokens.append(response.token)
        first = first or time.perf_counter() - begin
    mx.synchronize()
    seconds = time.perf_counter() - begin
    return Sample(tuple(tokens), len(prompt), first, seconds, response.peak_memory, response.stats)


def measure(
    model: Any,
    tokenizer: Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    modes: Sequence[int | str] = (FULL, "auto"),
    runs: int = 3,
    max_tokens: int = 128,
    progress: Callable[[], None] | None = None,
    on_proposal: OnProposal | None = None,
    **options: Any,
) -> list[list[dict[str, list[Sample]]]]:
    """By prompt and turn, each mode's two samples; plain decoding is a mode too.

    A turn runs the modes one after the other and then backwards (ABBA), so that a machine that slows down is unfair to
    none. The first prompt is answered in every mode before, which isn't measured. `modes` are `num_draft_tokens`.
    """
    settings = {PLAIN: {"draft_model": None}}
    drafting = {"draft_model": drafter, "on_proposal": on_proposal}
    settings |= {str(mode): {**drafting, "num_draft_tokens": mode} for mode in modes}
    for setting in settings.values():
        answer(model, tokenizer, prompts[0], max_tokens, **setting, **options)

    def turn(prompt: Sequence[int]) -> dict[str, list[Sample]]:
        samples: dict[str, list[Sample]] = {name: [] for name in settings}
        for name in [*settings, *reversed(settings)]:
            samples[name].append(answer(model, tokenizer, prompt, max_tokens, **settings[name], **options))
            if progress:
                progress()
        return samples

    return [[turn(prompt) for _ in range(runs)] for prompt in prompts]


def differing(measured: Sequence[Sequence[Mapping[str, Sequence[Sample]]]]) -> list[int]:
    """The prompts whose answers are not the same tokens in every mode and turn."""
    return [
        index
        for index, turns in enumerate(measured)
        if len({sample.tokens for turn in turns for samples in turn.values() for sample in samples}) > 1
    ]


def table(measured: Sequence[Sequence[Mapping[str, Sequence[Sample]]]]) -> list[Row]:
    """A row a mode, plain decoding first; ratios only where every answer was the same in all modes."""
    turns = [turn for of_prompt in measured for turn in of_prompt]
    same = not differing(measured)
    return [_row(mode, turns, same and mode != PLAIN) for mode in turns[0]]


def _row(mode: str, turns: Sequence[Mapping[str, Sequence[Sample]]], ratios: bool) -> Row:
    samples = [sample for turn in turns for sample in turn[mode]]
    sums, tokens = summed(sample.stats for sample in samples), sum(len(sample.tokens) for sample in samples)
    histogram = sums.accept_histogram

    def ratio(seconds: Callable[[Sample], float]) -> Spread | None:
        return Spread.of([sum(map(seconds, t[PLAIN])) / sum(map(seconds, t[mode])) for t in turns]) if ratios else None

    return Row(
        mode=mode,
        answers=len(samples),
        tokens=tokens,
        acceptance_length=tokens / sums.rounds,
        accept_histogram=tuple(histogram),
        acceptance=tuple(sum(histogram[slot:]) / sums.rounds for slot in range(1, len(histogram))),
        plain_rounds=sums.plain_share,
        ttft=Spread.of([sample.ttft for sample in samples]),
        decode_tps=Spread.of([len(s.tokens) / max(s.stats.decode_seconds, 1e-9) for s in samples]),
        end_to_end_tps=Spread.of([len(s.tokens) / s.seconds for s in samples]),
        decode_ratio=ratio(lambda s: s.stats.decode_seconds),
        end_to_end_ratio=ratio(lambda s: s.seconds),
    )
