"""Reuse of prompts: warm runs against cold ones, on models whose states forget slowly."""

import random

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from reuse_kit import after, cold_and_warm, everything, ids, run
from rig import SMALL, mlx_lm_twin, prefilled, same_bits, small_tokenizer, tiny, tokens
from scripted import ScriptedDrafter, right_with

import specmlx
from specmlx import PromptCache
from specmlx.generation import stream_generate
from specmlx.state.conversation import Conversation
from specmlx.state.prefix import restore, spans, take
from specmlx.targets.any_lm import AnyLM

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content.split('</think>')[-1]"
    " if m.role == 'assistant' else m.content) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
VARIANTS = {"fp32": {}, "bf16": dict(dtype=mx.bfloat16), "4-bit": dict(bits=4)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("chatting"))._tokenizer
    tokenizer.chat_template = CHATML
    return TokenizerWrapper(tokenizer)


@pytest.fixture(scope="module", params=VARIANTS)
def model(request):
    return tiny(3, **SMALL, **VARIANTS[request.param])


@pytest.fixture(scope="module")
def fp32():
    return tiny(3, **SMALL)


@pytest.mark.linux_bits
def test_a_prompt_reused_at_grid_points_equals_a_cold_run_bit_for_bit(model, tokenizer):
    prompt = ids(1, 200)
    edited = prompt[:120] + ids(2, 80)
    cache = PromptCache(checkpoint_every=64, keep_answers=False)
    run(model, tokenizer, prompt, cache, n=1)
    cache.keep_answers = True
    for asked, cached in ((prompt, 192), ([*prompt, 5], 192), (prompt[:192], 128), (edited, 64), ([*edited, 5], 192)):
        cold, warm, last = cold_and_warm(model, tokenizer, asked, cache)
        assert last.cached_tokens == cached and last.prompt_tokens == len(asked)
        assert same_bits(cold, warm)


@pytest.mark.linux_bits
def test_every_split_leaves_the_state_of_a_cold_run(fp32):
    prompt = tokens(4, 100, 282)
    whole = take(Conversation(prefilled(fp32, prompt), prompt[0].tolist()))
    for k in range(1, 100):
        first = Conversation(prefilled(fp32, prompt[:, :k]), prompt[0, :k].tolist())
        first.exact = k
        snapshot = take(first)
        assert snapshot.exact == (k % 64 == 0)
        conversation = restore(snapshot, fp32.new_states(), 128)
        for _ in fp32.prefill(conversation.states, prompt[:, k:]):
            pass
        conversation.processed = prompt[0].tolist()
        parts = zip(everything(take(conversation, snapshot.piece)), everything(whole), strict=True)
        for a, b in parts:
            assert mx.array_equal(a, b).item() if snapshot.exact else mx.allclose(a, b, rtol=0, atol=1e-5).item()


@pytest.mark.linux_bits
def test_random_splits_widths_and_acceptances_change_no_bit(model, tokenizer):
    rng = random.Random(0)
    for _ in range(7):
        prompt, k = ids(rng.randrange(99), rng.randrange(80, 200)), rng.randrange(65, 200)
        cache = PromptCache(keep_answers=False)
        run(model, tokenizer, [*prompt[:k], 7], cache, n=1)
        cache.keep_answers = True
        text = prompt + run(model, tokenizer, prompt, n=12)[0]
        right, width = right_with(rng.random(), rng.randrange(9)), rng.randrange(1, 8)
        scripts = [ScriptedDrafter(text, right, width, tap_ids=()) for _ in range(2)]
        cold, warm, last = cold_and_warm(model, tokenizer, prompt, cache, *scripts, n=12)
        assert last.cached_tokens == min(k, len(prompt)) // 64 * 64
        assert same_bits(cold, warm)


def test_a_template_that_drops_thoughts_reuses_all_but_the_answer(fp32, chatting):
    messages = [dict(role="system", content="the lazy dog " * 20), dict(role="user", content="jumps over " * 20)]
    first = chatting.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    cache = PromptCache()
    run(fp32, chatting, first, cache)
    messages += [dict(role="assistant", content="a fox"), dict(role="user", content="and the cat " * 9)]
    second = chatting.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    _, last = run(fp32, chatting, second, cache)
    stable = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert 0 <= stable - last.cached_tokens < 64
    assert [s.exact for _, s, _ in cache.snapshots()] == [True, True]


def test_thoughts_between_tool_calls_are_not_counted_on(fp32, chatting):
    turns = [("user", "the fox " * 30), ("assistant", "brown"), ("user", "over " * 30)]
    turns += [("assistant", "jumps " * 40), ("tool", "quick " * 10)]
    chat = [dict(role=role, content=content) for role, content in turns]
    prompt = chatting.apply_chat_template(chat, tokenize=True, add_generation_prompt=True)
    asked = chatting.apply_chat_template(chat[:3], tokenize=True, add_generation_prompt=False)
    cache = PromptCache()
    run(fp32, chatting, prompt, cache)
    lengths = [s.length for _, s, _ in cache.snapshots()]
    assert lengths == [len(asked) // 64 * 64, (len(prompt) - 2) // 64 * 64]


@pytest.mark.parametrize(("variant", "rounding"), [("fp32", 1e-5), ("4-bit", 1e-5), ("bf16", 1e-2)])
def test_a_reused_answer_equals_a_cold_run_by_rounding(tokenizer, variant, rounding):
    model = tiny(3, **SMALL, **VARIANTS[variant])
    prompt, cache = ids(5, 150), PromptCache()
    answer, _ = run(model, tokenizer, prompt, cache, n=30)
    prompt = [*prompt, *answer, *ids(6, 90)]
    cold, warm, last = cold_and_warm(model, tokenizer, prompt, cache)
    assert last.cached_tokens == 150 + 29
    assert not after(cache, prompt[:179]).exact and not after(cache, prompt[:256]).exact
    assert max(mx.abs(a - b).max().item() for a, b in zip(cold, warm, strict=True)) < rounding
    exact = PromptCache(exact=True)
    run(model, tokenizer, ids(5, 150), exact, n=30)
    _, last = run(model, tokenizer, prompt, exact)
    assert last.cached_tokens == 128 and all(s.exact for _, s, _ in exact.snapshots())


def test_a_prefill_shows_the_drafter_what_it_will_still_see():
    assert [*spans(0, 10_000, [], None)] == [(10_000, True)]
    assert [*spans(0, 10_000, [], 100)] == [(9856, False), (10_000, True)]
    assert [*spans(100, 10_000, [4096], 100)] == [(3968, False), (4096, True), (9856, False), (10_000, True)]
    assert [*spans(0, 150, [64, 128], 4096)] == [(64, True), (128, True), (150, True)]
    assert [*spans(70, 70, [64], 9)] == []


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", ["demo/dflash", "demo/dflash2", "demo/dspark", "demo/mtp"])
def test_target_and_drafter_begin_from_one_snapshot(name):
    model, tokenizer = specmlx.load(draft_model=name)
    options = dict(num_draft_tokens=model.draft_model.max_width)
    few_shot = "Can you count from 62 up to 73? " * 20
    prompt = tokenizer.encode(f"<|im_start|>user\n{few_shot}<|im_end|>\n<|im_start|>assistant\n")
    cache = PromptCache(keep_answers=False)
    list(stream_generate(model, tokenizer, prompt, 2, prompt_cache=cache))
    caches = [PromptCache(keep_answers=True), cache]
    cache.keep_answers = True
    cold, warm = (list(stream_generate(model, tokenizer, prompt, 40, prompt_cache=c, **options)) for c in caches)
    text = prompt + [r.token for r in cold[:-1]]
    assert same_bits(*(everything(after(c, text)) for c in caches))
    assert [r.token for r in warm] == [r.token for r in cold] and warm[-1].cached_tokens > 64
    assert warm[-1].stats.accept_histogram == cold[-1].stats.accept_histogram
    assert warm[-1].stats.accepted > 10


@pytest.mark.linux_bits
@pytest.mark.parametrize("other", [None, "demo/dflash"])
def test_a_snapshot_made_with_another_drafter_or_none_serves_the_target(other):
    model, tokenizer = specmlx.load(draft_model="demo/dspark")
    prompt = tokenizer.encode("Can you count from 62 up to 73? " * 20)
    cold = [r.token for r in stream_generate(model, tokenizer, prompt, 40)]
    other, cache = other and specmlx.load_drafter(other, model), PromptCache()
    list(stream_generate(model, tokenizer, prompt, 2, draft_model=other, prompt_cache=cache))
    served = list(stream_generate(model, tokenizer, prompt, 40, num_draft_tokens=8, prompt_cache=cache))
    assert [r.token for r in served] == cold and served[-1].cached_tokens > 64
    assert served[-1].stats.mode == "speculative"


def test_a_model_that_mlx_lm_runs_reuses_prompts_too(fp32, tokenizer):
    twin = AnyLM(mlx_lm_twin(fp32, **SMALL))
    prompt, cache = ids(1, 150), PromptCache()
    answer, _ = run(twin, tokenizer, prompt, cache)
    text = [*prompt, *answer, 5]
    want, _ = run(twin, tokenizer, text)
    for _ in range(2):
        scripted = ScriptedDrafter([*text, *want], right_with(0.6), 3, tap_ids=())
        given, last = run(twin, tokenizer, text, cache, drafter=scripted)
        assert given == want and last.cached_tokens == 155
    assert run(fp32, tokenizer, text, cache)[1].cached_tokens == 0


def test_a_snapshot_is_left_where_two_prompts_part(fp32, tokenizer):
    prompts = [ids(1, 150) + ids(seed, 80) for seed in (2, 3, 4)]
    cache, cached = PromptCache(keep_answers=False), []
    for prompt in prompts:
        cached.append(run(fp32, tokenizer, prompt, cache, n=1)[1].cached_tokens)
    assert cached == [0, 0, 128]
    assert sorted(s.length for _, s, _ in cache.snapshots()) == [128, 192, 192, 192]
    assert [*cache.snapshots()[-1][1].ids] == prompts[-1][:192]
