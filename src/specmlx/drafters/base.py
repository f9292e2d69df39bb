"""What the drafters of this package do alike: check what they are given, draw one token after another, use a head."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.proposal import DraftPolicy, Proposal
from specmlx.drafters.vocabulary import DraftVocabulary, take_rows
from specmlx.formats.module_weights import fingerprint
from specmlx.targets.target import Target

# By any drafter that runs its model once a token.
MAX_WIDTH = 7

Drawn = tuple[mx.array, mx.array | None]
"""Tokens `[B, S]` int32 and q `[B, S, V]` float32, or None for q."""


class BaseDrafter:
    """See `Drafter`. A subclass gives `new_context`, `_observe` and `_propose`.

    The last two are called for at least one row or slot; `_propose` may return None, for no tokens.
    features_size: how wide the features are, 0 where only the tokens are used.
    """

    tap_ids: tuple[int, ...] = ()
    features_size = 0
    max_width = MAX_WIDTH

    def observe(self, context: Any, tokens: mx.array, features: mx.array | None, count: int | mx.array) -> None:
        """See `Drafter.observe`. Raises ValueError for features of another width, and an int `count` outside 0..n."""
        n = tokens.shape[1]
        if not self.features_size:
            features = None
        elif (found := features.shape[2]) != self.features_size:
            taps = f"this drafter's are {self.features_size}, the outputs of layers {list(self.tap_ids)}"
            raise ValueError(f"features are {found} wide: {taps}")
        if isinstance(count, int):
            if not 0 <= count <= n:
                raise ValueError(f"can't observe {count} rows: there are {n}")
            tokens, n = tokens[:, :count], count
            features = None if features is None else features[:, :count]
        elif features is not None:
            # Zero rows in make zero keys and values: finite, as stale buffer rows must be.
            features = mx.where((mx.arange(n) < count[:, None])[..., None], features, 0)
        if n:
            self._observe(context, tokens, features, count)

    def propose(self, context: Any, anchor: mx.array, num_draft_tokens: int, policy: DraftPolicy) -> Proposal:
        """See `Drafter.propose`. Raises ValueError for a number outside 0..max_width."""
        if not 0 <= num_draft_tokens <= self.max_width:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}: this drafter proposes 0 to {self.max_width}")
        proposal = self._propose(context, anchor, num_draft_tokens, policy) if num_draft_tokens else None
        return proposal or Proposal(mx.zeros((len(anchor), 0), dtype=mx.int32))


class HeadedDrafter(BaseDrafter):
    """A model paired with its target, whose embedding and head are used where they are: never copied.

    `model` is the tree of the drafter's own weights; the pair is no module, so neither tree holds the other.
    vocabulary: what the rows of its head stand for, where they are not the whole vocabulary.
    shortlist: those rows of the head that it was shortened to.
    """

    def __init__(
        self, model: nn.Module, target: Target, tap_ids: tuple[int, ...], vocabulary: DraftVocabulary | None = None
    ):
        self.model, self.target, self.config = model, target, model.config
        self.tap_ids, self.features_size = tap_ids, len(tap_ids) * self.config.hidden_size
        self.vocab_size = self.config.vocab_size
        self.vocabulary = vocabulary
        self.shortlist: nn.Module | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A name for the drafter's weights, taken when it is first asked for."""
        return fingerprint(self.model, self.config)

    def head(self) -> nn.Module:
        """The layer, or the table, that logits come from. Raises ValueError for a target that does not show its own."""
        return self.target.head if self.shortlist is None else self.shortlist

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits `[..., Vd]` of normed rows `[..., hidden]`; what the head's rows stand for is `vocabulary`'s."""
        return logits_of(self.head(), hidden)

    def widen(self, logits: mx.array) -> mx.array:
        """Logits `[..., Vd]` over the target's vocabulary `[..., V]`."""
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)

    def shorten(self, ids: mx.array) -> None:
        """Let the head have rows for the target's ids `[N]` only, of those that it had before; in place.

        Raises ValueError where the head is not a layer whose rows can be taken, or has none of the ids.
        """
        rows = ids if self.vocabulary is None else self.vocabulary.rows_of(ids)
        if rows.size == 0:
            raise ValueError("the drafter's vocabulary has none of the shortlist's tokens")
        self.keep_rows(rows)
        kept = ids if self.vocabulary is None else self.vocabulary.ids[rows]
        self.vocabulary = DraftVocabulary(kept, self.vocab_size)

    def keep_rows(self, rows: mx.array) -> None:
        """Keep these of the head's rows."""
        self.shortlist = take_rows(self.head(), rows)


def logits_of(head: nn.Module, hidden: mx.array) -> mx.array:
    """Logits `[..., V]` of rows `[..., D]` by a head, or a table that is one."""
    tables = (nn.Embedding, nn.QuantizedEmbedding)
    return head.as_linear(hidden) if isinstance(head, tables) else head(hidden)


def one_by_one(anchor: mx.array, slots: int, draw: Callable[[int, mx.array], Drawn]) -> Drawn:
    """Tokens drawn one after another; `draw` gives a slot's, by the slot and the token before it `[B, 1]`."""
    previous, tokens, qs = anchor.astype(mx.int32)[:, None], [], []
    for slot in range(slots):
        previous, q = draw(slot, previous)
        tokens.append(previous)
        qs.append(q)
    return mx.concatenate(tokens, axis=1), None if qs[0] is None else mx.concatenate(qs, axis=1)
