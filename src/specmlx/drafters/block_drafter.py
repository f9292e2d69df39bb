"""What DFlash and DSpark do alike: observe the target's rows, and run a block of masks after the anchor."""

from functools import cached_property
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from specmlx.cache.kv import KV, reserve, write
from specmlx.drafters.block import BlockTrunk, Join
from specmlx.drafters.context import SLACK, Context, Rows
from specmlx.drafters.pairing import TargetSizes
from specmlx.drafters.vocabulary import DraftVocabulary, logits_of
from specmlx.formats.module_weights import fingerprint

# How many rows before the anchor the layers see that have no window of their own.
DRAFT_WINDOW = 4096


class Target(Protocol):
    """What a drafter uses of its target: its sizes, its embedding and its head's layer."""

    config: TargetSizes

    def embed_tokens(self, ids: mx.array) -> mx.array: ...

    @property
    def head(self) -> nn.Module: ...


class BlockDrafter:
    """A trunk paired with its target, whose embedding and head are used where they are: never copied.

    `model` is the tree of the drafter's own weights; the pair is no module, so neither tree holds the other.
    """

    def __init__(self, model: BlockTrunk, target: Target, vocabulary: DraftVocabulary | None = None):
        """`vocabulary`: what the rows of the model's own head stand for, where they are not the whole vocabulary."""
        self.model = model
        self.target = target
        self.config = model.config
        self.tap_ids = self.config.target_layer_ids
        self.max_width = self.config.max_width
        self.draft_window: int | None = DRAFT_WINDOW
        # The head is run in its own dtype, else its weights would be converted for every pass.
        self.target_dtype = target.embed_tokens(mx.zeros((1,), dtype=mx.int32)).dtype
        self.vocab_size = self.config.vocab_size
        self.vocabulary = vocabulary
        self.shortlist: nn.Module | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A name for the drafter's weights and window, taken when it is first asked for."""
        return f"{fingerprint(self.model, self.config)}-{self.draft_window}"

    @property
    def window(self) -> int | None:
        """The rows before the anchor that a proposal looks at, in any layer; None: all."""
        keeps = [rows.keep for rows in self.new_context().groups]
        return None if None in keeps else max(keeps)

    def new_context(self, batch: int = 1, start: int = 0) -> Context:
        return Context(self.config.windows, batch, start, self.draft_window)

    def observe(self, context: Context, tokens: mx.array, features: mx.array, count: int | mx.array) -> None:
        """See `Drafter.observe`; block drafters read the taps only.

        Raises ValueError for features of another width, and for an int `count` outside 0..n.
        """
        B, n, F = features.shape
        if F != (width := len(self.tap_ids) * self.config.hidden_size):
            raise ValueError(f"features are {F} wide: {len(self.tap_ids)} taps of this drafter make {width}")
        if isinstance(count, int):
            if not 0 <= count <= n:
                raise ValueError(f"can't observe {count} rows: features have {n}")
            features = features[:, :count]
            n = count
        else:
            # Zero rows in make zero keys and values: finite, as stale buffer rows must be.
            features = mx.where((mx.arange(n) < count[:, None])[..., None], features, 0)
        if n == 0:
            return
        # Of a long prefill step only the last rows are worth projecting.
        known = isinstance(count, int)
        skips = [max(n - rows.keep, 0) if known and rows.keep is not None else 0 for rows in context.groups]
        first = min(skips)
        projected = self.model.project(features[:, first:])
        for rows, skip in zip(context.groups, skips, strict=True):
            if skip:
                rows.advance(skip)
            self._append(rows, projected[:, skip - first :], count - skip)

    def _append(self, rows: Rows, projected: mx.array, count: int | mx.array) -> None:
        n = projected.shape[1]
        most = None if rows.keep is None else 2 * (rows.keep + self.config.block_size) + SLACK
        if most and rows.max_length and rows.max_length + n > most:
            rows.drop(rows.keep)
        rows.before = (rows.length, rows.max_length)
        positions = (rows.base + rows.length)[:, None] + mx.arange(n, dtype=mx.int32)
        for i in rows.layers:
            keys, values = self.model.layers[i].self_attn.keys_values(projected, positions)
            new = KV(keys, values)
            rows.kvs[i] = write(reserve(rows.kvs[i], rows.max_length + n, new), new, rows.length)
        rows.length = rows.length + count
        rows.max_length += n

    def block_embeddings(self, anchor: mx.array) -> mx.array:
        """Embeddings `[..., block, hidden]` of blocks that begin with the anchors `[...]`.

        They are raw rows of the target's table or the drafter's own, scaled; the mask token is a row like any other.
        """
        masks = mx.full((*anchor.shape, self.config.block_size - 1), self.config.mask_token_id, dtype=mx.int32)
        ids = mx.concatenate([anchor[..., None].astype(mx.int32), masks], axis=-1)
        x = self.model.embed_tokens(ids) if self.config.own_embedding else self.target.embed_tokens(ids)
        return x if self.config.input_embedding_scale == 1 else x * self.config.input_embedding_scale

    def block_hidden(self, context: Context, anchor: mx.array) -> mx.array:
        """Normed rows `[B, block, hidden]` of the block that starts at the anchor `[B]`.

        Its keys and values are written behind the context's rows, as scratch that the next rows overwrite.
        """
        x = self.block_embeddings(anchor)
        R = x.shape[1]
        offsets = mx.arange(R, dtype=mx.int32)
        joins: dict[int, Join] = {}
        masks: dict[int, mx.array] = {}
        for rows in context.groups:
            length = rows.max_length + R
            keys = mx.arange(length, dtype=mx.int32)
            mask = keys < (rows.length + R)[:, None]
            if rows.keep is not None:
                # Rows that are still there, but not for long, are not seen: when they go must not matter.
                mask = mask & (keys >= (rows.length - rows.keep)[:, None])
            mask = mask[:, None, None, :]
            queries = (rows.base + rows.length)[:, None] + offsets
            seen = self.model.visible(rows.window, queries, rows.base[:, None] + keys)
            mask = mask if seen is None else mask & seen
            for i in rows.layers:
                joins[i] = _scratch(rows, i, length)
                masks[i] = mask
        order = range(len(self.model.layers))
        positions = context.position[:, None] + offsets
        x = x.astype(self.model.dtype)
        return self.model.run(x, positions, [joins[i] for i in order], [masks[i] for i in order])

    def slots_hidden(self, context: Context, anchor: mx.array, width: int) -> mx.array:
        """Normed rows `[B, width, hidden]` of the first slots. The whole block runs: its rows see one another."""
        first = self.config.first_row
        return self.block_hidden(context, anchor)[:, first : first + width]

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits `[..., Vd]` of normed rows `[..., hidden]`: head, drafter's multiplier, soft cap.

        The head is the drafter's own, its own table's, or the target's; what its rows stand for is `vocabulary`'s.
        """
        own = self.config.own_head or self.config.own_embedding
        hidden = hidden if own else hidden.astype(self.target_dtype)
        if self.shortlist is not None:
            logits = self.shortlist(hidden)
        elif self.config.own_head:
            logits = self.model.lm_head(hidden)
        else:
            # Not by the target's own code: what it does to logits, a drafter's config says once more.
            logits = logits_of(self.model.embed_tokens if own else self.target.head, hidden)
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        if cap := self.config.final_logit_softcapping:
            logits = mx.tanh(logits / cap) * cap
        return logits

    def head(self) -> nn.Module:
        """The layer that logits come from. Raises ValueError for a target that does not show its own."""
        if self.shortlist is not None:
            return self.shortlist
        if self.config.own_head:
            return self.model.lm_head
        return self.model.embed_tokens if self.config.own_embedding else self.target.head

    def keep_rows(self, rows: mx.array) -> None:
        """Follow the head, which keeps these of its rows."""

    def widen(self, logits: mx.array) -> mx.array:
        """Logits `[..., Vd]` over the target's vocabulary `[..., V]`."""
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)

    def check_width(self, width: int) -> None:
        """Raises ValueError for a width outside 0..max_width."""
        if not 0 <= width <= self.max_width:
            raise ValueError(f"width {width} is outside 0..{self.max_width}, this drafter's range")


def _scratch(rows: Rows, layer: int, length: int) -> Join:
    def join(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        new = KV(keys, values)
        kv = write(reserve(rows.kvs[layer], length, new), new, rows.length)
        # Kept, so that nothing else refers to the old buffers and mlx writes in place.
        rows.kvs[layer] = kv
        return kv.keys[:, :, :length], kv.values[:, :, :length]

    return join
