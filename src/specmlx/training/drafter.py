"""Training of block drafters on a frozen target: many anchors in one packed pass, and the papers' losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import DFLASH2, DSPARK
from specmlx.drafters.dflash2 import CandidateSelector
from specmlx.training.slots import acceptance_length, log_rows, normalised, slots_of, weighted_mean

LossFunction = Callable[..., tuple[mx.array, dict[str, mx.array]]]


class Scored(Protocol):
    """What the losses use of a target."""

    def scored(self, tokens: mx.array, tap_ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Logits `[B, T, V]` and taps `[B, T, F]` of whole sequences `[B, T]`."""


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

    def of(self, log_p: mx.array, log_q: mx.array, labels: mx.array) -> tuple[mx.array, mx.array]:
        """The first three terms and the distance sum |q - p|, `[...]` each, of rows `[..., V]` and labels `[...]`."""
        p = mx.exp(log_p)
        distance = mx.abs(mx.exp(log_q) - p).sum(axis=-1)
        value = self.l1 * distance
        if self.token:
            value = value - self.token * mx.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]
        if self.soft:
            value = value - self.soft * (p * log_q).sum(axis=-1)
        return value, distance


DFLASH_LOSS = DraftLoss(token=1.0)
DFLASH2_LOSS = DraftLoss(token=1.0, selector=1.0)
DSPARK_LOSS = DraftLoss(token=0.1, l1=0.9, confidence=1.0)


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


def draft_loss(drafter: BlockDrafter, target: Scored, terms: DraftLoss, grad_checkpoint: bool = False) -> LossFunction:
    """The loss of `drafter.model`: the weighted mean of what `slot_losses` gives, and its figures."""
    values = slot_losses(drafter, target, terms, grad_checkpoint)

    def loss(model: BlockTrunk, tokens: mx.array, weights: mx.array, anchors: mx.array):
        value, counts, figures = values(model, tokens, weights, anchors)
        return weighted_mean(value, counts), figures

    return loss


def slot_losses(
    drafter: BlockDrafter, target: Scored, terms: DraftLoss, grad_checkpoint: bool = False
) -> Callable[..., tuple[mx.array, mx.array, dict[str, mx.array]]]:
    """Losses and weights `[B, N, S]` of the slots of `drafter.model`, and figures; the target is frozen.

    They are a function of the model, tokens `[B, L + 1]`, weights `[B, L]` and anchors `[B, N]`. The anchor at a opens
    a block at positions a..a + block - 1, which sees the taps of rows before a and itself. Slots are supervised as far
    as the answer goes without a break. `tau` is 1 plus the mean count of leading slots that hit the target's own
    argmax, on the data's text. grad_checkpoint: gradients run each layer again instead of keeping what it computed.
    """
    config = drafter.config
    slot_weights = mx.exp(-mx.arange(config.max_width) / terms.decay)

    def values(model: BlockTrunk, tokens: mx.array, weights: mx.array, anchors: mx.array):
        logits, features = target.scored(tokens[:, :-1], drafter.tap_ids)
        target_logits, features = mx.stop_gradient(logits.astype(mx.float32)), mx.stop_gradient(features)
        slots = slots_of(tokens, weights, anchors, config.max_width)
        h = _block_rows(drafter, model, tokens, features, mx.maximum(anchors, 0), grad_checkpoint)
        h = h[:, :, config.first_row :]

        logits, confidence = _slot_logits(drafter, model, h, slots.previous)
        log_p, log_q = log_rows(target_logits, slots.rows), normalised(logits)
        value, distance = terms.of(log_p, log_q, slots.labels)
        if terms.confidence and confidence is not None:
            kept = mx.stop_gradient(1 - distance / 2)
            value = value + terms.confidence * nn.losses.binary_cross_entropy(confidence, kept, reduction="none")
        best, guesses = mx.argmax(log_p, axis=-1), mx.argmax(log_q, axis=-1)
        if config.kind == DFLASH2:
            loss_of_choice, guesses = _choice(model.candidate_selector, h, logits, slots.previous, best)
            value = value + terms.selector * loss_of_choice
        figures = {"tau": acceptance_length(guesses == best, slots)}
        return value, slots.supervised * slot_weights, figures

    return values


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
    start = mx.repeat(anchors, block, axis=1)
    own = mx.repeat(mx.arange(N), block)
    before = context_positions[:, None] < start[..., None]
    same = mx.broadcast_to(own[:, None] == own, (B, N * block, N * block))
    mask = mx.concatenate([before, same], axis=-1)[:, None]
    h = model.hidden(x, positions, features, context_positions, mask, grad_checkpoint)
    return h.reshape(B, N, block, -1)


def _slot_logits(drafter: BlockDrafter, model: BlockTrunk, h: mx.array, previous: mx.array):
    """Logits `[B, N, S, V]` float32 of the slots, and the confidence head's, given the true tokens before them."""
    logits = drafter.logits(h).astype(mx.float32)
    if drafter.config.kind != DSPARK:
        return logits, None
    confidence = None
    if drafter.config.enable_confidence_head:
        confidence = model.confidence_head(h, model.markov_head.markov_w1(previous))
    return logits + model.markov_head.block(previous, h), confidence


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
