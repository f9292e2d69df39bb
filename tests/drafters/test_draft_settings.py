"""Cheaper drafting: quantized projections, a shortlist for the head, the Markov bias of a few tokens."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from drafter_kit import HIDDEN, VOCAB, Greedy, golden_drafter, shown
from mlx.utils import tree_flatten
from rig import tiny

from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.drafters.base import DraftVocabulary, dense_rows, take_rows
from specmlx.drafters.dspark import MarkovHead
from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.drafters.ngram import NGram
from specmlx.drafters.settings import FREQUENCIES, DraftSettings, default_quantization
from specmlx.formats.scaled import read_scaled
from specmlx.formats.scaled_linear import ScaledLinear, place

IDS = [7, 90, 3, 55, 12, 41, 8, 77, 20, 33, 64, 5]


def frequencies(path, ids=IDS):
    (path / FREQUENCIES).write_text(json.dumps(ids))
    return path


def mtp() -> MTP:
    target = tiny(3)
    return MTP(MTPHead(target.config), target)


def masked(logits: mx.array, ids: list[int]) -> mx.array:
    kept = mx.zeros((logits.shape[-1],), dtype=mx.bool_)
    kept[mx.array(ids)] = True
    return mx.where(kept, logits, -mx.inf)


# The shortlist


@pytest.mark.parametrize("case", ["dflash_full", "dspark", "dspark_rnn"])
def test_a_shortlist_drafts_as_a_full_head_that_knows_no_other_tokens(case, tmp_path):
    drafter, whole = golden_drafter(case), golden_drafter(case)
    DraftSettings(draft_vocab=10).apply(drafter, [frequencies(tmp_path)])

    class Few(Greedy):
        def draft(self, logits, slot):
            return super().draft(masked(logits, IDS[:10]), slot)

    (short, ours), (full, theirs) = shown(drafter), shown(whole, policy=Few())
    assert short.tokens.tolist() == full.tokens.tolist()
    assert set(short.tokens[0].tolist()) <= set(IDS[:10])
    assert mx.allclose(ours.logits[..., mx.array(IDS[:10])], theirs.logits[..., mx.array(IDS[:10])], atol=1e-5).item()
    assert drafter.head().weight.shape == (10, HIDDEN)


@pytest.mark.parametrize("greedy", [True, False])
def test_dflash_2_has_candidates_of_the_shortlist_only(greedy, tmp_path):
    drafter = golden_drafter("dflash2_full")
    DraftSettings(draft_vocab=5).apply(drafter, [frequencies(tmp_path)])
    policy = Policy(None if greedy else make_sampler(temp=1.0)).at(3)
    proposal, _ = shown(drafter, 7, policy)
    assert set(proposal.tokens[0].tolist()) <= set(IDS[:5])


def test_an_mtp_head_is_shortened_too(tmp_path):
    drafter, whole = mtp(), mtp()
    DraftSettings(draft_vocab=12).apply(drafter, [frequencies(tmp_path)])
    whole.target = drafter.target
    (short, ours), (_, theirs) = shown(drafter, 1), shown(whole, 1)
    assert mx.allclose(ours.logits, masked(theirs.logits, IDS), atol=1e-5).item()
    assert short.tokens[0, 0].item() in IDS


def test_a_reduced_vocabulary_is_shortened_to_what_it_has(tmp_path):
    drafter = golden_drafter("dflash_full")
    DraftSettings(draft_vocab=10).apply(drafter, [frequencies(tmp_path)])
    DraftSettings(draft_vocab=4).apply(drafter, [frequencies(tmp_path, [1, 55, 2, 7])])
    assert drafter.vocabulary.ids.tolist() == [55, 7]
    assert set(shown(drafter)[0].tokens[0].tolist()) <= {55, 7}


def test_rows_are_taken_of_every_kind_of_head():
    mx.random.seed(1)
    x, ids = mx.random.normal((3, 64)), mx.array([9, 2, 30])
    table, linear = nn.Embedding(40, 64), nn.Linear(64, 40, bias=False)
    assert mx.allclose(take_rows(table, ids)(x), table.as_linear(x)[:, ids], atol=1e-5).item()
    assert mx.allclose(take_rows(linear, ids)(x), linear(x)[:, ids], atol=1e-5).item()
    for mode, bits, group in (("affine", 4, 64), ("nvfp4", 4, 16)):
        layer = linear.to_quantized(group, bits, mode=mode)
        assert mx.allclose(take_rows(layer, ids)(x), layer(x)[:, ids], atol=1e-5).item()
    quantized = table.to_quantized(32, 8)
    assert mx.allclose(take_rows(quantized, ids)(x), quantized.as_linear(x)[:, ids], atol=1e-5).item()
    scaled = {"head.weight": mx.random.randint(0, 255, (40, 32)).astype(mx.uint8)}
    scaled["head.weight_scale"] = mx.full((40, 4), 0x38, dtype=mx.uint8)
    scaled["head.weight_scale_2"] = mx.array(0.1)
    model = nn.Module()
    model.head = nn.Linear(64, 40, bias=False)
    place(model, read_scaled(scaled, {}))
    assert mx.allclose(take_rows(model.head, ids)(x), model.head(x)[:, ids], atol=1e-5).item()
    with pytest.raises(ValueError, match="can't take rows of a RMSNorm"):
        take_rows(nn.RMSNorm(4), ids)


def test_widened_logits_stand_at_their_ids():
    vocabulary = DraftVocabulary(mx.array([4, 0, 2]), 6)
    inf = float("inf")
    assert vocabulary.widen(mx.array([[1.0, 2.0, 3.0]])).tolist() == [[2.0, -inf, 3.0, -inf, 1.0, -inf]]


# The Markov bias of a few tokens


@pytest.mark.parametrize("case", ["dspark", "dspark_gated", "dspark_rnn"])
def test_markov_biases_of_the_best_tokens_are_those_of_the_whole_head(case):
    drafter, whole = golden_drafter(case), golden_drafter(case)
    DraftSettings(draft_markov_top_k=6).apply(drafter)
    few, ours = shown(drafter, 7)

    class Forced(Greedy):
        def draft(self, logits, slot):
            super().draft(logits, slot)
            return few.tokens[:, slot : slot + 1], None

    _, theirs = shown(whole, 7, Forced())
    kept = mx.isfinite(ours.logits)
    assert kept.sum(axis=-1).tolist() == [[6] * 7]
    assert mx.all(mx.where(kept, mx.abs(ours.logits - theirs.logits) < 1e-4, True)).item()
    for module in (drafter, golden_drafter(case)):
        DraftSettings(draft_markov_top_k=VOCAB).apply(module)
        every, _ = shown(module, 7)
    assert every.tokens.tolist() == shown(whole, 7)[0].tokens.tolist()


def test_markov_rows_of_a_quantized_head_and_of_a_shortlist_are_gathered_too(tmp_path):
    drafter = golden_drafter("dspark")
    settings = DraftSettings(draft_vocab=12, draft_markov_top_k=3)
    settings.apply(drafter, [frequencies(tmp_path)])
    assert set(shown(drafter)[0].tokens[0].tolist()) <= set(IDS)
    head = nn.Linear(64, 40, bias=False).to_quantized(32, 8)
    ids = mx.array([[3, 9]])
    dense = mx.dequantize(head.weight, head.scales, head.biases, group_size=32, bits=8)
    assert mx.array_equal(dense_rows(head, ids)[0], dense[ids[0]]).item()


# Quantized projections


@pytest.mark.parametrize("name", ["8", "4", "nvfp4", "mxfp4"])
def test_projections_are_quantized_and_nothing_else(name):
    gated = golden_drafter("dspark_gated")
    # Of a rank that makes whole groups.
    gated.model.markov_head = MarkovHead(replace(gated.config, markov_rank=64))
    gated.config = replace(gated.config, enable_confidence_head=False)
    for drafter in (golden_drafter("dflash2_full"), gated, mtp()):
        DraftSettings(draft_quantize=name).apply(drafter)
        quantized = {
            path.rpartition(".")[2]
            for path, module in drafter.model.named_modules()
            if isinstance(module, nn.QuantizedLinear)
        }
        every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"}
        # down_proj's 32 columns are no group of 64.
        assert quantized == (every if name in ("nvfp4", "mxfp4") or isinstance(drafter, MTP) else every - {"down_proj"})
        assert not any(
            isinstance(module, nn.QuantizedLinear)
            for path, module in drafter.model.named_modules()
            if any(head in path for head in ("markov", "confidence", "selector", "conv"))
        )
        assert shown(drafter)[0].tokens.shape == (1, 4)


@pytest.mark.parametrize("name", ["8", "4", "nvfp4", "mxfp4"])
def test_quantized_projections_draft_as_their_dequantized_weights_do(name):
    drafter, dense = golden_drafter("dspark"), golden_drafter("dspark")
    DraftSettings(draft_quantize=name).apply(drafter)
    before = shown(dense, 7)[1].logits
    weights = {
        f"{path}.weight": mx.dequantize(
            *(module.weight, module.scales, module.get("biases")), module.group_size, module.bits, module.mode
        ).astype(mx.float32)
        for path, module in drafter.model.named_modules()
        if isinstance(module, nn.QuantizedLinear)
    }
    dense.model.load_weights(list(weights.items()), strict=False)
    after = shown(drafter, 7)[1].logits
    assert mx.abs(after - shown(dense, 7)[1].logits).max().item() < 1e-4
    assert mx.abs(after - before).max().item() > 1e-3


def test_8_bits_draft_nearly_what_the_weights_draft():
    drafter = golden_drafter("dflash_full")
    before = shown(drafter)[1].logits
    DraftSettings(draft_quantize="8").apply(drafter)
    after = shown(drafter)[1].logits
    assert 0 < mx.abs(after - before).max().item() < 0.1 * mx.abs(before).max().item()


def test_nothing_is_quantized_by_default_where_there_is_no_metal():
    drafter = golden_drafter("dflash_full")
    before = [value.dtype for _, value in tree_flatten(drafter.model.parameters())]
    DraftSettings().apply(drafter)
    if not mx.metal.is_available():
        assert [value.dtype for _, value in tree_flatten(drafter.model.parameters())] == before


def test_the_default_is_4_bits_on_metal_for_what_is_not_packed_yet_and_none_elsewhere():
    model = golden_drafter("dflash_full").model
    assert [default_quantization(model, metal) for metal in (True, False)] == ["4", "none"]
    scaled = ScaledLinear("nvfp4")
    for packed in (nn.QuantizedLinear(64, 64), scaled):
        model.fc = packed
        assert [default_quantization(model, metal) for metal in (True, False)] == ["none", "none"]


# What is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft_window": 0}, "draft_window is 0: it must be an integer of at least 1"),
        ({"draft_vocab": -3}, "draft_vocab is -3: it must be an integer of at least 1"),
        ({"draft_quantize": "3"}, "draft_quantize is '3': it must be one of 8, 4, nvfp4, mxfp4, none"),
        ({"draft_vocab_file": "x"}, "draft_vocab_file is x, but draft_vocab says no number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        DraftSettings(**settings)


def test_settings_that_a_drafter_has_no_use_for_are_refused_before_it_is_changed(tmp_path):
    cases = [
        (NGram(), {"draft_quantize": "4"}, "draft_quantize is 4 but a NGram drafter has no use for it"),
        (NGram(), {"draft_vocab": 5}, "draft_vocab is 5 but a NGram drafter has no use for it"),
        (golden_drafter("dflash_full"), {"draft_markov_top_k": 5}, "draft_markov_top_k is 5 but a DFlash drafter"),
        (mtp(), {"draft_window": 5}, "draft_window is 5 but a MTP drafter"),
        (None, {"draft_window": 5}, "draft_window is 5 but there is no drafter"),
        (golden_drafter("dspark"), {"draft_vocab": 13, "draft_quantize": "8"}, "has 12 different tokens"),
    ]
    for drafter, settings, says in cases:
        with pytest.raises(ValueError, match=says):
            DraftSettings(**settings).apply(drafter, [frequencies(tmp_path)])
        if drafter is not None and not isinstance(drafter, NGram):
            assert not any(isinstance(m, nn.QuantizedLinear) for _, m in drafter.model.named_modules())
    with pytest.raises(ValueError, match="there is no .*token_frequencies.json: pass draft_vocab_file"):
        DraftSettings(draft_vocab=3).apply(golden_drafter("dspark"), [tmp_path / "nowhere"])
    for content in ("{", "[1, 96]", '{"1": 2}', "[1.5]"):
        (tmp_path / "f.json").write_text(content)
        with pytest.raises(ValueError, match="f.json is no"):
            DraftSettings(draft_vocab=1, draft_vocab_file=str(tmp_path / "f.json")).apply(golden_drafter("dspark"))
