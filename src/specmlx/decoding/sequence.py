"""A sequence: one conversation that goes on, and what has to be known of its request to decode it."""

from collections.abc import Collection
from dataclasses import dataclass, field

import mlx.core as mx

from specmlx.cache.conversation import Conversation
from specmlx.decoding.policy import Policy
from specmlx.decoding.stats import Stats


@dataclass(frozen=True)
class Token:
    """A token that leaves: its id, the target's log-probabilities `[V]`, if it was drafted, why it is the last."""

    id: int
    logprobs: mx.array
    from_draft: bool
    finish_reason: str | None = None


@dataclass(eq=False)
class Sequence:
    """What a batch decodes.

    conversation: prefilled, its last prompt token pending, once it joins; None before. history: the ids that logits
    processors see, prompt and generated. owner: what `conversation.claim` gave.
    over: whether it has ended; its reader may end it by this after any token. error: what ended it, if it failed.
    began: seconds of the batch's when its decoding began.
    """

    conversation: Conversation | None
    policy: Policy
    history: list[int] = field(default_factory=list)
    stop_tokens: Collection[int] = ()
    max_tokens: int = -1
    stats: Stats = field(default_factory=Stats)
    owner: int | None = None
    over: bool = False
    error: Exception | None = None
    began: float = 0.0
    reason: str | None = field(init=False)

    def __post_init__(self):
        self.reason = self.stats.reason
        if self.conversation is not None:
            self.owner = self.conversation.claim()

    @property
    def left(self) -> int | None:
        """How many tokens it may still give; None: any number."""
        return self.max_tokens - self.stats.generation_tokens if self.max_tokens > 0 else None

    def fail(self, error: Exception) -> None:
        self.error, self.over = error, True
