"""The demo's chats as rows of tokens for training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from make_demo.templates import training_examples
from make_demo.words import COLOURS, DAYS, MONTHS, NAMES, THINGS, WORDS
from specmlx.demo.tasks import KINDS, Example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 1280
QUESTION_WEIGHT = 0.05


def tokenizer_texts(seed: int = 0, n: int = 30_000) -> Iterator[str]:
    """Yield the text that the demo's tokenizer is trained on: `n` training examples, then the words again."""
    for example in training_examples(f"tokenizer {seed}", n):
        yield example.question
        yield example.answer
    # As often as this every word becomes one token, so that a tiny model copies it in one step;
    # things, colours and names also without a space before them, as code and markup have them.
    words = [" " + word for word in (*WORDS, *NAMES, *MONTHS, *DAYS)] + [*THINGS, *COLOURS, *NAMES]
    for _ in range(2_000):
        yield from words


class PackedChats:
    """Rows of question–answer turns of one chat, the last turn cut where the row is full.

    `tokenizer` is a `tokenizers.Tokenizer` or the path of a tokenizer.json (or its directory). A batch
    depends on `seed` and its step only, so training resumes at any step without making the earlier ones.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | str | Path,
        seed: int = 0,
        batch_size: int = 8,
        length: int = 256,
        kinds: tuple[str, ...] = KINDS,
    ) -> None:
        self.kinds = kinds
        if isinstance(tokenizer, (str, Path)):
            from tokenizers import Tokenizer

            path = Path(tokenizer)
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
        self._tokenizer = tokenizer
        self.seed, self.batch_size, self.length = seed, batch_size, length
        self._head = self._ids("<|im_start|>user\n")
        self._middle = self._ids("<|im_end|>\n<|im_start|>assistant\n")
        self._tail = self._ids("<|im_end|>\n")

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def turn(self, example: Example) -> tuple[list[int], list[float]]:
        """Return the tokens of one turn, as the chat template renders it, and the loss weight of each.

        The weight is 1 on the answer and its <|im_end|>, QUESTION_WEIGHT elsewhere.
        """
        question = self._head + self._ids(example.question) + self._middle
        answer = self._ids(example.answer)
        weights = [QUESTION_WEIGHT] * len(question) + [1.0] * (len(answer) + 1)
        tokens = question + answer + self._tail
        return tokens, weights + [QUESTION_WEIGHT] * (len(tokens) - len(weights))

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [B, L + 1] int32 and weights [B, L] float32 of step `step`.

        weights[:, t] belongs to the prediction of tokens[:, t + 1].
        """
        tokens = np.empty((self.batch_size, self.length + 1), np.int32)
        weights = np.empty((self.batch_size, self.length + 1), np.float32)
        examples = training_examples(f"packed {self.seed} {step}", kinds=self.kinds)
        for row in range(self.batch_size):
            ids: list[int] = []
            loss: list[float] = []
            while len(ids) <= self.length:
                more, weight = self.turn(next(examples))
                ids += more
                loss += weight
            tokens[row] = ids[: self.length + 1]
            weights[row] = loss[: self.length + 1]
        return tokens, weights[:, 1:]


def packed_batches(
    tokenizer: Tokenizer | str | Path, seed: int = 0, batch_size: int = 8, length: int = 256, start: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the batches of `PackedChats` from step `start` on, without end."""
    chats = PackedChats(tokenizer, seed, batch_size, length)
    return map(chats.batch, count(start))
