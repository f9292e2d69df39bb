"""What the drafters of this package do alike: check what they are given, draw one token after another, use a head."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.proposal import DraftPolicy, Proposal
from specmlx.formats.module_weights import fingerprint
from specmlx.formats.scaled_linear import ScaledLinear
from specmlx.targets.target import Target

# By any drafter that runs its model once a token.
MAX_WIDTH = 7
# Tokens `[B, S]` int32 and q `[B, S, V]` float32, or None for q.
Drawn = tuple[mx.array, mx.array | None]


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


class DraftVocabulary:
    """The target's ids `[Vd]` that the rows of a drafter's head stand for."""

    def __init__(self, ids: mx.array, vocab_size: int):
        """Raises ValueError unless the ids are all different and in 0..vocab_size - 1."""
        found = ids.tolist()
        if outside := [i for i in found if not 0 <= i < vocab_size]:
            raise ValueError(f"the draft vocabulary has id {outside[0]}: the target's has {vocab_size}")
        if len(set(found)) < len(found):
            raise ValueError("the draft vocabulary has an id twice")
        self.ids = ids.astype(mx.int32)
        # The head's row of each of the target's ids; where there is none, the row behind the last.
        places = mx.full((vocab_size,), ids.size, dtype=mx.int32)
        self.places = mx.put_along_axis(places, self.ids, mx.arange(ids.size, dtype=mx.int32), axis=0)
        mx.eval(self.ids, self.places)

    def widen(self, logits: mx.array) -> mx.array:
        """Logits `[..., Vd]` as `[..., V]`, -inf where there is no row."""
        none = mx.full((*logits.shape[:-1], 1), -mx.inf, dtype=logits.dtype)
        return mx.take(mx.concatenate([logits, none], axis=-1), self.places, axis=-1)


class HeadedDrafter(BaseDrafter):
    """A model paired with its target, whose embedding and head are used where they are: never copied.

    `model` is the tree of the drafter's own weights; the pair is no module, so neither tree holds the other.
    vocabulary: what the rows of its head stand for, where they are not the whole vocabulary.
    head_dtype: what rows are cast to before the head, so that its weights aren't in every pass; None leaves them.
    shortlist: those rows of the head that it was shortened to.
    """

    def __init__(self, model: nn.Module, target: Target, tap_ids: tuple[int, ...]):
        self.model, self.target, self.config = model, target, model.config
        self.tap_ids, self.features_size = tap_ids, len(tap_ids) * self.config.hidden_size
        self.vocab_size = self.config.vocab_size
        self.vocabulary: DraftVocabulary | None = None
        self.head_dtype = self.shortlist = None

    @cached_property
    def fingerprint(self) -> str:
        """A name for the drafter's weights, taken when it is first asked for."""
        return fingerprint(self.model, self.config)

    def head(self) -> nn.Module:
        """The layer, or the table, that logits come from. Raises ValueError for a target that does not show its own."""
        return self.target.head if self.shortlist is None else self.shortlist

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits `[..., Vd]` of normed rows `[..., hidden]`; what the head's rows stand for is `vocabulary`'s."""
        return logits_of(self.head(), hidden if self.head_dtype is None else hidden.astype(self.head_dtype))

    def widen(self, logits: mx.array) -> mx.array:
        """Logits `[..., Vd]` over the target's vocabulary `[..., V]`."""
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)

    def shorten(self, ids: mx.array) -> None:
        """Let the head have rows for the target's ids `[N]` only, of those that it had before; in place.

        Raises ValueError where the head is not a layer whose rows can be taken, or has none of the ids.
        """
        rows = ids
        if (before := self.vocabulary) is not None:
            rows = mx.array([row for row in before.places[ids].tolist() if row < before.ids.size], dtype=mx.int32)
            if rows.size == 0:
                raise ValueError("the drafter's vocabulary has none of the shortlist's tokens")
            ids = before.ids[rows]
        self.keep_rows(rows)
        self.vocabulary = DraftVocabulary(ids, self.vocab_size)

    def keep_rows(self, rows: mx.array) -> None:
        """Keep these of the head's rows."""
        self.shortlist = take_rows(self.head(), rows)


def take_rows(layer: nn.Linear | nn.Embedding, ids: mx.array) -> nn.Module:
    """The head `[Vd, D]` that has the rows `ids` [Vd] of a head or of a tied table, quantized if that is.

    Raises ValueError for a layer of another kind.
    """
    if isinstance(layer, ScaledLinear):
        rows = ScaledLinear(layer.mode)
    elif isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        # Its own first weights are replaced below.
        size = layer.group_size
        rows = nn.QuantizedLinear(2 * size, 8, bias=False, group_size=size, bits=layer.bits, mode=layer.mode)
    elif isinstance(layer, (nn.Linear, nn.Embedding)):
        rows = nn.Linear(1, ids.size, bias=False)
    else:
        raise ValueError(f"can't take rows of a {type(layer).__name__}: a shortlist needs a plain or quantized head")
    for name in layer:
        rows[name] = layer[name][ids] if layer[name].ndim else layer[name]
    mx.eval(rows.parameters())
    return rows


def dense_rows(layer: nn.Linear, ids: mx.array) -> mx.array:
    """Rows `[..., K]` of a plain or quantized layer `[N, K]` for ids `[...]`. Raises ValueError for another kind."""
    for kind, table in ((nn.QuantizedLinear, nn.QuantizedEmbedding), (nn.Linear, nn.Embedding)):
        if isinstance(layer, kind):
            return table.__call__(layer, ids)
    raise ValueError(f"can't take rows of a {type(layer).__name__}: leave draft_markov_top_k out")


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
