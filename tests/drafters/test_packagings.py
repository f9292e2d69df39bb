"""DSpark as its publishers pack it beside deepseek-ai's and RadixArk's files: NVFP4, LFM2.5, early SpecForge."""

import mlx.core as mx
import numpy as np
import pytest
from drafter_kit import (
    HIDDEN,
    VOCAB,
    Greedy,
    golden_drafter,
    golden_target,
    write_drafter,
)
from packaging_kit import DSPARK, lfm2, nvfp4, own_weights, packed

from specmlx.drafters.block import Rotary
from specmlx.drafters.checkpoint import load_drafter
from specmlx.formats.rope import rope_parameters


def propose(drafter):
    context, greedy = drafter.new_context(), Greedy()
    features = mx.random.normal((1, 9, 2 * HIDDEN), key=mx.random.key(0))
    drafter.observe(context, mx.zeros((1, 9), dtype=mx.int32), features, 9)
    proposal = drafter.propose(context, mx.array([5], dtype=mx.int32), drafter.max_width, greedy)
    return greedy.logits, proposal.confidence


# LithosAI: X.weight has two E2M1 codes a byte, low nibble first; X.weight_scale E4M3 per 16; X.weight_scale_2 for all.


@pytest.mark.parametrize("key", ["dspark_config", "dflash_config"])
def test_nvfp4_codes_propose_as_the_numbers_that_they_stand_for(key, tmp_path):
    codes, dense = nvfp4(own_weights())
    assert sum(name.endswith("weight_scale_2") for name in codes) == 15
    config = packed(DSPARK, **{key: {"projector_type": "dspark"}})
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    file = write_drafter(tmp_path / "codes", config, codes)
    loaded = load_drafter(file, golden_target(), mx.float32)
    reference = golden_drafter("dspark")
    reference.model.load_weights(list(dense.items()))
    for ours, theirs in zip(propose(loaded), propose(reference), strict=True):
        assert mx.allclose(ours, theirs, atol=1e-4).item()
    half = load_drafter(file, golden_target(), mx.bfloat16)
    assert half.model.fc.output_scale.dtype == mx.float32
    assert mx.allclose(propose(half)[0], propose(reference)[0], atol=0.5).item()


def test_nvfp4_without_a_tensor_scale_is_refused_by_name(tmp_path):
    codes, _ = nvfp4(own_weights())
    del codes["fc.weight_scale_2"]
    config = packed(DSPARK, dspark_config={})
    with pytest.raises(ValueError, match="fc has block scales but no tensor scale"):
        load_drafter(write_drafter(tmp_path, config, codes), golden_target())


# LiquidAI


def test_lfm2_drafters_embed_and_predict_by_the_table_in_their_own_file(tmp_path):
    table = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(3))
    file = write_drafter(tmp_path, lfm2(), {**own_weights(), "embed_tokens.weight": table})
    drafter = load_drafter(file, golden_target(), mx.float32)
    assert drafter.max_width == 9
    logits, _ = propose(drafter)
    reference = golden_drafter("dspark", rope_is_neox_style=False, block_size=9)
    reference.target.embed_tokens.weight = reference.target.lm_head.weight = table
    assert mx.allclose(logits, propose(reference)[0], atol=1e-5).item()
    drafter.target.embed_tokens.weight = 0 * drafter.target.embed_tokens.weight
    drafter.target.lm_head.weight = 0 * drafter.target.lm_head.weight
    assert mx.array_equal(propose(drafter)[0], logits).item()
    drafter.model.embed_tokens.weight = 2 * table
    assert mx.abs(propose(drafter)[0] - logits).max().item() > 0.1


def test_a_head_beside_the_table_is_the_head(tmp_path):
    table, head = mx.random.normal((2, VOCAB, HIDDEN), key=mx.random.key(3))
    tables = {"embed_tokens.weight": table, "lm_head.weight": head}
    drafter = load_drafter(write_drafter(tmp_path, lfm2(), {**own_weights(), **tables}), golden_target(), mx.float32)
    reference = golden_drafter("dspark", rope_is_neox_style=False, block_size=9)
    reference.target.embed_tokens.weight, reference.target.lm_head.weight = table, head
    assert mx.allclose(propose(drafter)[0], propose(reference)[0], atol=1e-5).item()


def test_a_table_of_its_own_that_does_not_fit_is_refused_by_name(tmp_path):
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tables = {"embed_tokens.weight": mx.zeros((VOCAB, HIDDEN)), name: mx.zeros((VOCAB - 1, HIDDEN))}
        with pytest.raises(ValueError, match=rf"{name} is \[95, 64\], should be \[96, 64\]"):
            load_drafter(write_drafter(tmp_path, lfm2(), {**own_weights(), **tables}), golden_target())


@pytest.mark.parametrize("interleaved", [True, False])
def test_interleaved_rope_turns_neighbours_and_neox_rope_halves(interleaved):
    D, theta = 8, 100.0
    x = np.random.default_rng(0).normal(size=(1, 3, 2, D)).astype(np.float32)
    positions = np.array([[0, 5, 1000]])
    wanted = np.empty_like(x)
    for t, p in enumerate(positions[0]):
        for i in range(D // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + D // 2)
            turn = complex(np.cos(p / theta ** (2 * i / D)), np.sin(p / theta ** (2 * i / D)))
            z = (x[0, t, :, a] + 1j * x[0, t, :, b]) * turn
            wanted[0, t, :, a], wanted[0, t, :, b] = z.real, z.imag
    rotary = Rotary(D, rope_parameters({"rope_theta": theta}), interleaved=interleaved)
    np.testing.assert_allclose(np.array(rotary(mx.array(x), mx.array(positions))), wanted, atol=1e-4)


# The rest


def test_early_specforges_prefix_is_dropped(tmp_path):
    heads = ("markov_head", "confidence_head")
    weights = {"logit_head." * name.startswith(heads) + name: w for name, w in own_weights().items()}
    drafter = load_drafter(write_drafter(tmp_path, packed(DSPARK, dflash_config={}), weights), golden_target())
    for ours, theirs in zip(propose(drafter), propose(golden_drafter("dspark")), strict=True):
        assert mx.allclose(ours, theirs, atol=1e-5).item()


def test_confidence_logits_are_divided_by_their_slots_temperature():
    temperatures = [0.5, 1, 2, 1, 4, 1, 0.25]
    _, plain = propose(golden_drafter("dspark"))
    _, calibrated = propose(golden_drafter("dspark", confidence_temperatures=temperatures))
    logits = mx.log(plain / (1 - plain)) / mx.array(temperatures)
    assert mx.allclose(calibrated, mx.sigmoid(logits), atol=1e-5).item()
