"""The hybrid target: mlx-lm's bits, its taps, names of weights."""

import os
import random
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5
from mlx_lm.models.base import create_attention_mask
from rig import (
    EXPERTS,
    NEXT,
    TINY,
    by_steps,
    generate_tokens,
    in_rounds,
    leaves,
    mlx_lm_twin,
    prefilled,
    same_bits,
    stock_leaves,
    tiny,
    tokens,
)

from specmlx.cache.conversation import Conversation
from specmlx.cache.layers import LayerStates
from specmlx.decoding.policy import Policy
from specmlx.targets.config import FULL, LINEAR, HybridConfig
from specmlx.targets.hybrid import Model
from specmlx.targets.weights import sanitize

FORMATS = {
    "fp32": dict(dtype=mx.float32),
    "bf16": dict(dtype=mx.bfloat16),
    "4-bit fp32": dict(dtype=mx.float32, bits=4),
    "4-bit bf16": dict(dtype=mx.bfloat16, bits=4),
    "tied, biased": dict(dtype=mx.float32, tie_word_embeddings=True, attention_bias=True),
    "yarn": dict(
        dtype=mx.float32,
        rope_parameters=TINY["rope_parameters"]
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
}


def twins(name: str, seed: int = 0, layers: int = 8):
    options = FORMATS[name]
    model = tiny(seed, **options, num_hidden_layers=layers)
    changes = {k: v for k, v in options.items() if k not in ("dtype", "bits")}
    return model, mlx_lm_twin(model, **changes, num_hidden_layers=layers)


def check_bits(name: str, count: int = 24, most: int = 9, layers: int = 8) -> None:
    """One row a pass, and passes of 1 to `most` rows of which some are right: both as mlx-lm's model, row by row."""
    model, twin = twins(name, layers=layers)
    ids = tokens(1, count)[0].tolist()
    caches = twin.make_cache()
    want = by_steps(twin, caches, ids)
    for widest in (1, most):
        states = model.new_states()
        assert same_bits(in_rounds(model, states, ids, seed=widest, most=widest), want), widest
        assert states.length == count
        assert same_bits(leaves(states), stock_leaves(caches)), widest


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", FORMATS)
def test_every_accepted_row_has_the_bits_of_mlx_lm_fed_token_by_token(name):
    check_bits(name)


@pytest.mark.linux_bits
def test_the_compiled_path_has_the_bits_of_mlx_lm_too(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "MLX_DISABLE_COMPILE"}
    env |= {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    code = "import test_target as t; [t.check_bits(dtype, 6, 3, 4) for dtype in ('fp32', 'bf16')]"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert any(tmp_path.rglob("*.so")), "nothing was compiled"


@pytest.mark.linux_bits
def test_greedy_takes_the_token_that_mlx_lm_takes_at_ties_of_the_rounded_log_probs():
    model, twin = twins("bf16", seed=6, layers=4)
    prompt = [5]
    theirs = [int(token) for token, _ in generate_step(mx.array(prompt), twin, max_tokens=30)]
    ours = [t.id for t in generate_tokens(model, Conversation(model.new_states()), prompt, Policy(), max_tokens=30)]
    assert ours == theirs
    logits = by_steps(twin, twin.make_cache(), prompt + theirs[:-1])
    assert [x.argmax().item() for x in logits] != theirs, "no tie: this seed can't tell the two rules apart"


def residual_streams(model: Model, ids: mx.array) -> list[mx.array]:
    """The stream after every layer, run by mlx-lm's decoder layers without a cache."""
    args = qwen3_5.TextModelArgs.from_dict(TINY)
    h = model.embed_tokens(ids)
    mask = create_attention_mask(h)
    streams = []
    for i, ours in enumerate(model.layers):
        kind = model.config.layer_types[i]
        layer = qwen3_5.DecoderLayer(args, args.full_attention_interval - 1 if kind == FULL else 0)
        layer.load_weights(tree_flatten(ours.parameters()), strict=True)
        layer.eval()
        h = layer(h, mask=None if layer.is_linear else mask)
        streams.append(h)
    return streams


@pytest.mark.linux_bits
@pytest.mark.parametrize("layer_types", [None, [FULL, LINEAR, LINEAR, FULL, LINEAR]])
def test_a_tap_is_the_residual_stream_after_its_layer(layer_types):
    changes = {} if layer_types is None else dict(layer_types=layer_types, num_hidden_layers=len(layer_types))
    model = tiny(1, **changes)
    last = len(model.layers) - 1
    ids = tokens(2, 11)
    streams = residual_streams(model, ids)
    for tap_ids in ((0,), (last, 0, 3, 2)):
        verified = model.verify(model.new_states(), ids, tap_ids)
        assert same_bits([verified.features], [mx.concatenate([streams[i] for i in tap_ids], axis=-1)])
    assert same_bits([verified.logits], [model.lm_head(model.model.norm(streams[-1]))])
    _, features = next(model.prefill(model.new_states(), ids, (last, 0, 3, 2)))
    assert same_bits([features], [verified.features])


WHOLE = {
    "dense fp32": (mx.float32, None, {}),
    "dense bf16": (mx.bfloat16, None, {}),
    "dense 4-bit": (mx.float32, 4, {}),
    "dense 8-bit bf16": (mx.bfloat16, 8, {}),
    # mlx's CPU has no gathered product of bf16 experts: theirs are packed.
    "moe fp32": (mx.float32, None, EXPERTS),
    "moe 4-bit bf16": (mx.bfloat16, 4, EXPERTS),
    "moe 8-bit": (mx.float32, 8, EXPERTS),
    "next fp32": (mx.float32, None, NEXT),
    "next 4-bit": (mx.float32, 4, NEXT),
    "next 8-bit bf16": (mx.bfloat16, 8, NEXT),
}
ONE_EACH = dict(num_hidden_layers=2, full_attention_interval=2, hidden_size=32)


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", WHOLE)
def test_a_prompt_has_the_bits_of_mlx_lm_fed_token_by_token_at_every_length_and_split(name):
    dtype, bits, changes = WHOLE[name]
    model = tiny(2, dtype, bits, **changes, **ONE_EACH)
    twin = mlx_lm_twin(model, **changes, **ONE_EACH)
    ids, caches, rng = tokens(3, 300), twin.make_cache(), random.Random(name)
    lengths = sorted({*rng.sample((1, 2, 63, 64, 65), 2), rng.randrange(3, 300), 300})
    logits, begun = [], 0
    for length in lengths:
        logits += by_steps(twin, caches, ids[0, begun:length].tolist())
        want, begun = stock_leaves(caches), length
        assert same_bits(leaves(prefilled(model, ids[:, :length])), want), length
        split = rng.randrange(length)
        states = prefilled(model, ids[:, :split])
        stepped = min(split + 12, length)
        verified = in_rounds(model, states, ids[0, split:stepped].tolist(), seed=length)
        assert same_bits(verified, logits[split:stepped]), (length, split)
        for _ in model.prefill(states, ids[:, stepped:length], step_size=64):
            pass
        assert same_bits(leaves(states), want), (length, split)
    assert same_bits(list(model(ids)[0]), logits)
    assert same_bits(list(model(ids, model.make_cache())[0]), logits)


@pytest.mark.linux_bits
def test_a_prompt_of_more_than_one_step_has_the_bits_of_mlx_lm_and_of_rounds_at_its_end():
    model = tiny(2, **ONE_EACH)
    twin, ids = mlx_lm_twin(model, **ONE_EACH), tokens(3, 2049)
    caches = twin.make_cache()
    twin(ids, cache=caches)
    want = stock_leaves(caches)
    assert same_bits(leaves(prefilled(model, ids)), want)
    states = prefilled(model, ids[:, :2029])
    in_rounds(model, states, ids[0, 2029:].tolist(), seed=0)
    assert same_bits(leaves(states), want)


@pytest.mark.linux_bits
def test_a_prefill_runs_in_steps_of_64_rows_for_lanes_of_any_lengths():
    model = tiny(2, **ONE_EACH)
    ids = tokens(3, 230)
    lanes = LayerStates.merged([prefilled(model, ids[:, :n]) for n in (100, 3)])
    rows = mx.concatenate([ids[:, 100:], ids[:, 3:133]])
    assert [t.shape[1] for t, _ in model.prefill(lanes, rows, step_size=50)] == [64, 64, 2]
    for lane, n in ((0, 230), (1, 133)):
        assert same_bits(leaves(lanes, lane), leaves(prefilled(model, ids[:, :n])))


def raw(model: Model) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """A Hugging Face checkpoint by bare names, and what its tensors must become."""
    published, expected = {}, {}
    for name, value in tree_flatten(model.parameters()):
        bare = name.removeprefix("language_model.").removeprefix("model.")
        published[bare] = expected[name] = value
        if name.endswith("conv1d.weight"):
            published[bare] = value.moveaxis(1, 2)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            published[bare] = value - 1
            expected[name] = published[bare] + 1
    return published, expected


def prefixed(weights: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {(f"{prefix}{name}" if name != "lm_head.weight" else head(prefix)): value for name, value in weights.items()}


def head(prefix: str) -> str:
    return "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"


STRANGERS = {
    "mtp.layers.0.input_layernorm.weight": mx.zeros(8),
    "mtp.layers.0.linear_attn.conv1d.weight": mx.zeros((8, 1, 4)),
    "model.mtp.norm.weight": mx.zeros(8),
    "model.visual.blocks.0.norm1.weight": mx.zeros(8),
    "vision_tower.patch_embed.proj.weight": mx.zeros((8, 8)),
}


def same_weights(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and same_bits([a[k] for k in a], [b[k] for k in a])


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_weights_of_every_publisher_get_the_same_names_and_norms_their_one_once(prefix):
    model = tiny(0)
    published, expected = raw(model)
    sanitized = sanitize(prefixed(published, prefix) | STRANGERS, tied=False)
    assert same_weights(sanitized, expected)
    assert same_weights(sanitize(sanitized, tied=False), expected)


def test_converted_weights_keep_their_norms_beside_raw_weights_of_other_models():
    converted = dict(tree_flatten(tiny(0).parameters()))
    assert same_weights(sanitize(converted | STRANGERS, tied=False), converted)


def test_a_tied_head_in_the_file_is_left_out():
    published, expected = raw(tiny(0))
    del expected["language_model.lm_head.weight"]
    for prefix in ("model.", "language_model.model."):
        assert same_weights(sanitize(prefixed(published, prefix), tied=True), expected)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(layer_types=[LINEAR, FULL]), "layer_types names 2"),
        (dict(layer_types=[LINEAR] * 7 + ["mamba"]), "mamba"),
        (dict(layer_types=[FULL] * 8), LINEAR),
        (dict(layer_types=[LINEAR] * 8), FULL),
        (dict(num_hidden_layers=2), FULL),
        (dict(num_experts=8), "num_experts_per_tok is 0"),
        (dict(linear_num_key_heads=3), "linear_num_key_heads (3)"),
        (dict(hidden_size="64"), "hidden_size is '64'"),
        (dict(full_attention_interval=0), "full_attention_interval is 0"),
    ],
)
def test_a_geometry_that_is_no_hybrid_is_refused_by_name(changes, word):
    with pytest.raises(ValueError) as error:
        HybridConfig.from_dict(TINY | changes)
    assert word in str(error.value) and "\n" not in str(error.value)


def test_no_key_of_the_text_config_is_needed_twice():
    nested = {"model_type": "qwen3_5", "text_config": {k: v for k, v in TINY.items() if k != "model_type"}}
    assert HybridConfig.from_dict(nested) == HybridConfig.from_dict(TINY)
