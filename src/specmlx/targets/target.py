"""What the targets share: a hybrid of ours, and any other model of mlx-lm's."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.targets.drafting import Drafted


class Target(Drafted, nn.Module):
    """A model that runs rows behind those of a conversation; a pass counts only once it is committed."""

    def __init__(self, config: Any, state_layers: int):
        """`state_layers`: how many layers, or caches of mlx-lm's, keep a state."""
        super().__init__()
        self.config = config
        self.state_layers = state_layers
        # Where its files are, if it was loaded; and what was named, which may be a GGUF file: an MTP head is in it.
        self.directory: Path | None = None
        self.source: Path | None = None
        # What to say of kernels that differ by the number of rows, if the kernels were chosen so.
        self.kernel_note: str | None = None
        # The processes that have the other parts of it.
        self.sharding_group: mx.distributed.Group | None = None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def prefill(
        self, states: Any, tokens: mx.array, tap_ids: Sequence[int] = (), step_size: int = 2048
    ) -> Iterator[tuple[mx.array, mx.array | None]]:
        """Run tokens `[B, L]` that are all kept, and yield each step's tokens and features once it is committed."""
        while tokens.shape[1]:
            n = min(step_size, tokens.shape[1], states.rows_left or step_size)
            step, tokens = tokens[:, :n], tokens[:, n:]
            features = self._prefilled(states, step, tap_ids)
            try:
                states.evaluate()
                states.commit(n)
            except BaseException:
                states.abort()
                raise
            mx.clear_cache()
            yield step, features

    def _prefilled(self, states: Any, step: mx.array, tap_ids: Sequence[int]) -> mx.array | None:
        """The features of a step, whose pass it leaves open; no logits are to be computed."""
        raise NotImplementedError
