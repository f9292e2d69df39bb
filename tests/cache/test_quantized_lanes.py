"""Lanes whose keys and values are kept in fewer bits: each as it would be alone, on both sides of where that begins."""

import mlx.core as mx
import pytest
from batch_kit import COUNTS, PROMPTS, KnowsTheTexts, ids_alone, in_lanes
from rig import SMALL, mlx_lm_twin, same_bits, small_tokenizer, tiny

from specmlx import Engine, PromptCache, batch_generate, generate, load
from specmlx.cache.quantized import KVFormat, QuantizedKV
from specmlx.decoding.policy import Policy
from specmlx.targets.any_lm import AnyLM

VARIANTS = {"fp32": {}, "bf16": dict(dtype=mx.bfloat16), "4-bit": dict(bits=4)}
# Three of the lanes reach row 64 as they decode, two begin behind it, one ends before it.
FORMATS = {
    "8": dict(kv_bits=8, quantized_kv_start=0),
    "4 from 64 on": dict(kv_bits=4, quantized_kv_start=64),
    "int8 from 100 on": dict(kv_bits="int8", quantized_kv_start=100),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    found = small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found.eos_token_ids = {281}
    return found


def held(states) -> list[mx.array]:
    """What the committed rows left, keys and values as they are stored."""
    found = []
    for layer in states.folded():
        if hasattr(layer, "keys"):
            found += [x[0, :, : states.length] for x in layer.arrays()]
        elif layer is not None:
            found += [layer.S, layer.conv]
    return found


@pytest.mark.linux_bits
@pytest.mark.parametrize(
    ("variant", "name"), [*(("fp32", name) for name in FORMATS), ("bf16", "4 from 64 on"), ("4-bit", "4 from 64 on")]
)
def test_a_lane_with_quantized_keys_has_the_tokens_and_the_state_that_it_would_have_alone(variant, name, tokenizer):
    model = tiny(3, **SMALL, **VARIANTS[variant])
    options = dict(kv_group_size=32, **FORMATS[name])
    prompts = [*PROMPTS, [3, 4] * 27, [6] * 60]
    counts = [*COUNTS, 20, 30]
    alone = [
        ids_alone(model, tokenizer, p, n, draft_model=None, **options) for p, n in zip(prompts, counts, strict=True)
    ]
    drafter = KnowsTheTexts([prompt + ids for prompt, (ids, _) in zip(prompts, alone, strict=True)])
    kv_format = KVFormat.read(*(options[key] for key in ("kv_bits", "kv_group_size", "quantized_kv_start")))
    policies = [Policy() for _ in prompts]
    given, jobs = in_lanes(model, tokenizer, drafter, prompts, counts, policies, kv_format=kv_format)
    assert given == [ids for ids, _ in alone]
    for job, (_, cache) in zip(jobs, alone, strict=True):
        assert job.conversation.tokens == cache.tokens
        assert same_bits(held(job.conversation.states), held(cache.states))
    kinds = [isinstance(job.conversation.states.layers[1], QuantizedKV) for job in jobs]
    assert any(kinds) and (all(kinds) or kv_format.start > 0)
    assert len({tuple(job.stats.accept_histogram) for job in jobs}) > 2, "the lanes accept alike: a weak test"


@pytest.mark.linux_bits
def test_batches_and_the_engine_take_the_options_of_a_request_alone():
    model, tokenizer = load()
    prompts = [tokenizer.encode(f"Can you count from {n} up to {n + 9}? " * 8) for n in (11, 24)]
    options = dict(kv_bits=4, kv_group_size=32, quantized_kv_start=0)
    want = [generate(model, tokenizer, prompt, max_tokens=30, **options) for prompt in prompts]
    cache = PromptCache()
    for cached in (0, 128):
        found = batch_generate(model, tokenizer, prompts, cache, max_tokens=30, **options)
        assert found.texts == want and found.stats.cached_tokens >= cached
    with Engine(model, tokenizer, **options) as engine:
        requests = [engine.submit(prompt, 30) for prompt in prompts]
        assert [request.text() for request in requests] == want


@pytest.mark.parametrize("make", [Engine, lambda *a, **k: batch_generate(*a, [[1]], **k)], ids=["engine", "batch"])
def test_what_lanes_cannot_be_kept_in_is_refused_before_anything_runs(make, tokenizer):
    model = tiny(0, **SMALL)
    stock = AnyLM(mlx_lm_twin(model, **SMALL))
    for which, options, says in (
        (model, dict(kv_bits=7), "kv_bits is 7"),
        (model, dict(kv_bits=8), "must divide the heads' size, 32"),
        (model, dict(max_kv_size=0), "max_kv_size is 0"),
        (stock, dict(kv_bits=8), "kv_bits can't be had"),
    ):
        with pytest.raises(ValueError, match=says) as refused:
            make(which, tokenizer, **options)
        assert "\n" not in str(refused.value)
