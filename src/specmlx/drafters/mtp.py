"""The native multi-token prediction head of Qwen3.5 and later: one more layer, which reads the target's last rows."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.base import MAX_WIDTH, Drawn, HeadedDrafter, one_by_one
from specmlx.drafters.context import Rows
from specmlx.drafters.proposal import DraftPolicy, Proposal
from specmlx.targets.config import FULL, HybridConfig
from specmlx.targets.hybrid import DecoderLayer, Model


class MTPHead(nn.Module):
    """A full-attention layer of the target's kind behind fc, by the publishers' names (`mtp.*`). Norms hold 1 + w."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.config = config
        D, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(D, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(D, eps=eps)
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.layers = [DecoderLayer(config, config.layer_types.index(FULL))]
        self.norm = nn.RMSNorm(D, eps=eps)

    def rows(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """The layer's input `[B, T, D]` from the next tokens' embeddings and normed rows of target or head."""
        normed = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        return self.fc(mx.concatenate(normed, axis=-1))


class MTPContext(Rows):
    """The head's keys and values, and the target's last rows.

    Slot i of the buffers belongs to token i of the `length` observed ones and was made of it and of the target's row
    i - 1. Slot 0 has no such row, so it is never seen: the head is one row behind the target.
    newest: `[B, 1 + n, D]`, the target's normed rows from the one before the last observation on.
    """

    def __init__(self, batch: int, hidden_size: int, dtype: mx.Dtype):
        super().__init__(batch, (0,))
        self.newest = mx.zeros((batch, 1, hidden_size), dtype=dtype)

    @property
    def hidden(self) -> mx.array:
        """The target's last row `[B, 1, D]`."""
        return mx.take_along_axis(self.newest, (self.length - self.start)[:, None, None], axis=1)

    def pack(self, lane: int = 0) -> dict[str, mx.array]:
        """See `Rows`."""
        packed = {name.removeprefix("0."): x for name, x in super().pack(lane).items() if name != "0.base"}
        return packed | {"hidden": self.hidden[lane]}

    def unpack(self, packed: dict[str, mx.array]) -> None:
        super().unpack({f"0.{name}": x for name, x in packed.items()})
        self.newest = packed["hidden"][:, None]


class MTP(HeadedDrafter):
    """An MTP head paired with its target: row t takes token t + 1 and the target's row t, and proposes token t + 2.

    After the anchor it is run on its own output, for which it was not trained, as often as one likes. Proposes nothing
    before the target has run a row.
    """

    model: MTPHead
    target: Model

    def __init__(self, model: MTPHead, target: Model, max_width: int = MAX_WIDTH):
        super().__init__(model, target, (target.config.num_hidden_layers - 1,))
        self.max_width, self.head_dtype = max_width, target.model.norm.weight.dtype

    def new_context(self, batch: int = 1, start: int = 0) -> MTPContext:
        """See `Drafter.new_context`. Keys are roped by their slot: only distances count, so `start` doesn't."""
        return MTPContext(batch, self.config.hidden_size, self.model.norm.weight.dtype)

    def _observe(self, context: MTPContext, tokens: mx.array, features: mx.array, count: int | mx.array) -> None:
        # Only keys and values are made.
        hidden = self.target.model.norm(features).astype(context.newest.dtype)
        context.newest = mx.concatenate([context.hidden, hidden], axis=1)
        layer = self.model.layers[0]
        x = layer.input_layernorm(self.model.rows(self._embed(tokens), context.newest[:, :-1]))
        context.write(0, *layer.self_attn.keys_values(x, context.length))
        context.append(count, tokens.shape[1])

    def _propose(self, context: MTPContext, anchor: mx.array, slots: int, policy: DraftPolicy) -> Proposal | None:
        if context.max_length == 0:
            return None
        hidden, layer = context.hidden, self.model.layers[0]

        def draw(step: int, token: mx.array) -> Drawn:
            nonlocal hidden
            slot, length = context.length + step, context.max_length + step + 1
            at = mx.arange(length, dtype=mx.int32)
            # A sequence that has observed nothing sees its own slot only: what it proposes is a guess, but finite.
            seen = ((at > 0) & (at < slot[:, None])) | (at == slot[:, None])
            kv, mask = context.kvs[0], seen[:, None, None]
            mixer = partial(layer.self_attn, kv=kv, start=slot, length=length, mask=mask, first=1)
            y, context.kvs[0] = layer(self.model.rows(self._embed(token), hidden), mixer)
            hidden = self.model.norm(y)
            return policy.draft(self.widen(self.logits(hidden)), step)

        return Proposal(*one_by_one(anchor, slots, draw))

    def _embed(self, tokens: mx.array) -> mx.array:
        return self.target.embed_tokens(tokens).astype(self.model.norm.weight.dtype)
