"""Training: the packed drafter pass against a loop over anchors, the losses against numpy, and resuming."""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from rig import TINY, tiny, tokens

from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig
from specmlx.training.loop import Schedule, train
from specmlx.training.losses import DraftLoss, draft_loss, sample_anchors

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from make_demo.loss import next_token_loss  # noqa: E402

BLOCK, TAPS, LENGTH = 4, [1, 3], 40


def drafter_of(kind: str, target):
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
    config = {
        "architectures": [names[kind]],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": TINY["vocab_size"],
        "rope_theta": 10000.0,
        "block_size": BLOCK,
        "num_target_layers": 8,
        "target_layer_ids": TAPS,
        "mask_token_id": 90,
        "dflash_config": {"target_layer_ids": TAPS, "mask_token_id": 90},
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 5,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    }
    if kind == "dspark":
        del config["dflash_config"]
    mx.random.seed(5)
    drafter = build(DrafterConfig.from_dict(config), target)
    if kind == "dflash2":
        for layer in drafter.model.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                conv.kernel_projection.weight = 0.1 * mx.random.normal(conv.kernel_projection.weight.shape)
        selector = drafter.model.candidate_selector
        selector.predecessor_codebook, selector.successor_codebook = mx.random.normal((2, TINY["vocab_size"], 8))
    return drafter


def sample():
    ids = mx.concatenate([tokens(1, LENGTH + 1), tokens(2, LENGTH + 1)])
    weights = np.zeros((2, LENGTH), np.float32)
    weights[0, 5:17] = weights[0, 25:40] = weights[1, 11:14] = weights[1, 15:18] = 1
    anchors = np.array([[5, 12, 16, 38], [11, 13, -1, -1]], np.int32)
    return ids, weights, anchors


def one_by_one(drafter, target, terms: DraftLoss, ids, weights, anchors) -> float:
    """The loss by a loop over sequences, anchors and slots, from the formulas."""
    dspark, dflash2 = drafter.config.kind == "dspark", drafter.config.kind == "dflash2"
    above, below = 0.0, 0.0
    for row in range(len(anchors)):
        hidden, features = target.features(ids[row : row + 1, :-1], drafter.tap_ids)
        p_rows = np.array(mx.softmax(target.lm_head(hidden)[0], axis=-1), np.float64)
        text = ids[row].tolist()
        for a in anchors[row].tolist():
            if a < 0:
                continue
            x = drafter.block_embeddings(mx.array([text[a]], dtype=mx.int32))
            positions = mx.arange(a, a + BLOCK)[None]
            mask = mx.ones((1, 1, BLOCK, a + BLOCK), dtype=mx.bool_)
            h = drafter.model.hidden(x, positions, features[:, :a], mx.arange(a)[None], mask)[0]
            for k in range(BLOCK if dspark else BLOCK - 1):
                at = a + k
                if at >= LENGTH or weights[row, at] != 1:
                    break
                h_k = h[k if dspark else k + 1]
                logits = drafter.logits(h_k)
                if dspark:
                    head = drafter.model.markov_head
                    logits = logits + head.markov_w2(head.markov_w1(mx.array(text[at])))
                q = np.array(mx.softmax(logits), np.float64)
                p = p_rows[at]
                distance = np.abs(q - p).sum()
                value = terms.l1 * distance - terms.token * np.log(q[text[at + 1]])
                value -= terms.soft * (p * np.log(q)).sum()
                if dspark and terms.confidence:
                    w1 = head.markov_w1(mx.array(text[at]))
                    c = 1 / (1 + np.exp(-drafter.model.confidence_head(h_k, w1).item()))
                    kept = 1 - distance / 2
                    value -= terms.confidence * (kept * np.log(c) + (1 - kept) * np.log(1 - c))
                if dflash2:
                    value += terms.selector * choice_loss(drafter, h_k, logits, text[at], int(p.argmax()))
                above += value * np.exp(-k / terms.decay)
                below += np.exp(-k / terms.decay)
    return above / below


def choice_loss(drafter, h, logits, before: int, label: int) -> float:
    """Cross-entropy of the label among the candidates after the token before it, from DFlash 2's formulas."""
    selector, U = drafter.model.candidate_selector, np.array(logits, np.float64)
    candidates = np.argsort(-U)[: selector.top_k].tolist()
    if label not in candidates:
        candidates[-1] = label
    A, B = (np.array(x, np.float64) for x in (selector.predecessor_codebook, selector.successor_codebook))
    z = np.array(selector.hidden_projection(h), np.float64)
    scores = {b: U[b] + sum(A[before] * z * B[b]) for b in candidates}
    return np.log(sum(np.exp(s) for s in scores.values())) - scores[label]


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_the_packed_loss_is_that_of_one_block_after_the_other(kind):
    target = tiny(3)
    drafter = drafter_of(kind, target)
    terms = DraftLoss(token=0.2, soft=0.3, l1=0.4, confidence=0.5, selector=0.6)
    ids, weights, anchors = sample()
    packed, _ = draft_loss(drafter, target, terms)(drafter.model, ids, mx.array(weights), mx.array(anchors))
    assert packed.item() == pytest.approx(one_by_one(drafter, target, terms, ids, weights, anchors), rel=2e-5)


@pytest.mark.linux_bits
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("terms", [DraftLoss(token=1.0), DraftLoss(1.0, 1.0, 1.0, 1.0, 1.0)], ids=["token", "all"])
def test_the_loss_of_a_slot_changes_with_the_tokens_that_it_may_see_and_no_other(kind, terms):
    target = tiny(3)
    drafter = drafter_of(kind, target)
    text, anchors = tokens(1, LENGTH + 1), [12, 30, 5, 13, 3]
    # Row j has another token at j; the last row has none.
    rows = mx.where(mx.eye(LENGTH + 2, LENGTH + 1, dtype=mx.bool_), (text + 7) % 89, text)
    weights = mx.broadcast_to(mx.arange(LENGTH) >= 3, (len(rows), LENGTH)).astype(mx.float32)
    values, counts = draft_loss(drafter, target, terms, reduce=False)(
        drafter.model, rows, weights, mx.broadcast_to(mx.array(anchors, dtype=mx.int32), (len(rows), len(anchors)))
    )
    assert mx.all(counts > 0).item()
    changed = np.array(values[:-1] != values[-1:])
    for n, a in enumerate(anchors):
        for k in range(drafter.max_width):
            seen = set(range(a + 1)) | {a + k + 1}
            if terms.l1:
                # What the target makes of the text up to the slot is what the slot learns.
                seen |= set(range(a + k + 1))
            elif kind == "dspark":
                seen.add(a + k)
            assert set(np.flatnonzero(changed[:, n, k])) == seen, (a, k)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_gradients_are_the_same_where_layers_run_again_for_them(kind):
    target = tiny(3, bits=4)
    drafter = drafter_of(kind, target)
    ids, weights, anchors = sample()

    def gradients(again: bool):
        loss = draft_loss(drafter, target, DraftLoss(0.2, 0.3, 0.4, 0.5, 0.6), again)
        (value, _), found = nn.value_and_grad(drafter.model, loss)(
            drafter.model, ids, mx.array(weights), mx.array(anchors)
        )
        return value, dict(tree_flatten(found))

    (kept, one), (again, other) = gradients(False), gradients(True)
    assert kept.item() == again.item() and one.keys() == other.keys()
    for name, x in one.items():
        assert mx.allclose(x, other[name], rtol=1e-5, atol=1e-6 * mx.abs(x).max().item()).item(), name


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_only_the_drafter_learns_and_every_tensor_of_it_does(kind):
    target = tiny(3)
    drafter = drafter_of(kind, target)
    ids, weights, anchors = sample()
    loss = draft_loss(drafter, target, DraftLoss(token=0.1, l1=0.9, confidence=1.0, selector=1.0))
    before = {k: mx.array(v) for k, v in tree_flatten(target.parameters())}
    _, gradients = nn.value_and_grad(drafter.model, loss)(drafter.model, ids, mx.array(weights), mx.array(anchors))
    still = [name for name, g in tree_flatten(gradients) if not mx.abs(g).max().item() > 0]
    assert still == []
    assert all(mx.array_equal(before[k], v).item() for k, v in tree_flatten(target.parameters()))


def test_anchors_stand_before_answer_tokens_and_never_twice():
    weights = np.zeros((2, 30), np.float32)
    weights[0, 3:20] = 1
    weights[1, 7:9] = 1
    anchors = sample_anchors(weights, 6, np.random.default_rng(0))
    assert all(3 <= a < 20 for a in anchors[0]) and len(set(anchors[0])) == 6
    assert sorted(anchors[1].tolist()) == [-1, -1, -1, -1, 7, 8]


def test_a_run_that_was_interrupted_ends_with_the_very_weights_of_one_that_was_not(tmp_path):
    def batch(step: int):
        return tokens(step, 17), mx.ones((1, 16))

    def run(directory, stop_at: int | None = None):
        model = tiny(4)
        model.train()
        records = train(model, next_token_loss, batch, Schedule(1e-3, 20, warmup=5), directory, checkpoint_every=10)
        for record in records:
            if record["step"] == stop_at:
                break
        return model

    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", stop_at=10)
    resumed = run(tmp_path / "cut")
    pairs = zip(tree_flatten(whole.parameters()), tree_flatten(resumed.parameters()), strict=True)
    assert all(mx.array_equal(a, b).item() for (_, a), (_, b) in pairs)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    def batch(step: int):
        return tokens(step, 9), mx.ones((1, 8))

    for _ in train(tiny(4), next_token_loss, batch, Schedule(1e-3, 10), tmp_path, checkpoint_every=10):
        pass
    with pytest.raises(ValueError, match="another model"):
        next(train(tiny(4, num_hidden_layers=4), next_token_loss, batch, Schedule(1e-3, 20), tmp_path))
