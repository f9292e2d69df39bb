"""mlx-lm's own models as targets: their tokens, their taps, rows taken back, nothing in them changed."""

import json
import random
import threading
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import pytest
from any_lm_kit import MODELS, SIZES, WINDOW, flat, random_lm
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_caches
from mlx_lm.utils import save_config, save_model
from rig import (
    EXPERTS,
    NEXT,
    by_steps,
    collect,
    generate_tokens,
    in_rounds,
    mlx_lm_twin,
    same_bits,
    small_tokenizer,
    tiny,
    tokens,
)
from scripted import ScriptedDrafter, right_with

import specmlx
from specmlx.cache.conversation import Conversation
from specmlx.cache.mlx_lm import CacheStates
from specmlx.decoding.policy import Policy
from specmlx.decoding.stats import Stats
from specmlx.drafters.base import logits_of
from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.pairing import check_pair
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.from_mlx_lm import as_target
from specmlx.targets.hybrid import Model


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", MODELS)
def test_every_accepted_row_has_the_bits_of_one_row_a_pass(name):
    model = AnyLM(random_lm(name))
    ids = tokens(1, 40)[0].tolist()
    want = in_rounds(model, model.new_states(), ids, seed=0, most=1)
    states = model.new_states()
    assert same_bits(in_rounds(model, states, ids, seed=3), want)
    assert states.length == 40
    assert states.replays == (name == "lfm2")
    theirs = by_steps(model.lm, stock_caches(model.lm), ids)
    # Past its window mlx-lm's cache is in rotated order, and so are its sums.
    equal = WINDOW if name.startswith("gemma") else 40
    assert same_bits(want[:equal], theirs[:equal])
    assert all(mx.allclose(a, b, rtol=0, atol=1e-4).item() for a, b in zip(want, theirs, strict=True))


@pytest.mark.linux_bits
def test_a_window_forgets_old_rows_without_changing_a_bit():
    model = AnyLM(random_lm("gemma3_text"))
    ids = tokens(2, 700)
    states = model.new_states()
    for step in range(0, 690, 30):
        model.verify(states, ids[:, step : step + 30])
        states.evaluate()
        states.commit(30)
    assert states.caches[0].arrays()[0].shape[2] < 700
    got = in_rounds(model, states, ids[0, 690:].tolist(), seed=1, most=4)
    assert same_bits(got, list(model.lm(ids)[0, 690:]))


@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_steps_and_caches_of_mlx_lm_lead_to_the_same_rows(name):
    model = AnyLM(random_lm(name))
    ids = tokens(3, 50)
    want = by_steps(model.lm, stock_caches(model.lm), ids[0].tolist())[-1]
    states = model.new_states()
    assert [t.shape[1] for t, _ in model.prefill(states, ids[:, :45], (1,), 20)] == [20, 20, 5]
    got = model.verify(states, ids[:, 45:]).logits[0, -1]
    assert mx.allclose(got, want, rtol=0, atol=1e-4).item()
    states.abort()

    caches = stock_caches(model.lm)
    by_steps(model.lm, caches, ids[0, :30].tolist())
    taken = model.import_caches(caches)
    in_rounds(model, taken, ids[0, 30:45].tolist(), seed=4)
    model.export_caches(taken, caches)
    assert mx.allclose(by_steps(model.lm, caches, ids[0, 45:].tolist())[-1], want, rtol=0, atol=1e-4).item()


def streams(model: nn.Module, ids: mx.array) -> list[mx.array]:
    """The residual stream after each layer of a llama, by its layers one after the other."""
    h = model.model.embed_tokens(ids)
    found = []
    for layer in model.model.layers:
        h = layer(h, "causal", None)
        found.append(h)
    return found


@pytest.mark.linux_bits
def test_a_tap_is_the_residual_stream_after_its_layer_and_the_model_is_not_touched():
    theirs = random_lm("llama")
    before = [(id(module), dict(module), dict(vars(module))) for _, module in theirs.named_modules()]
    layers = list(theirs.layers)
    model = AnyLM(theirs)
    ids = tokens(5, 9)
    states = model.new_states()
    found = model.verify(states, ids, (2, 0))
    want = streams(theirs, ids)
    assert same_bits([found.features], [mx.concatenate([want[2], want[0]], axis=-1)])
    assert same_bits([found.logits], [logits_of(model.head, theirs.model.norm(want[-1]))])
    after = [(id(module), dict(module), dict(vars(module))) for _, module in theirs.named_modules()]
    assert [name for name, _, _ in before] == [name for name, _, _ in after]
    assert all(a is b for a, b in zip(layers, theirs.layers, strict=True))
    assert all(a[1].keys() == b[1].keys() and a[2] == b[2] for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_embedding_and_head_are_the_models_own(name):
    model = AnyLM(random_lm(name))
    ids = tokens(6, 7)
    kept = {}

    class Norm(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.inner = norm

        def __call__(self, x):
            kept["h"] = self.inner(x)
            return kept["h"]

    norm = "embedding_norm" if name == "lfm2" else "norm"
    model.lm.model[norm] = Norm(model.lm.model[norm])
    logits = model.lm(ids)
    assert same_bits([logits_of(model.head, kept["h"])], [logits])
    assert same_bits([model.embed_tokens(ids)], [model.lm.model.embed_tokens.weight[ids]])


def test_layers_whose_rows_are_not_what_they_return_first_have_no_taps():
    model = AnyLM(random_lm("llama"))
    layer = model.layers[1]

    class Pair(type(layer)):
        def __call__(self, *args, **kwargs):
            return None, super().__call__(*args, **kwargs)

    layer.__class__ = Pair
    states = model.new_states()
    with pytest.raises(ValueError, match="returns a tuple, not its rows: no taps there"):
        # As training begins.
        model.scored(tokens(1, 2), (1,))
    with pytest.raises(ValueError, match="returns a tuple, not its rows: no taps there"):
        model.verify(states, tokens(1, 3), (1,))
    assert states.length == 0


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_pass_that_fails_half_way_leaves_the_rows_that_were_in(name):
    model = AnyLM(random_lm(name))
    ids = tokens(7, 20)[0].tolist()
    want = in_rounds(model, model.new_states(), ids, seed=0, most=1)
    states = model.new_states()
    in_rounds(model, states, ids[:10], seed=1)
    layer = model.layers[2]
    fine = type(layer)

    class Broken(fine):
        def __call__(self, *args, **kwargs):
            raise KeyboardInterrupt

    layer.__class__ = Broken
    with pytest.raises(KeyboardInterrupt):
        model.verify(states, tokens(8, 5))
    layer.__class__ = fine
    assert states.length == 10
    assert same_bits(in_rounds(model, states, ids[10:], seed=2), want[10:])


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", ["llama", "qwen3", "lfm2"])
def test_speculation_gives_the_tokens_of_mlx_lm(name):
    model = AnyLM(random_lm(name, seed=3))
    prompt = [5, 3, 8]
    theirs = [int(token) for token, _ in generate_step(mx.array(prompt), model.lm, max_tokens=40)]
    for chance in (None, 0.5, 0.9):
        text = prompt + theirs
        drafter = None if chance is None else ScriptedDrafter(text, right_with(chance), tap_ids=())
        conversation = Conversation(model.new_states())
        ours = [t.id for t in generate_tokens(model, conversation, prompt, Policy(), drafter, max_tokens=40)]
        assert ours == theirs, chance


def test_a_model_whose_code_takes_one_row_by_another_way_than_several_agrees_to_rounding():
    mamba = dict(state_size=16, conv_kernel=4, num_heads=4, n_groups=1, use_bias=False, use_conv_bias=True)
    mamba |= dict(time_step_limit=[0.0, 100.0], time_step_rank=8, layer_norm_epsilon=1e-5, tie_word_embeddings=False)
    model = AnyLM(random_lm("mamba2", **mamba))
    ids = tokens(1, 24)[0].tolist()
    want = by_steps(model.lm, stock_caches(model.lm), ids)
    got = in_rounds(model, model.new_states(), ids, seed=3)
    assert all(mx.allclose(a, b, rtol=0, atol=1e-4).item() for a, b in zip(got, want, strict=True))
    assert logits_of(model.head, model.embed_tokens(tokens(1, 3))).shape == (1, 3, 96)


def test_replay_is_bounded_and_the_states_say_that_it_may_happen():
    model = AnyLM(random_lm("lfm2"))
    states = model.new_states()
    rng = random.Random(0)
    most = 0
    for _ in range(40):
        model.verify(states, tokens(rng.randrange(99), 6))
        states.evaluate()
        most = max(most, states.replayed)
        states.commit(rng.randint(1, 5))
    assert 6 < most <= 16


HYBRIDS = {"qwen3_5": {}, "qwen3_5_moe": EXPERTS, "qwen3_next": NEXT}


@pytest.mark.linux_bits
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_of_mlx_lm_is_rebuilt_on_the_same_arrays(kind, bits):
    config = HYBRIDS[kind] | {"num_hidden_layers": 4, "full_attention_interval": 2}
    twin = mlx_lm_twin(tiny(0, bits=bits, **config), **config)
    theirs = dict(flat(twin))
    mx.random.seed(7)
    ours = as_target(twin)
    drawn = mx.random.uniform()
    assert isinstance(ours, Model)
    found = {name if "language_model" in twin else name.removeprefix("language_model."): v for name, v in flat(ours)}
    assert found.keys() == theirs.keys() and all(found[name] is theirs[name] for name in found)
    mx.random.seed(7)
    assert mx.random.uniform().item() == drawn.item(), "the caller's random numbers moved"
    ids = tokens(1, 9)[0].tolist()
    want = by_steps(twin, twin.make_cache(), ids)
    assert same_bits(list(ours.verify(ours.new_states(), mx.array([ids], dtype=mx.int32)).logits[0]), want)


def test_what_is_no_language_model_is_refused_in_one_line():
    with pytest.raises(ValueError, match="Linear is no language model of specmlx or mlx-lm"):
        specmlx.generate(nn.Linear(2, 2), None, "x")


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_generate_takes_what_mlx_lm_loads_and_its_list_of_caches(name, tmp_path):
    tokenizer = small_tokenizer(tmp_path)
    if name == "llama":
        theirs = random_lm("llama", seed=1, vocab_size=282)
    else:
        sizes = {"num_hidden_layers": 4, "full_attention_interval": 2, "vocab_size": 282}
        theirs = mlx_lm_twin(tiny(1, **sizes), **sizes)
    prompt = tokenizer.encode("the quick brown fox")
    want = [int(token) for token, _ in generate_step(mx.array(prompt), theirs, max_tokens=24)]
    caches = stock_caches(theirs)
    _, first, last = collect(specmlx.stream_generate(theirs, tokenizer, prompt, 11, prompt_cache=caches))
    assert last.stats.mode == "plain"
    # mlx-lm's caches hold every token given: the next call's prompt is what comes after them.
    _, second, _ = collect(specmlx.stream_generate(theirs, tokenizer, want[11:12], 12, prompt_cache=caches))
    assert first == want[:11] and second == want[12:]


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])
def test_a_prompt_cache_keeps_windows_and_convolutions_too(name, tmp_path):
    theirs, tokenizer = random_lm(name, vocab_size=282), small_tokenizer(tmp_path)
    prompt, cache = tokens(1, 150)[0].tolist(), specmlx.PromptCache(keep_answers=True)
    _, given, _ = collect(specmlx.stream_generate(theirs, tokenizer, prompt, 9, prompt_cache=cache))
    longer = [*prompt, *given, 5]
    for _ in range(2):
        _, warm, last = collect(specmlx.stream_generate(theirs, tokenizer, longer, 9, prompt_cache=cache))
        assert last.cached_tokens >= 128
        assert warm == collect(specmlx.stream_generate(theirs, tokenizer, longer, 9))[1]


@pytest.mark.linux_bits
def test_a_directory_of_any_mlx_lm_model_loads_and_gives_mlx_lms_tokens(tmp_path):
    theirs = random_lm("llama", vocab_size=282)
    save_model(tmp_path, theirs)
    save_config({"model_type": "llama", **SIZES, "vocab_size": 282}, tmp_path / "config.json")
    small_tokenizer(tmp_path)
    model, tokenizer = specmlx.load(str(tmp_path))
    assert isinstance(model, AnyLM) and model.config.hidden_size == 64
    prompt = tokenizer.encode("the lazy dog")
    want = [int(token) for token, _ in generate_step(mx.array(prompt), theirs, max_tokens=20)]
    assert collect(specmlx.stream_generate(model, tokenizer, prompt, 20))[1] == want
    cache = specmlx.make_prompt_cache(model)
    collect(specmlx.stream_generate(model, tokenizer, prompt, 5, prompt_cache=cache))
    assert collect(specmlx.stream_generate(model, tokenizer, want[5:6], 5, prompt_cache=cache))[1] == want[6:11]
    with pytest.raises(ValueError, match="only a hybrid's conversation can be saved"):
        specmlx.save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "no_such_model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no_such_model"):
        specmlx.load(str(tmp_path))


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", ["llama", "lfm2"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_block_drafters_run_on_the_taps_embedding_and_head_of_any_model(name, kind):
    model = AnyLM(random_lm(name, seed=3))
    dspark = dict(markov_rank=8, enable_confidence_head=False, projector_type="dspark")
    config = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        **{key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
        **{key: SIZES[key] for key in ("num_key_value_heads", "vocab_size", "rope_theta")},
        "num_hidden_layers": 2,
        "block_size": 5,
        "dflash_config": dict(target_layer_ids=[0, 2], mask_token_id=95, **(dspark if kind == "dspark" else {})),
    }
    assert check_pair(model.config, config) == []
    drafter = build(DrafterConfig.from_dict(config), model)
    prompt = tokens(5, 30)[0].tolist()
    theirs = [int(token) for token, _ in generate_step(mx.array(prompt), model.lm, max_tokens=30)]
    stats = Stats()
    found = generate_tokens(
        model, Conversation(model.new_states()), prompt, Policy(), drafter, max_tokens=30, stats=stats
    )
    assert [t.id for t in found] == theirs and stats.proposed > 30

    # What the drafter saw of the prompt are the outputs of the two layers, by a pass of the model's own.
    features = mx.concatenate([f for _, f in model.prefill(model.new_states(), mx.array([prompt]), (0, 2), 16)], axis=1)
    whole = model.verify(model.new_states(), mx.array([prompt], dtype=mx.int32), (0, 2)).features
    assert mx.allclose(features, whole, rtol=0, atol=1e-5).item()


def test_a_cache_that_is_written_in_place_and_can_not_be_trimmed_comes_back_from_its_snapshot():
    states = CacheStates([RotatingKVCache(max_size=8, keep=2)])
    cache = states.caches[0]

    def rows(seed: int, n: int) -> mx.array:
        return mx.random.normal((1, 2, n, 4), key=mx.random.key(seed))

    for seed in range(12):
        states.begin(tokens(seed, 1))
        held = cache.update_and_fetch(rows(seed, 1), rows(seed, 1))
        states.commit(1)
    before = [mx.array(x) + 0 for x in held]
    mx.eval(before)
    for seed in (20, 21):
        ids = states.begin(tokens(seed, 1))
        cache.update_and_fetch(rows(seed, ids.shape[1]), rows(seed, ids.shape[1]))
        states.evaluate()
        states.abort()
    states.begin(mx.zeros((1, 0), dtype=mx.int32))
    assert cache.offset == 12 == states.length
    assert same_bits(list(cache.keys_and_values()), before)


def test_a_recurrent_models_conversation_goes_from_thread_to_thread():
    model = AnyLM(mlx_lm_twin(tiny(3)))
    conversation, plain = Conversation(model.new_states()), Conversation(model.new_states())
    prompts, turns, text = ([5, 6, 7], [8], [9, 4]), [], []
    by = ScriptedDrafter([], right_with(1.0), 4, tap_ids=())

    def turn(prompt):
        # It is left within a round, whose rows then come back from a snapshot.
        given = generate_tokens(model, conversation, prompt, Policy(), by)
        turns.append([token.id for token in islice(given, 7)])

    for prompt in prompts:
        want = [token.id for token in generate_tokens(model, plain, prompt, Policy(), max_tokens=7)]
        text += [*prompt, *want]
        by.text = [*text, *[0] * 5]
        thread = threading.Thread(target=turn, args=(prompt,))
        thread.start()
        thread.join()
        assert turns[-1:] == [want]
