"""Losses of drafters on a frozen target: many anchors in one packed pass, and the papers' terms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import DFLASH2, DSPARK
from specmlx.drafters.dflash2 import CandidateSelector
from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.attention import Attention
from specmlx.targets.hybrid import Model

LossFunction = Callable[..., tuple[mx.array, Any]]


class Slots(NamedTuple):
    """Slots `[B, N, S]` of anchors `[B, N]`.

    rows: the target's row that predicts the slot's token; labels, previous: that token and the one before it in the
    data; supervised: 1.0 as far as the answer goes without a break; real: which anchors there are.
    """

    rows: mx.array
    labels: mx.array
    previous: mx.array
    supervised: mx.array
    real: mx.array

    def tau(self, hits: mx.array) -> mx.array:
        """1 plus the mean count of leading slots that hit, of supervised slots."""
        leading = mx.cumprod(hits.astype(mx.float32) * self.supervised, axis=-1).sum(axis=-1)
        return 1 + (leading * self.real).sum() / mx.maximum(self.real.sum(), 1)


def slots_of(tokens: mx.array, weights: mx.array, anchors: mx.array, count: int) -> Slots:
    """The `count` slots behind each anchor (-1 for none) of tokens `[B, L + 1]` with weights `[B, L]`."""
    L, real = weights.shape[1], anchors >= 0
    # Row a predicts the first slot, whose token stands at a + 1.
    rows = mx.maximum(anchors, 0)[..., None] + mx.arange(count, dtype=mx.int32)
    inside = mx.minimum(rows, L - 1)
    supervised = (mx.take_along_axis(weights[:, None], inside, axis=2) == 1) & (rows < L) & real[..., None]
    labels, previous = (mx.take_along_axis(tokens[:, None], inside + i, axis=2) for i in (1, 0))
    return Slots(inside, labels, previous, mx.cumprod(supervised.astype(mx.float32), axis=-1), real)


@dataclass(frozen=True)
class DraftLoss:
    """Weights of the terms of a drafter's loss, summed over slots with weight exp(-k / decay).

    token: cross-entropy with the data's token (DFlash, arXiv 2602.06036). soft: cross-entropy with the target's
    distribution p. l1: sum |q - p|, twice the chance of rejection. confidence: binary cross-entropy of the confidence
    head with the chance of acceptance 1 - L1 / 2 (DSpark, arXiv 2607.05147: token .1, l1 .9, confidence 1).
    selector: cross-entropy of DFlash 2's candidates, given the data's token before, with the target's argmax, which
    takes the weakest candidate's place where it is none (speculators' way: the official objective is not published).
    """

    token: float = 0.0
    soft: float = 0.0
    l1: float = 0.0
    confidence: float = 0.0
    selector: float = 0.0
    decay: float = 4.0

    def of(self, slots: Slots, target_logits: mx.array, logits: mx.array) -> tuple[mx.array, ...]:
        """The first three terms of slots with `logits` `[B, N, S, V]`, by the target's `[B, L, V]`.

        Also sum |q - p|, and the target's and the drafter's best ids; all `[B, N, S]`.
        """
        rows = mx.take_along_axis(target_logits, slots.rows.reshape(len(logits), -1)[..., None], axis=1)
        log_p, log_q = _normalised(rows.reshape(*slots.rows.shape, -1)), _normalised(logits)
        p = mx.exp(log_p)
        distance = mx.abs(mx.exp(log_q) - p).sum(axis=-1)
        value = self.l1 * distance
        if self.token:
            value = value - self.token * mx.take_along_axis(log_q, slots.labels[..., None], axis=-1)[..., 0]
        if self.soft:
            value = value - self.soft * (p * log_q).sum(axis=-1)
        return value, distance, mx.argmax(log_p, axis=-1), mx.argmax(log_q, axis=-1)

    def weights(self, slots: Slots) -> mx.array:
        """What each slot counts `[B, N, S]`."""
        return slots.supervised * mx.exp(-mx.arange(slots.rows.shape[-1]) / self.decay)


def _normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _weighted_mean(values: mx.array, weights: mx.array) -> mx.array:
    return (values * weights).sum() / mx.maximum(weights.sum(), 1e-6)


def sample_anchors(weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`[B, count]` int32 anchors, each at most once: positions whose next token is the answer's; -1 where too few.

    `weights` `[B, L]` is 1 where the token after a position belongs to an answer, so the prompt's last token is
    among them.
    """
    anchors = np.full((len(weights), count), -1, np.int32)
    for row, weight in zip(anchors, weights, strict=True):
        valid = np.flatnonzero(weight == 1)
        chosen = rng.choice(valid, size=min(count, len(valid)), replace=False)
        row[: len(chosen)] = np.sort(chosen)
    return anchors


def draft_loss(
    drafter: BlockDrafter, target: Model | AnyLM, terms: DraftLoss, grad_checkpoint: bool = False, reduce: bool = True
) -> LossFunction:
    """The loss of `drafter.model` on tokens `[B, L + 1]`, weights `[B, L]` and anchors `[B, N]`; the target is frozen.

    It is the weighted mean over slots, with figures, or without `reduce` each slot's loss and weight `[B, N, S]`. The
    anchor at a opens a block at positions a..a + block - 1, which sees the taps of rows before a and itself. Slots are
    supervised as far as the answer goes without a break. `tau` is 1 plus the mean count of leading slots that hit the
    target's own argmax, on the data's text. grad_checkpoint: gradients run each layer again instead of keeping what it
    computed.
    """
    config = drafter.config

    def loss(model: BlockTrunk, tokens: mx.array, weights: mx.array, anchors: mx.array):
        target_logits, features = target.scored(tokens[:, :-1], drafter.tap_ids)
        target_logits, features = mx.stop_gradient(target_logits.astype(mx.float32)), mx.stop_gradient(features)
        slots = slots_of(tokens, weights, anchors, config.max_width)
        h = _block_rows(drafter, model, tokens, features, mx.maximum(anchors, 0), grad_checkpoint)
        h = h[:, :, config.first_row :]

        logits = drafter.logits(h).astype(mx.float32)
        if config.kind == DSPARK:
            logits = logits + model.markov_head.block(slots.previous, h)
        value, distance, best, guesses = terms.of(slots, target_logits, logits)
        if terms.confidence and config.kind == DSPARK and config.enable_confidence_head:
            confidence = model.confidence_head(h, model.markov_head.markov_w1(slots.previous))
            kept = mx.stop_gradient(1 - distance / 2)
            value = value + terms.confidence * nn.losses.binary_cross_entropy(confidence, kept, reduction="none")
        if config.kind == DFLASH2:
            loss_of_choice, guesses = _choice(model.candidate_selector, h, logits, slots.previous, best)
            value = value + terms.selector * loss_of_choice
        counts = terms.weights(slots)
        return (_weighted_mean(value, counts), {"tau": slots.tau(guesses == best)}) if reduce else (value, counts)

    return loss


def _block_rows(
    drafter: BlockDrafter,
    model: BlockTrunk,
    tokens: mx.array,
    features: mx.array,
    anchors: mx.array,
    grad_checkpoint: bool,
) -> mx.array:
    """Normed rows `[B, N, block, D]` of the blocks at anchors `[B, N]`, all in one pass."""
    B, N = anchors.shape
    block, S = drafter.config.block_size, features.shape[1]
    ids = mx.take_along_axis(tokens, anchors, axis=1)
    x = mx.stop_gradient(drafter.block_embeddings(ids)).reshape(B, N * block, -1)
    positions = (anchors[..., None] + mx.arange(block, dtype=mx.int32)).reshape(B, -1)
    context_positions = mx.broadcast_to(mx.arange(S, dtype=mx.int32), (B, S))
    own = mx.repeat(mx.arange(N), block)
    before = context_positions[:, None] < mx.repeat(anchors, block, axis=1)[..., None]
    same = mx.broadcast_to(own[:, None] == own, (B, N * block, N * block))
    mask = mx.concatenate([before, same], axis=-1)[:, None]
    h = model.hidden(x, positions, features, context_positions, mask, grad_checkpoint)
    return h.reshape(B, N, block, -1)


def _choice(selector: CandidateSelector, h: mx.array, logits: mx.array, previous: mx.array, labels: mx.array):
    """DFlash 2's choice among the candidates after `previous`: cross-entropy with labels, best ids `[B, N, S]`."""
    unary, ids = selector.candidates(logits)
    scores = selector.scores(h, unary, ids, previous[..., None])[..., 0, :]
    guesses = _taken(ids, mx.argmax(scores, axis=-1))
    absent = mx.all(ids != labels[..., None], axis=-1, keepdims=True)
    weakest = mx.arange(ids.shape[-1]) == mx.argmin(unary, axis=-1, keepdims=True)
    ids = mx.stop_gradient(mx.where(absent & weakest, labels[..., None], ids))
    scores = selector.scores(h, mx.take_along_axis(logits, ids, axis=-1), ids, previous[..., None])[..., 0, :]
    right = _taken(scores, mx.argmax(ids == labels[..., None], axis=-1))
    return mx.logsumexp(scores, axis=-1) - right, guesses


def _taken(x: mx.array, index: mx.array) -> mx.array:
    return mx.take_along_axis(x, mx.stop_gradient(index)[..., None], axis=-1)[..., 0]


def mtp_loss(drafter: MTP, target: Model, terms: DraftLoss) -> LossFunction:
    """The loss of `drafter.model` on tokens `[B, L + 1]`, weights `[B, L]` and anchors `[B, N]`; the target is frozen.

    From the row before the anchor on, the head takes the data's next token and the target's row, then its own rows, as
    it will when it drafts. Its attention sees the target's rows up to there and the chain behind them. An anchor at 0
    has no row before it.
    """

    def loss(model: MTPHead, tokens: mx.array, weights: mx.array, anchors: mx.array):
        hidden, _ = target.features(tokens[:, :-1])
        target_logits = mx.stop_gradient(target.lm_head(hidden).astype(mx.float32))
        anchors = mx.where(anchors > 0, anchors, -1)
        slots = slots_of(tokens, weights, anchors, drafter.max_width)
        # Slot 0 guesses the token behind the anchor's: the target's row a predicts it, and row a - 1 is the head's.
        logits = drafter.logits(_chains(drafter, model, tokens, mx.stop_gradient(hidden), anchors)).astype(mx.float32)
        value, _, best, guesses = terms.of(slots, target_logits, logits)
        return _weighted_mean(value, terms.weights(slots)), {"tau": slots.tau(guesses == best)}

    return loss


def _chains(drafter: MTP, model: MTPHead, tokens: mx.array, hidden: mx.array, anchors: mx.array) -> mx.array:
    """The head's normed rows `[B, N, width, D]` behind the anchors, all chains in one pass a step."""
    B, N = anchors.shape
    L, layer = hidden.shape[1], model.layers[0]
    attention = layer.self_attn
    embeddings = mx.stop_gradient(drafter.target.embed_tokens(tokens))
    context = layer.input_layernorm(model.rows(embeddings[:, 1:], hidden))  # row t: token t + 1, the target's row t
    keys, values = attention.keys_values(context, 0)
    first = mx.maximum(anchors - 1, 0)
    mask = (mx.arange(L) <= first[..., None])[:, None]
    own = mx.broadcast_to(mx.eye(N, dtype=mx.bool_), (B, 1, N, N))
    h = mx.take_along_axis(hidden, first[..., None], axis=1)
    outputs = []
    for step in range(drafter.max_width):
        at = mx.minimum(first + 1 + step, L)[..., None]
        x = model.rows(mx.take_along_axis(embeddings, at, axis=1), h)
        q, gate, k, v = _at(attention, layer.input_layernorm(x), first + step)
        if step:
            keys, values = mx.concatenate([keys, k], axis=2), mx.concatenate([values, v], axis=2)
            mask = mx.concatenate([mask, own], axis=-1)
        y, _ = layer(x, partial(_mixed, attention, (q, gate, keys, values, mask)))
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
    (q, gate), (k, v) = attention.queries(rows, start), attention.keys_values(rows, start)
    q, k, v = (heads.reshape(B, N, *heads.shape[1:2], -1).transpose(0, 2, 1, 3) for heads in (q, k, v))
    return q, gate.reshape(B, N, -1), k, v
