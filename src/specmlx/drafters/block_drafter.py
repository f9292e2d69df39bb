"""What DFlash and DSpark do alike: observe the target's rows, and run a block of masks after the anchor."""

from functools import cached_property, partial

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.base import DraftVocabulary, HeadedDrafter
from specmlx.drafters.block import BlockTrunk, visible
from specmlx.drafters.context import Context, Rows
from specmlx.drafters.proposal import DraftPolicy, Proposal
from specmlx.targets.target import Target

# Rows beyond two windows and blocks that a sliding layer may pile up before the old ones are dropped.
SLACK = 256


class BlockDrafter(HeadedDrafter):
    """A trunk paired with its target."""

    trunk: type[BlockTrunk] = BlockTrunk

    def __init__(self, model: BlockTrunk, target: Target, vocabulary: DraftVocabulary | None = None):
        config = model.config
        super().__init__(model, target, config.target_layer_ids)
        self.vocabulary, self.max_width, self.first_row = vocabulary, config.max_width, config.first_row
        # How many rows before the anchor the layers see that have no window of their own.
        self.draft_window: int | None = 4096
        self._causal = {window: config.causal(window) for window in config.windows}
        if not (config.own_head or config.own_embedding):
            self.head_dtype = target.embed_tokens(mx.zeros((1,), dtype=mx.int32)).dtype

    @cached_property
    def fingerprint(self) -> str:
        """A name for the drafter's weights and window, taken when it is first asked for."""
        return f"{super().fingerprint}-{self.draft_window}"

    @property
    def window(self) -> int | None:
        """The rows before the anchor that a proposal reads, in any layer; None: all."""
        keeps = [rows.keep for rows in self.new_context().groups]
        return None if None in keeps else max(keeps)

    def new_context(self, batch: int = 1, start: int = 0) -> Context:
        """See `Drafter.new_context`. No layer keeps more than `draft_window` rows."""
        groups = []
        for window in dict.fromkeys(self.config.windows):
            layers = tuple(i for i, other in enumerate(self.config.windows) if other == window)
            keep = min((n for n in (window and window - 1, self.draft_window) if n is not None), default=None)
            groups.append(Rows(batch, layers, window, keep, start))
        return Context(groups)

    def _observe(self, context: Context, tokens: mx.array, features: mx.array, count: int | mx.array) -> None:
        # Of a long prefill step only the last rows are worth projecting.
        n, known = features.shape[1], isinstance(count, int)
        skips = [max(n - rows.keep, 0) if known and rows.keep is not None else 0 for rows in context.groups]
        first = min(skips)
        projected = self.model.project(features[:, first:])
        for rows, skip in zip(context.groups, skips, strict=True):
            new, most = n - skip, None if rows.keep is None else 2 * (rows.keep + self.config.block_size) + SLACK
            if skip or (most and rows.max_length + new > most):
                # Those after skipped ones fill the window.
                rows.drop(0 if skip else rows.keep)
                rows.base = rows.base + skip
            positions = (rows.base + rows.length)[:, None] + mx.arange(new, dtype=mx.int32)
            for i in rows.layers:
                attention = self.model.layers[i].self_attn
                rows.write(i, *attention.keys_values(projected[:, skip - first :], positions))
            rows.append(count - skip, new)

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
        x = self.block_embeddings(anchor).astype(self.model.dtype)
        R = x.shape[1]
        by_layer: dict[int, tuple[Rows, mx.array]] = {}
        for rows in context.groups:
            keys = mx.arange(rows.max_length + R, dtype=mx.int32)
            mask = keys < (rows.length + R)[:, None]
            if rows.keep is not None:
                # Rows that are still there, but not for long, are not seen: when they go must not matter.
                mask = mask & (keys >= (rows.length - rows.keep)[:, None])
            positions = (rows.base + rows.length)[:, None] + mx.arange(R, dtype=mx.int32)
            causal = self._causal[rows.window]
            mask = visible(mask[:, None, None], rows.window, causal, positions, rows.base[:, None] + keys)
            by_layer |= dict.fromkeys(rows.layers, (rows, mask))
        for i, layer in enumerate(self.model.layers):
            rows, mask = by_layer[i]
            x = layer(x, positions, partial(rows.write, i), mask)
        return self.model.norm(x)

    def slots_hidden(self, context: Context, anchor: mx.array, slots: int) -> mx.array:
        """Normed rows `[B, slots, hidden]` of the first slots. The whole block runs: its rows see one another."""
        return self.block_hidden(context, anchor)[:, self.first_row : self.first_row + slots]

    def head(self) -> nn.Module:
        """The drafter's own head, its own table, or the target's; see `HeadedDrafter.head`."""
        if self.shortlist is None and self.head_dtype is None:
            return self.model.lm_head if self.config.own_head else self.model.embed_tokens
        return super().head()

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits `[..., Vd]` of normed rows `[..., hidden]`: head, drafter's multiplier, soft cap."""
        # Not by the target's own code: what it does to logits, a drafter's config says once more.
        logits = super().logits(hidden)
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        if cap := self.config.final_logit_softcapping:
            logits = mx.tanh(logits / cap) * cap
        return logits


class DFlash(BlockDrafter):
    """DFlash (arXiv 2602.06036): γ = block - 1; row t proposes the token at its own position, the anchor's none."""

    def _propose(self, context: Context, anchor: mx.array, slots: int, policy: DraftPolicy) -> Proposal:
        return Proposal(*policy.draft(self.widen(self.logits(self.slots_hidden(context, anchor, slots))), 0))
