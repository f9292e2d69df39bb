"""Mixtures of experts and qwen3_next: mlx-lm's bits, the publishers' files, geometries that are none."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from rig import (
    EXPERTS,
    NEXT,
    TINY,
    by_steps,
    in_rounds,
    leaves,
    mlx_lm_twin,
    prefilled,
    same_bits,
    stock_leaves,
    tiny,
    tokens,
)

from specmlx.targets.checkpoint import load_target
from specmlx.targets.config import HybridConfig
from specmlx.targets.weights import sanitize

SMALL = {"num_hidden_layers": 4, "full_attention_interval": 2}
TYPES = {"qwen3_5_moe": EXPERTS | SMALL, "qwen3_next": NEXT | SMALL}
# mlx multiplies dense bfloat16 experts on the GPU only.
FORMATS = {"fp32": (mx.float32, None), "4-bit fp32": (mx.float32, 4), "4-bit bf16": (mx.bfloat16, 4)}


@pytest.mark.linux_bits
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_accepted_row_has_the_bits_of_mlx_lm_fed_token_by_token(kind, format):
    dtype, bits = FORMATS[format]
    model = tiny(0, dtype, bits, **TYPES[kind])
    twin = mlx_lm_twin(model, **TYPES[kind])
    ids = tokens(1, 24)[0].tolist()
    caches = twin.make_cache()
    want = by_steps(twin, caches, ids)
    # 23 rows of 3 experts are over the 64 from which mlx-lm sorts rows by expert.
    for widest in (1, 9, 23):
        states = model.new_states()
        assert same_bits(in_rounds(model, states, ids, seed=widest, most=widest), want), widest
        assert same_bits(leaves(states), stock_leaves(caches)), widest


@pytest.mark.parametrize("kind", TYPES)
def test_prefill_agrees_with_mlx_lm_to_rounding_and_fits_any_step_size(kind):
    model = tiny(0, **TYPES[kind])
    ids = tokens(4, 150)
    want = mlx_lm_twin(model, **TYPES[kind])(ids)
    states = prefilled(model, ids[:, :140])
    assert mx.allclose(model.verify(states, ids[:, 140:]).logits, want[:, 140:], rtol=0, atol=2e-4).item()
    other = prefilled(model, ids[:, :140], step_size=64)
    assert all(mx.allclose(a, b, rtol=0, atol=1e-5).item() for a, b in zip(leaves(states), leaves(other), strict=True))


def published(model, kind: str) -> dict[str, mx.array]:
    """The weights as Hugging Face's files have them: convs [C, 1, K], norms less one, experts by their publisher."""
    files = {"mtp.layers.0.mlp.experts.0.up_proj.weight": mx.zeros((4, 4))}
    flat = dict(tree_flatten(model.parameters()))
    for name, value in flat.items():
        bare = name.removeprefix("language_model.")
        if kind == "qwen3_5_moe" and bare.startswith("model."):
            bare = bare.replace("model.", "model.language_model.", 1)
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            value = value - 1
        if ".switch_mlp." not in name:
            files[bare] = value
        elif kind == "qwen3_next":
            for i, expert in enumerate(value):
                files[bare.replace("switch_mlp", f"experts.{i}")] = expert
        elif name.endswith("down_proj.weight"):
            files[bare.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = value
        elif name.endswith("gate_proj.weight"):
            up = flat[name.replace("gate_proj", "up_proj")]
            files[bare.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = mx.concatenate([value, up], 1)
    return files


def write_published(path, kind: str, **changes):
    config = TINY | TYPES[kind] | changes
    mx.save_safetensors(str(path / "model.safetensors"), published(tiny(0, **config), kind))
    (path / "config.json").write_text(json.dumps(config))
    return path


def first_logits(model, ids: list[int]) -> list[mx.array]:
    return list(model.verify(model.new_states(), mx.array([ids], dtype=mx.int32)).logits[0])


@pytest.mark.linux_bits
@pytest.mark.parametrize("kind", TYPES)
def test_what_hugging_face_publishes_gives_mlx_lms_logits(kind, tmp_path):
    # mlx-lm's reader of qwen3_next asks for experts in every layer.
    changes = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    path = write_published(tmp_path, kind, **changes)
    ids = [3, 1, 4, 1, 5]
    theirs, _ = load_model(path)
    ours, _ = load_target(path)
    assert same_bits(first_logits(ours, ids), by_steps(theirs, theirs.make_cache(), ids))


@pytest.mark.linux_bits
@pytest.mark.parametrize("kind", TYPES)
def test_what_mlx_lm_quantizes_keeps_its_routers_bits(kind, tmp_path):
    config = json.loads(json.dumps(TINY | TYPES[kind]))
    twin, config = quantize_model(mlx_lm_twin(tiny(0, mx.bfloat16, **config), **config), config, 32, 4)
    save_model(tmp_path, twin)
    save_config(config, tmp_path / "config.json")
    model, _ = load_target(tmp_path)
    routers = [layer.mlp for layer in model.layers if "switch_mlp" in layer.mlp]
    assert {(r.gate.bits, r.shared_expert_gate.bits, r.switch_mlp.up_proj.bits) for r in routers} == {(8, 8, 4)}
    ids = [3, 1, 4, 1, 5]
    theirs, _ = load_model(tmp_path)
    assert same_bits(first_logits(model, ids), by_steps(theirs, theirs.make_cache(), ids))


@pytest.mark.parametrize("kind", TYPES)
def test_converted_weights_and_a_second_reading_change_nothing(kind):
    model = tiny(0, **TYPES[kind])
    own = dict(tree_flatten(model.parameters()))
    once = sanitize(published(model, kind), tied=False)
    for weights in (sanitize(own, tied=False), sanitize(once, tied=False)):
        assert weights.keys() == own.keys()
        assert all(mx.allclose(weights[name], own[name], rtol=0, atol=1e-6).item() for name in own)


def test_a_missing_expert_is_refused_by_name():
    weights = published(tiny(0, **TYPES["qwen3_next"]), "qwen3_next")
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.switch_mlp\.up_proj\.weight lacks experts \[2\]"):
        sanitize(weights, tied=False)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(num_experts_per_tok=9), "num_experts_per_tok is 9 but there are 8"),
        (dict(moe_intermediate_size=0), "moe_intermediate_size is 0"),
        (dict(shared_expert_intermediate_size=None), "shared_expert_intermediate_size is 0"),
        (dict(intermediate_size=0, mlp_only_layers=[1]), "intermediate_size is 0"),
        (dict(mlp_only_layers="x"), "mlp_only_layers is 'x': it must be a list, each an integer at least 0"),
        (dict(head_dim=[32]), "head_dim is [32]: it must be a positive integer"),
    ],
)
def test_experts_that_the_config_does_not_describe_are_refused_by_name(changes, word):
    with pytest.raises(ValueError) as error:
        HybridConfig.from_dict(TINY | NEXT | changes)
    assert word in str(error.value)


def test_a_mixture_needs_no_size_of_a_dense_mlp():
    config = {k: v for k, v in (TINY | EXPERTS).items() if k != "intermediate_size"}
    assert HybridConfig.from_dict(config).has_experts(0)
