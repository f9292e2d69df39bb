"""Which drafter loads, for which target, and what is said when it doesn't."""

import json
import random
from copy import deepcopy
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from drafter_kit import (
    GOLDENS,
    VOCAB,
    case_weights,
    golden_config,
    golden_drafter,
    golden_target,
    propose,
    write_drafter,
)
from mlx.utils import tree_flatten

from specmlx.drafters.block_drafter import DFlash
from specmlx.drafters.checkpoint import build, load_drafter
from specmlx.drafters.config import DrafterConfig, default_taps, is_language_model
from specmlx.drafters.dflash2 import DFlash2
from specmlx.drafters.dspark import DSpark
from specmlx.drafters.pairing import check_pair

TARGET = golden_target().config
DFLASH, DFLASH2, DSPARK, RADIXARK = map(golden_config, ("dflash_full", "dflash2_full", "dspark", "dspark_yarn"))


def nested(config: dict, **changes) -> dict:
    return {**config, "dflash_config": {**config["dflash_config"], **changes}}


# The pair


@pytest.mark.parametrize("config", [DFLASH, DFLASH2, DSPARK, RADIXARK])
def test_a_pair_that_fits_has_no_reasons_against_it(config):
    assert check_pair(TARGET, config) == []
    assert check_pair(TARGET, DrafterConfig.from_dict(config)) == []
    sizes = {name: getattr(TARGET, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    assert check_pair({"text_config": sizes}, config) == [] != check_pair(sizes | {"hidden_size": 1}, config)
    assert check_pair({}, config) == ["the target: config.json lacks hidden_size: it must be a positive integer"]


@pytest.mark.parametrize(
    ("config", "both"),
    [
        ({**DFLASH, "hidden_size": 32}, ("hidden size", "32", "64")),
        ({**DFLASH, "num_target_layers": 64}, ("layers", "64", "6")),
        (nested(DFLASH, target_layer_ids=[1, 9]), ("taps", "[9]", "0 to 4")),
        (nested(DFLASH, target_layer_ids=[1, 5]), ("taps", "[5]", "0 to 4")),
        ({**DSPARK, "target_layer_ids": [-1, 4]}, ("taps", "[-1]", "0 to 4")),
        ({**DFLASH, "vocab_size": 64}, ("vocabulary", "64", "96")),
        (nested(DFLASH, mask_token_id=96), ("mask token", "96", "96")),
    ],
)
def test_a_reason_names_both_values(config, both):
    (reason,) = check_pair(TARGET, config)
    assert all(value in reason for value in both), reason
    assert "\n" not in reason


def test_all_reasons_are_given_at_once():
    assert len(check_pair(TARGET, {**DFLASH, "hidden_size": 32, "vocab_size": 64})) == 2


def test_taps_are_taken_as_layer_outputs_unshifted():
    target = golden_target()
    for case in ("dflash_full", "dspark", "dspark_yarn"):
        assert golden_drafter(case).tap_ids == (1, 4)
        assert max(golden_drafter(case).tap_ids) < target.config.num_hidden_layers - 1


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (28, 4, [1, 9, 17, 25]), (16, 1, [8])],
)
def test_taps_that_a_config_leaves_out_are_z_labs(layers, count, taps):
    assert default_taps(layers, count) == taps
    without = {**DFLASH, "num_target_layers": layers, "num_hidden_layers": count, "layer_types": None}
    without["dflash_config"] = {"mask_token_id": 90}
    assert DrafterConfig.from_dict(without).target_layer_ids == tuple(taps)


# The packagings


def test_block_size_is_found_in_either_place_and_is_16_where_dflash_says_nothing():
    bare = {key: value for key, value in DFLASH.items() if key != "block_size"}
    assert DrafterConfig.from_dict({**bare, "block_size": 4}).max_width == 3
    assert DrafterConfig.from_dict(nested(bare, block_size=4)).max_width == 3
    assert DrafterConfig.from_dict(bare).max_width == 15
    assert DrafterConfig.from_dict({**DSPARK, "block_size": 4}).max_width == 4
    with pytest.raises(ValueError, match="block_size"):
        DrafterConfig.from_dict({key: value for key, value in DSPARK.items() if key != "block_size"})


@pytest.mark.parametrize(
    ("top", "inner", "sliding", "full"),
    [
        (None, None, True, False),
        (None, False, False, False),
        (None, True, True, True),
        (False, True, False, False),
        (True, False, True, True),
    ],
)
def test_causality_is_the_top_levels_word_then_dflash_configs_then_the_layers_kind(top, inner, sliding, full):
    config = DFLASH if inner is None else nested(DFLASH, causal=inner)
    config = DrafterConfig.from_dict({**config, "is_causal": top})
    assert (config.causal(12), config.causal(None)) == (sliding, full)


def test_what_a_copy_of_the_targets_config_says_of_the_target_is_passed_over():
    noise = {"full_attention_interval": 4, "linear_num_key_heads": 16, "attn_output_gate": True}
    rope = {**DSPARK["rope_parameters"], "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    noisy = golden_drafter("dspark", **noise, rope_parameters=rope)
    assert mx.array_equal(propose(noisy), propose(golden_drafter("dspark"))).item()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"speculators_config": {"algorithm": "eagle3"}}, r"a speculators package of kind 'eagle3'"),
        (
            {**DFLASH, "architectures": ["DFlash2DraftModel"]},
            "config.json lacks conv_kernel_size: it must be a positive integer",
        ),
        (nested(DFLASH, selector_rank=256), "which is it"),
        (nested(DFLASH2, conv_group_size=24), "conv_group_size is 24: it must divide hidden_size 64"),
        (nested(DFLASH2, selector_top_k=97), "selector_top_k is 97: the vocabulary has 96"),
        ({**DSPARK, "markov_head_type": "lstm"}, "markov_head_type is 'lstm': specmlx knows vanilla, gated, rnn"),
        ({**DSPARK, "confidence_temperatures": [1, 0.5, 2]}, "confidence_temperatures has 3 numbers: there are 7"),
        ({**DSPARK, "confidence_temperatures": [0.0] * 7}, "a list, each a positive number"),
        ({**DSPARK, "architectures": ["LlamaEagle3"]}, r"unknown kind .*LlamaEagle3"),
        (nested(RADIXARK, projector_type="medusa"), r"unknown kind .*'medusa'"),
        ({"dspark_target_layer_ids": [40], "architectures": ["DeepseekV4"]}, "DSpark head inside"),
        (nested(DFLASH, use_swa=True), "use_swa"),
        (nested(DFLASH, attention_sink_bias=True), "attention_sink_bias"),
        (nested(DFLASH, log_snr_conditioning=True), "log_snr_conditioning"),
        ({**DFLASH, "quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq'"),
        ({**DFLASH, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rope_type is 'axial': not"),
        ({**DFLASH, "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({**DFLASH, "layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "no window"),
        ({**DFLASH, "layer_types": ["full_attention"]}, "names 1 layers but num_hidden_layers is 2"),
        ({**DFLASH, "block_size": 1}, "block_size 1 is too small"),
        ({**DFLASH, "hidden_size": "64"}, "hidden_size is '64': it must be a positive integer"),
        (nested(DFLASH, mask_token_id=None), "config.json lacks mask_token_id: it must be an integer"),
        ({**DSPARK, "target_layer_ids": []}, r"target_layer_ids is \[\]: it must be a list"),
    ],
)
def test_what_can_not_be_loaded_yet_is_named_in_one_line(config, says):
    with pytest.raises(ValueError, match=says) as error:
        DrafterConfig.from_dict(config)
    assert "\n" not in str(error.value)
    assert check_pair(TARGET, config) == [str(error.value)]


def places(value, path=()):
    """Every place in a config.json."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def test_values_of_any_type_anywhere_end_in_reasons_of_one_line_or_in_a_drafter():
    rng, wrong = (
        random.Random(0),
        [None, -1, 0, 1e30, 2**70, "x", [], {}, [None], ["a"], {"a": 1}, True, [[]], [-1], 1.5],
    )
    package = json.loads((GOLDENS.parent / "speculators" / "dspark" / "config.json").read_text())
    built = 0
    for config in (DFLASH, DFLASH2, DSPARK, golden_config("dflash_yarn"), RADIXARK, package):
        for place in rng.sample(list(places(config)), 25):
            for value in wrong:
                changed = deepcopy(config)
                inner = changed
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
                reasons = check_pair(TARGET, changed)
                assert all("\n" not in reason for reason in reasons)
                if not reasons and not is_language_model(changed):
                    build(DrafterConfig.from_dict(changed), golden_target())
                    built += 1
    assert built > 50


# The files


@pytest.mark.parametrize(
    ("case", "kind"),
    [("dflash_sliding", DFlash), ("dflash2_sliding", DFlash2), ("dspark", DSpark), ("dspark_yarn", DSpark)],
)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_directory_loads_by_the_publishers_names(case, kind, prefix, tmp_path):
    weights = {prefix + name: weight for name, weight in case_weights(case).items()}
    target = golden_target()
    drafter = load_drafter(write_drafter(tmp_path, golden_config(case), weights), target, dtype=mx.float32)
    assert type(drafter) is kind
    assert drafter.target is target
    assert mx.array_equal(propose(drafter), propose(golden_drafter(case))).item()


def test_the_files_dtype_is_kept_unless_another_is_asked_for(tmp_path):
    path = write_drafter(tmp_path, DSPARK, case_weights("dspark"))
    for dtype, found in [(None, mx.float16), (mx.bfloat16, mx.bfloat16)]:
        parameters = tree_flatten(load_drafter(path, golden_target(), dtype).model.parameters())
        assert {weight.dtype for _, weight in parameters} == {found}


def test_frozen_copies_of_the_targets_tables_are_dropped(tmp_path):
    weights = case_weights("dspark")
    assert "embed_tokens.weight" in weights and "lm_head.weight" in weights
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"] * 0 + 1
    drafter = load_drafter(write_drafter(tmp_path, DSPARK, weights), golden_target(), mx.float32)
    assert mx.array_equal(propose(drafter), propose(golden_drafter("dspark"))).item()
    weights["lm_head.weight"] = weights["lm_head.weight"][:50]
    with pytest.raises(ValueError, match=r"lm_head.weight is \[50, 64\], no copy of the target's \[96, 64\]"):
        load_drafter(write_drafter(tmp_path, DSPARK, weights), golden_target())


def test_a_confidence_head_that_the_config_does_not_mention_is_found_in_the_file(tmp_path):
    config = {key: value for key, value in DSPARK.items() if key != "enable_confidence_head"}
    weights = case_weights("dspark")
    assert load_drafter(write_drafter(tmp_path, config, weights), golden_target()).config.enable_confidence_head
    weights = {name: weight for name, weight in weights.items() if not name.startswith("confidence")}
    drafter = load_drafter(write_drafter(tmp_path, config, weights), golden_target())
    assert not drafter.config.enable_confidence_head


def test_the_pair_is_judged_before_any_weight_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**DFLASH, "hidden_size": 32}))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError, match="can't serve this target: hidden size: the drafter's is 32, the target's 64"):
        load_drafter(tmp_path, golden_target())


def test_codebooks_load_by_the_names_that_z_lab_gives_them_in_memory_too(tmp_path):
    weights = {
        name + ".weight" * name.endswith("codebook"): weight for name, weight in case_weights("dflash2_full").items()
    }
    drafter = load_drafter(write_drafter(tmp_path, DFLASH2, weights), golden_target(), mx.float32)
    assert mx.array_equal(propose(drafter), propose(golden_drafter("dflash2_full"))).item()


def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path):
    weights = case_weights("dflash_full")
    del weights["fc.weight"]
    weights["layers.9.mlp.up_proj.weight"] = mx.zeros((2, 2))
    weights["norm.weight"] = mx.ones((32,))
    with pytest.raises(ValueError) as error:
        load_drafter(write_drafter(tmp_path, DFLASH, weights), golden_target())
    for part in ("missing fc.weight", "extra layers.9.mlp.up_proj.weight", "norm.weight is [32], should be [64]"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_codes_in_the_place_of_weights_are_refused(tmp_path):
    weights = case_weights("dflash_full")
    weights["fc.weight"] = weights["fc.weight"].astype(mx.uint8)
    with pytest.raises(ValueError, match="fc.weight is .*uint8"):
        load_drafter(write_drafter(tmp_path, DFLASH, weights), golden_target())


def test_files_that_are_absent_cut_or_corrupt_are_named_in_one_line(tmp_path):
    path = write_drafter(tmp_path / "drafter", DFLASH, case_weights("dflash_full"))
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:2000], whole[:4], b"", b"\xff" * 64, whole + b"x"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="model.safetensors") as error:
            load_drafter(path, golden_target())
        assert "\n" not in str(error.value)
    file.unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors in .*drafter"):
        load_drafter(path, golden_target())
    for text in ("{", "[1]", "\x00"):
        (path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config.json"):
            load_drafter(path, golden_target())
    with pytest.raises(ValueError, match="nowhere/config.json not found"):
        load_drafter(tmp_path / "nowhere", golden_target())


def test_a_drafter_in_several_files_loads_as_one(tmp_path):
    weights = case_weights("dflash_full")
    path = write_drafter(tmp_path, DFLASH, {})
    (path / "model.safetensors").unlink()
    for i in range(2):
        part = {name: weight for j, (name, weight) in enumerate(sorted(weights.items())) if j % 2 == i}
        mx.save_safetensors(str(path / f"model-0000{i + 1}-of-00002.safetensors"), part)
    drafter = load_drafter(path, golden_target(), mx.float32)
    assert mx.array_equal(propose(drafter), propose(golden_drafter("dflash_full"))).item()


@pytest.mark.parametrize("case", ["dflash_full", "dspark_yarn"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_export_proposes_as_its_dequantized_weights_do(case, bits, tmp_path):
    drafter = golden_drafter(case)
    expected = golden_drafter(case)
    kinds = (nn.Linear, nn.Embedding)
    chosen = {
        name
        for name, module in drafter.model.named_modules()
        if isinstance(module, kinds) and module.weight.shape[-1] % 32 == 0 and name != "fc"
    }
    nn.quantize(drafter.model, 32, bits, class_predicate=lambda name, _: name in chosen)
    nn.quantize(drafter.model, 32, 6, class_predicate=lambda name, _: name == "fc")
    export = dict(tree_flatten(drafter.model.parameters()))
    quantization = {"group_size": 32, "bits": bits, "fc": {"group_size": 32, "bits": 6}}
    config = {**golden_config(case), "quantization": quantization, "quantization_config": quantization}
    loaded = load_drafter(write_drafter(tmp_path, config, export), golden_target())
    dense = {}
    for name, _ in tree_flatten(expected.model.parameters()):
        dense[name] = export[name]
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in export:
            packed = export[name], export[f"{stem}.scales"], export[f"{stem}.biases"]
            dense[name] = mx.dequantize(*packed, group_size=32, bits=6 if stem == "fc" else bits)
    expected.model.load_weights(list(dense.items()))
    assert mx.abs(propose(loaded) - propose(expected)).max().item() < 1e-4
    assert mx.abs(propose(loaded) - propose(golden_drafter(case))).max().item() > 1e-3


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("affine", 3, 64), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_bits_group_size_and_mode_are_those_of_the_shapes_whatever_the_config_says(mode, bits, group_size, tmp_path):
    drafter = golden_drafter("dflash_full")
    nn.quantize(drafter.model, group_size, bits, mode=mode, class_predicate=lambda name, _: name == "fc")
    export = dict(tree_flatten(drafter.model.parameters()))
    for i, said in enumerate([{}, {"quantization": {"group_size": 128, "bits": 6}}]):
        loaded = load_drafter(write_drafter(tmp_path / str(i), DFLASH | said, export), golden_target())
        assert (loaded.model.fc.mode, loaded.model.fc.bits, loaded.model.fc.group_size) == (mode, bits, group_size)
        assert mx.array_equal(propose(loaded), propose(drafter)).item()


def test_codes_that_mlx_does_not_pack_are_refused(tmp_path):
    drafter = golden_drafter("dflash_full")
    nn.quantize(drafter.model, 32, 4, class_predicate=lambda name, _: name == "fc")
    export = dict(tree_flatten(drafter.model.parameters()))
    export["fc.scales"] = export["fc.scales"][:, :3]
    with pytest.raises(ValueError, match="fc is packed as mlx packs nothing of"):
        load_drafter(write_drafter(tmp_path, DFLASH, export), golden_target())


def test_a_quantized_markov_head_proposes_too(tmp_path):
    # Rank 32, so that its rows can be quantized in groups of 32.
    config = replace(golden_drafter("dspark").config, markov_rank=32, enable_confidence_head=False)
    drafter = DSpark(type(golden_drafter("dspark").model)(config), golden_target())
    nn.quantize(drafter.model.markov_head, 32, 8)
    assert isinstance(drafter.model.markov_head.markov_w1, nn.QuantizedEmbedding)
    assert mx.isfinite(propose(drafter)).all().item()
    assert propose(drafter).shape == (1, 7, VOCAB)
