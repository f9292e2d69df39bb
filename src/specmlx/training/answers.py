"""Online distillation: the target answers the prompts itself, a pool at a time; only token ids are kept."""

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.decoding.sampling import make_sampler
from specmlx.generation.responses import Request
from specmlx.generation.scheduler import Scheduler
from specmlx.training.dataset import Row
from specmlx.training.loop import whole_lines
from specmlx.training.settings import Settings

# An answer of this many tokens or more that repeats itself teaches a drafter nothing but loops.
LOOP_LENGTH, DISTINCT = 24, 0.5
LONG, LOOPS, SHORT = "too long", "goes round in circles", "too short"


def distinct_3grams(tokens: Sequence[int]) -> float:
    """Share of a text's token 3-grams that are distinct; 1 for a text of fewer than three tokens."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


@dataclass(frozen=True)
class Dialogue:
    """A prompt with the target's answer: ids, and where the answer begins (0 for a text that is learned as it is)."""

    ids: list[int]
    start: int


class Answers:
    """The target's answers to rows, each made once, and read back from `path` by a run that goes on.

    An answer depends on its row and the settings alone: greedy, or with a seed of the settings and the row. Their
    max_tokens -1 is as many as max_length leaves room for. seconds, made: what the new answers took, and how many.
    """

    def __init__(self, model: Any, tokenizer: Any, path: Path, settings: Settings, max_lanes: int = 16):
        self.scheduler = Scheduler(model, tokenizer, draft_model=None, max_lanes=max_lanes)
        self.path, self.settings = path, settings
        self.sampler = make_sampler(settings.temp) if settings.temp else None
        self.seconds, self.made = 0.0, 0
        self._known: dict[str, Dialogue | str] = {}
        for kept in whole_lines(path):
            known = kept["left_out"] if "left_out" in kept else Dialogue(kept["ids"], kept["start"])
            self._known[kept["key"]] = known

    @property
    def left_out(self) -> Counter[str]:
        """How many rows can't be learned from, by the reason."""
        return Counter(found for found in self._known.values() if isinstance(found, str))

    def of(self, rows: Sequence[Row]) -> list[Dialogue]:
        """The sequences of rows, without those that loop or leave no room for an answer; new ones are made together."""
        if new := [row for row in rows if row.key not in self._known]:
            clock = time.perf_counter()
            made = self._make(new)
            self.seconds += time.perf_counter() - clock
            self.made += len(new)
            with self.path.open("a") as file:
                for row, sequence in zip(new, made, strict=True):
                    kept = {"left_out": sequence} if isinstance(sequence, str) else asdict(sequence)
                    file.write(json.dumps({"key": row.key, **kept}) + "\n")
                    self._known[row.key] = sequence
                file.flush()
                os.fsync(file.fileno())
        return [found for row in rows if isinstance(found := self._known[row.key], Dialogue)]

    def _make(self, rows: Sequence[Row]) -> list[Dialogue | str]:
        s, scheduler = self.settings, self.scheduler
        prompts = [row.ids(scheduler.tokenizer, s.chat_template_config) for row in rows]
        answers: list[list[int]] = [[] for _ in rows]
        requests: dict[Request, list[int]] = {}
        for row, prompt, answer in zip(rows, prompts, answers, strict=True):
            room = s.max_length + 1 - len(prompt)
            room = room if s.max_tokens < 0 else min(s.max_tokens, room)
            if row.text is not None or room < 1:
                continue
            seed = (s.seed << 64) + int(row.key, 16) if self.sampler else None
            requests[scheduler.request(prompt, room, seed=seed, sampler=self.sampler)] = answer
        for request, response in scheduler.run(requests):
            requests[request].append(response.token)
        mx.clear_cache()
        if failures := [request.error for request in requests if request.error]:
            raise failures[0]
        return [self._sequence(*made) for made in zip(rows, prompts, answers, strict=True)]

    def _sequence(self, row: Row, prompt: list[int], answer: list[int]) -> Dialogue | str:
        if row.text is not None:
            ids = prompt[: self.settings.max_length + 1]
            return Dialogue(ids, 0) if len(ids) > 2 else SHORT
        if not answer:
            return LONG
        looping = len(answer) >= LOOP_LENGTH and distinct_3grams(answer) < DISTINCT
        return LOOPS if looping else Dialogue(prompt + answer, len(prompt))
