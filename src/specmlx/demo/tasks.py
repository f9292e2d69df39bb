"""The demo's questions with their only right answers: what its drafters learned from, and what is measured.

They are made by templates (`examples/make_demo` in the repository) and kept in questions.json.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

QUESTIONS_FILE = "questions.json"
KINDS = (
    *(
        "count up",
        "count down",
        "calendar",
        "times table",
        "sum",
        "letters",
        "greeting",
        "repeat",
        "bullets",
        "numbered",
    ),
    *("html", "json", "function", "class", "sql"),
)


@dataclass(frozen=True)
class Example:
    """A question of one kind with its only right answer."""

    kind: str
    question: str
    answer: str


def _questions() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / QUESTIONS_FILE).read_text(encoding="utf-8"))


def training_examples(seed: int | str, n: int | None = None) -> Iterator[Example]:
    """Yield `n` examples (None: without end) of those that training saw, the kinds about equally often.

    They come in the order of training for the seed "train", in an order of its own for any other; all of them come
    before the first one comes again.
    """
    stored = _questions()["training"]
    order = (i for turn in count() for i in _order(f"{seed} {turn}" if turn or seed != "train" else None, len(stored)))
    return (Example(*stored[i]) for i in islice(order, n))


def _order(seed: str | None, size: int) -> list[int]:
    return list(range(size)) if seed is None else Random(seed).sample(range(size), size)


def held_out_examples(n_per_kind: int) -> list[Example]:
    """Return `n_per_kind` distinct questions of each kind that training never saw, kind by kind.

    Raises ValueError when a kind has fewer of them.
    """
    examples = []
    questions = _questions()["held_out"]
    for kind in KINDS:
        stored = questions[kind]
        if len(stored) < n_per_kind:
            raise ValueError(f"{n_per_kind} is too many: there are {len(stored)} held-out questions of kind {kind!r}")
        examples += [Example(kind, question, answer) for question, answer in stored[:n_per_kind]]
    return examples
