"""Training of an MTP head on a frozen target, run on its own output as it will be when it drafts."""

from functools import partial

import mlx.core as mx

from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.targets.attention import Attention
from specmlx.targets.hybrid import Model
from specmlx.training.drafter import DraftLoss, LossFunction
from specmlx.training.slots import acceptance_length, log_rows, normalised, slots_of, weighted_mean


def mtp_loss(drafter: MTP, target: Model, terms: DraftLoss) -> LossFunction:
    """The loss of `drafter.model` on tokens `[B, L + 1]`, weights `[B, L]` and anchors `[B, N]`; the target is frozen.

    From the row before the anchor on, the head takes the data's next token and the target's row, then its own rows. Its
    attention sees the target's rows up to there and the chain behind them. An anchor at 0 has no row before it.
    """
    width = drafter.max_width
    slot_weights = mx.exp(-mx.arange(width) / terms.decay)

    def loss(model: MTPHead, tokens: mx.array, weights: mx.array, anchors: mx.array):
        hidden, _ = target.features(tokens[:, :-1])
        target_logits = mx.stop_gradient(target.lm_head(hidden).astype(mx.float32))
        anchors = mx.where(anchors > 0, anchors, -1)
        slots = slots_of(tokens, weights, anchors, width)
        # Slot 0 guesses the token behind the anchor's: the target's row a predicts it, and row a - 1 is the head's.
        logits = drafter.logits(_chains(drafter, model, tokens, mx.stop_gradient(hidden), anchors)).astype(mx.float32)
        log_p, log_q = log_rows(target_logits, slots.rows), normalised(logits)
        value, _ = terms.of(log_p, log_q, slots.labels)
        hits = mx.argmax(log_q, axis=-1) == mx.argmax(log_p, axis=-1)
        return weighted_mean(value, slots.supervised * slot_weights), {"tau": acceptance_length(hits, slots)}

    return loss


def _chains(drafter: MTP, model: MTPHead, tokens: mx.array, hidden: mx.array, anchors: mx.array) -> mx.array:
    """The head's normed rows `[B, N, width, D]` behind the anchors, all chains in one pass a step."""
    B, N = anchors.shape
    L, D = hidden.shape[1:]
    layer = model.layers[0]
    embeddings = mx.stop_gradient(drafter.target.embed_tokens(tokens))
    context = layer.input_layernorm(model.rows(embeddings[:, 1:], hidden))  # row t: token t + 1, the target's row t
    keys, values = layer.self_attn.keys_values(context, 0)
    first = mx.maximum(anchors - 1, 0)
    mask = (mx.arange(L) <= first[..., None])[:, None]
    own = mx.broadcast_to(mx.eye(N, dtype=mx.bool_), (B, 1, N, N))
    h = mx.take_along_axis(hidden, first[..., None], axis=1)
    outputs = []
    for step in range(drafter.max_width):
        at = mx.minimum(first + 1 + step, L)[..., None]
        x = model.rows(mx.take_along_axis(embeddings, at, axis=1), h)
        normed = layer.input_layernorm(x)
        q, gate, k, v = _at(layer.self_attn, normed, first + step)
        if step:
            keys, values = mx.concatenate([keys, k], axis=2), mx.concatenate([values, v], axis=2)
            mask = mx.concatenate([mask, own], axis=-1)
        y, _ = layer(x, partial(_mixed, layer.self_attn, (q, gate, keys, values, mask)))
        h = model.norm(y)
        outputs.append(h)
    return mx.stack(outputs, axis=2)


def _mixed(attention: Attention, projected: tuple, x: mx.array, residual: mx.array) -> tuple[mx.array, None]:
    """A layer's mixer whose projections of x have been made."""
    return attention.attend(*projected, residual), None


def _at(attention: Attention, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Queries, gates, keys and values of rows `[B, N, D]` at `positions` `[B, N]`: each a sequence of its own."""
    B, N, D = x.shape
    rows, start = x.reshape(B * N, 1, D), positions.reshape(-1)
    q, gate = attention.queries(rows, start)

    def back(heads: mx.array) -> mx.array:
        return heads.reshape(B, N, *heads.shape[1:2], -1).transpose(0, 2, 1, 3)

    k, v = attention.keys_values(rows, start)
    return back(q), gate.reshape(B, N, -1), back(k), back(v)
