"""The native multi-token prediction head of Qwen3.5 and later: one more layer, which reads the target's last rows."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from specmlx.cache.kv import KV, merge, reserve, take, write
from specmlx.drafters.block_drafter import Target
from specmlx.drafters.proposal import DraftPolicy, Proposal
from specmlx.drafters.vocabulary import DraftVocabulary, logits_of
from specmlx.formats.module_weights import fingerprint
from specmlx.targets.config import FULL, HybridConfig
from specmlx.targets.hybrid import DecoderLayer

MAX_WIDTH = 7
"""γ: the head was trained to look one token ahead and may be run on its own output as often as one likes."""


class Normed(Protocol):
    """The part of a target that has its final norm."""

    norm: nn.Module


class NormedTarget(Target, Protocol):
    """A target whose final norm is used as well."""

    model: Normed


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
        return self.fc(
            mx.concatenate([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], axis=-1)
        )


class MTPContext:
    """The head's keys and values, and the target's last row.

    Slot i of the buffers belongs to token i of the `length` observed ones and was made of it and of the target's row
    i - 1. Slot 0 has no such row, so it is never seen: the head is one row behind the target.
    """

    def __init__(self, batch: int, width: int, dtype: mx.Dtype):
        self.kv: KV | None = None
        self.hidden = mx.zeros((batch, width), dtype=dtype)
        self.length = mx.zeros((batch,), dtype=mx.int32)
        self.max_length = 0
        # Of the last observation: length and max_length before it, and the target's rows from the one before it on.
        self.newest = (self.length, 0, self.hidden[:, None])

    def take(self, rows: mx.array) -> None:
        """Keep the target's rows `[B, n, D]` of an observation that begins."""
        self.newest = (self.length, self.max_length, mx.concatenate([self.hidden[:, None], rows], axis=1))

    def end(self, count: int | mx.array, most: int) -> None:
        """The observation had `count` rows, no more than `most` in any lane."""
        length, max_length, hidden = self.newest
        last = mx.broadcast_to(mx.array(count, dtype=mx.int32), (len(hidden),))[:, None, None]
        self.hidden = mx.take_along_axis(hidden, last, axis=1)[:, 0]
        self.length, self.max_length = length + count, max_length + most

    def settle(self, count: int | Sequence[int]) -> None:
        """See `drafters.proposal.Context`."""
        if isinstance(count, int):
            self.end(count, count)
        else:
            self.end(mx.array(count, dtype=mx.int32), max(count))

    def arrays(self) -> list[mx.array]:
        return [self.hidden, self.length, self.newest[2], *(self.kv or ())]

    def joined(self, others: "Sequence[MTPContext]") -> "MTPContext":
        """See `drafters.proposal.Joinable`."""
        contexts = [self, *others]
        return self._made(
            merge([(context.kv, len(context.length)) for context in contexts]),
            mx.concatenate([context.hidden for context in contexts]),
            mx.concatenate([context.length for context in contexts]),
            max(context.max_length for context in contexts),
        )

    def lanes(self, indices: Sequence[int]) -> "MTPContext":
        at = mx.array(indices, dtype=mx.int32)
        return self._made(
            None if self.kv is None else take(self.kv, at), self.hidden[at], self.length[at], self.max_length
        )

    def _made(self, kv: KV | None, hidden: mx.array, length: mx.array, max_length: int) -> "MTPContext":
        made = MTPContext(len(length), hidden.shape[1], hidden.dtype)
        made.kv, made.hidden, made.length, made.max_length = kv, hidden, length, max_length
        made.newest = (length, max_length, hidden[:, None])
        return made

    def pack(self, lane: int = 0) -> dict[str, mx.array]:
        """See `Packable`."""
        length = self.length[lane].item()
        packed = {"length": mx.array([length], dtype=mx.int32), "hidden": self.hidden[lane : lane + 1]}
        if length:
            keys, values = (mx.contiguous(x[lane : lane + 1, :, :length]) for x in self.kv)
            packed |= {"keys": keys, "values": values}
        return packed

    def unpack(self, packed: dict[str, mx.array]) -> None:
        self.length, self.hidden = packed["length"], packed["hidden"]
        self.max_length = self.length.item()
        self.kv = KV(packed["keys"], packed["values"]) if self.max_length else None


class MTP:
    """An MTP head paired with its target: row t takes token t + 1 and the target's row t, and proposes token t + 2.

    Behind the anchor it is run on its own output. Proposes nothing before the target has run a row.
    """

    def __init__(self, model: MTPHead, target: NormedTarget, max_width: int = MAX_WIDTH):
        self.model = model
        self.target = target
        self.tap_ids = (target.config.num_hidden_layers - 1,)
        self.max_width = max_width
        self.vocab_size = target.config.vocab_size
        self.vocabulary: DraftVocabulary | None = None
        self.shortlist: nn.Module | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A name for the head's weights, taken when it is first asked for."""
        return fingerprint(self.model, self.model.config)

    def new_context(self, batch: int = 1, start: int = 0) -> MTPContext:
        """See `Drafter.new_context`. Keys are roped by their slot: only distances count, so `start` doesn't."""
        return MTPContext(batch, self.target.config.hidden_size, self.model.norm.weight.dtype)

    def observe(self, context: MTPContext, tokens: mx.array, features: mx.array, count: int | mx.array) -> None:
        """See `Drafter.observe`; features are the last layer's rows. Only their keys and values are made.

        Raises ValueError for features of another width, and for an int `count` outside 0..n.
        """
        B, n, F = features.shape
        if F != (width := self.target.config.hidden_size):
            raise ValueError(f"features are {F} wide: the last layer's are {width}")
        if isinstance(count, int):
            if not 0 <= count <= n:
                raise ValueError(f"can't observe {count} rows: features have {n}")
            tokens, features = tokens[:, :count], features[:, :count]
            n = count
        else:
            features = mx.where((mx.arange(n) < count[:, None])[..., None], features, 0)
        if n == 0:
            return
        hidden = self.target.model.norm(features).astype(context.hidden.dtype)
        context.take(hidden)
        layer = self.model.layers[0]
        x = layer.input_layernorm(self.model.rows(self._embed(tokens), context.newest[2][:, :-1]))
        keys, values = layer.self_attn.keys_values(x, context.length)
        new = KV(keys, values)
        context.kv = write(reserve(context.kv, context.max_length + n, new), new, context.length)
        context.end(count, n)

    def propose(self, context: MTPContext, anchor: mx.array, width: int, policy: DraftPolicy) -> Proposal:
        """See `Drafter.propose`. Raises ValueError for a width outside 0..max_width."""
        if not 0 <= width <= self.max_width:
            raise ValueError(f"width {width} is outside 0..{self.max_width}, this drafter's range")
        token = anchor.astype(mx.int32)[:, None]
        if width == 0 or context.max_length == 0:
            return Proposal(mx.zeros((len(token), 0), dtype=mx.int32))
        hidden, layer, tokens, qs = context.hidden[:, None], self.model.layers[0], [], []
        for step in range(width):
            slot, length = context.length + step, context.max_length + step + 1
            slots = mx.arange(length, dtype=mx.int32)
            # A lane that has observed nothing sees its own slot only: what it proposes is a guess, but finite.
            seen = ((slots > 0) & (slots < slot[:, None])) | (slots == slot[:, None])
            mixer = partial(
                layer.self_attn, kv=context.kv, start=slot, length=length, mask=seen[:, None, None], first=1
            )
            y, context.kv = layer(self.model.rows(self._embed(token), hidden), mixer)
            hidden = self.model.norm(y)
            logits = self.logits(hidden)
            token, q = policy.draft(self.vocabulary.widen(logits) if self.vocabulary else logits, step)
            tokens.append(token)
            qs.append(q)
        return Proposal(mx.concatenate(tokens, axis=1), None if qs[0] is None else mx.concatenate(qs, axis=1))

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits `[..., V]` of the head's normed rows `[..., D]`, by the target's own head or rows of it."""
        hidden = hidden.astype(self.target.model.norm.weight.dtype)
        return logits_of(self.head(), hidden)

    def head(self) -> nn.Module:
        """The layer that logits come from."""
        return self.target.head if self.shortlist is None else self.shortlist

    def keep_rows(self, rows: mx.array) -> None:
        """See `vocabulary.Headed`: nothing follows the head."""

    def _embed(self, tokens: mx.array) -> mx.array:
        return self.target.embed_tokens(tokens).astype(self.model.norm.weight.dtype)
