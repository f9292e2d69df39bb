"""One prompt decoded by the real loop: its tokens, what they took and what was counted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specmlx.decoding.stats import Stats
from specmlx.generation.scheduler import Scheduler


@dataclass(frozen=True)
class Answer:
    """One decoding of a prompt.

    Args:
        tokens: the generated ids, a stop token included.
        margins: for each, how far the target's two best log-probabilities lie apart; empty where not asked for.
        stats: counts of rounds and drafts; None for mlx-lm.
        kept: for each round, how many drafted tokens were delivered.
        ttft, seconds: to the first token, and to the last one, the prompt included.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...] = ()
    stats: Stats | None = None
    text: str = ""
    finish_reason: str | None = None
    kept: tuple[int, ...] = ()
    ttft: float = 0.0
    seconds: float = 0.0


def answer(
    scheduler: Scheduler, prompt: Sequence[int], max_tokens: int, margins: bool = False, **options: Any
) -> Answer:
    """Decode one prompt by options of `Scheduler.request`; nothing is under way on the device before and after."""
    mx.synchronize()
    begin, first, tokens, apart, text, kept = time.perf_counter(), 0.0, [], [], "", []
    for response in scheduler.answer(scheduler.request(prompt, max_tokens, **options)):
        first = first or time.perf_counter() - begin
        tokens.append(response.token)
        text += response.text
        kept += [0] * (response.stats.rounds - len(kept))
        kept[-1] += response.from_draft
        if margins:
            apart.append(top_2_margin(response.logprobs))
    mx.synchronize()
    seconds, end = time.perf_counter() - begin, response.finish_reason
    return Answer(tuple(tokens), tuple(apart), response.stats, text, end, tuple(kept), first, seconds)


def chat_prompts(tokenizer: Any, questions: Sequence[str]) -> list[list[int]]:
    """The ids of questions, each as the chat template renders it."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    return [tokenizer.apply_chat_template(each, add_generation_prompt=True) for each in messages]


def top_2_margin(logprobs: mx.array) -> float:
    """How far the two largest of `[V]` lie apart."""
    low, high = mx.sort(mx.topk(logprobs.astype(mx.float32), 2)).tolist()
    return high - low
