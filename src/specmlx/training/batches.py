"""Which sequences a step learns from: a function of the step, the seed and the answers, and of nothing else."""

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from specmlx.training.answers import Answers, Dialogue
from specmlx.training.dataset import Row
from specmlx.training.loop import Batch
from specmlx.training.losses import sample_anchors
from specmlx.training.settings import Settings

PAD = 16


class Batches:
    """Rows are answered a pool at a time, in another order each epoch.

    While there are new answers to make, a pool is learned together with `repeats` - 1 times as many rows of earlier
    pools, so that not all the time goes into answers; from the second epoch on by itself.

    Of a batch all sequences are about as long; they are padded on the right to the longest, rounded up to 16.
    """

    def __init__(self, answers: Answers, rows: Sequence[Row], settings: Settings):
        self.answers, self.rows, self.settings = answers, list(rows), settings
        self.pool = max(settings.pool, settings.batch_size)
        self._batches: list[list[Dialogue]] = []
        self._visits = 0

    def __call__(self, step: int) -> Batch:
        """Tokens `[B, L + 1]` int32, weights `[B, L]` float32 and anchors `[B, N]` int32 of a step.

        Raises ValueError where no row of a whole epoch can be learned from.
        """
        pools = -(-len(self.rows) // self.pool)
        while len(self._batches) <= step:
            turn, pool = divmod(self._visits, pools)
            order = self._random(2, turn).permutation(len(self.rows))
            before, chosen = order[: pool * self.pool], order[pool * self.pool : (pool + 1) * self.pool]
            if turn == 0 and pool:
                again = min(len(before), self.pool * (self.settings.repeats - 1))
                more = self._random(5, self._visits).choice(before, again, replace=False)
                chosen = np.concatenate([chosen, more])
            dialogues = self.answers.of([self.rows[i] for i in chosen])
            self._batches += batched(dialogues, self.settings.batch_size, self._random(3, self._visits))
            self._visits += 1
            if self._visits >= pools and not self._batches:
                raise ValueError("nothing to learn: every answer loops, or no prompt leaves room for one")
        return arrays(self._batches[step], self.settings.anchors, self._random(1, step))

    def _random(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.settings.seed, *numbers])


def batched(dialogues: Sequence[Dialogue], size: int, rng: np.random.Generator) -> list[list[Dialogue]]:
    """Batches of `size` sequences that are padded to the same length, in random order; the last is filled up."""
    shuffled = [dialogues[i] for i in rng.permutation(len(dialogues))]
    filled = list(itertools.islice(itertools.cycle(shuffled), -(-len(shuffled) // size) * size))
    # By what they are padded to, not by length: answers of one length are often of one kind, and a batch needs all.
    filled.sort(key=lambda dialogue: _padded(len(dialogue.ids)))
    batches = [filled[i : i + size] for i in range(0, len(filled), size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def arrays(dialogues: Sequence[Dialogue], anchors: int, rng: np.random.Generator) -> Batch:
    """Tokens, weights and anchors of a batch; see `Batches`."""
    length = max(_padded(len(dialogue.ids)) for dialogue in dialogues)
    tokens = np.zeros((len(dialogues), length + 1), np.int32)
    weights = np.zeros((len(dialogues), length), np.float32)
    for row, weight, dialogue in zip(tokens, weights, dialogues, strict=True):
        row[: len(dialogue.ids)] = dialogue.ids
        # 1 where the token after a position belongs to the answer.
        weight[max(dialogue.start - 1, 0) : len(dialogue.ids) - 1] = 1
    return mx.array(tokens), mx.array(weights), mx.array(sample_anchors(weights, anchors, rng))


def _padded(tokens: int) -> int:
    """Rows that a sequence of so many tokens is run in: the last token is a label only."""
    return -(-(tokens - 1) // PAD) * PAD
