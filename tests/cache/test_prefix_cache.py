"""Reuse of prompts: warm runs against cold ones, on models whose states forget slowly."""

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from reuse_kit import CHATML, after, everything, ids, run
from rig import SMALL, mlx_lm_twin, same_bits, small_tokenizer, tiny
from scripted import ScriptedDrafter, right_with

import specmlx
from specmlx import PromptCache
from specmlx.cache.snapshots import prefill_chunks
from specmlx.generation.generate import stream_generate
from specmlx.targets.any_lm import AnyLM


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("chatting"))._tokenizer
    tokenizer.chat_template = CHATML
    return TokenizerWrapper(tokenizer)


@pytest.fixture(scope="module")
def fp32():
    return tiny(3, **SMALL)


def test_thoughts_between_tool_calls_are_not_counted_on(fp32, chatting):
    turns = [("user", "the fox " * 30), ("assistant", "brown"), ("user", "over " * 30)]
    turns += [("assistant", "jumps " * 40), ("tool", "quick " * 10)]
    chat = [dict(role=role, content=content) for role, content in turns]
    prompt = chatting.apply_chat_template(chat, tokenize=True, add_generation_prompt=True)
    asked = chatting.apply_chat_template(chat[:3], tokenize=True, add_generation_prompt=False)
    header = len(chatting.encode("<|im_start|>assistant\n"))
    cache = PromptCache()
    run(fp32, chatting, prompt, cache)
    lengths = [s.length for _, s, _ in cache.snapshots()]
    assert lengths == [len(asked) + header - 1, len(prompt) - len(chatting.encode("<think>\n")) - 1]


def test_a_prefill_shows_the_drafter_what_it_will_still_see():
    assert [*prefill_chunks(0, 10_000, [], None)] == [(10_000, True)]
    assert [*prefill_chunks(0, 10_000, [], 100)] == [(9900, False), (10_000, True)]
    assert [*prefill_chunks(100, 10_000, [4096], 100)] == [(3996, False), (4096, True), (9900, False), (10_000, True)]
    assert [*prefill_chunks(0, 150, [64, 128], 4096)] == [(64, True), (128, True), (150, True)]
    assert [*prefill_chunks(70, 70, [64], 9)] == []


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
        given, last = run(twin, tokenizer, text, cache, drafter=scripted, num_draft_tokens="full")
        assert given == want and last.cached_tokens == 155
    assert run(fp32, tokenizer, text, cache)[1].cached_tokens == 0


def test_a_snapshot_is_left_where_two_prompts_part(fp32, tokenizer):
    prompts = [ids(1, 150) + ids(seed, 80) for seed in (2, 3, 4)]
    cache, cached = PromptCache(keep_answers=False), []
    for prompt in prompts:
        cached.append(run(fp32, tokenizer, prompt, cache, n=1)[1].cached_tokens)
    assert cached == [0, 0, 150]
    assert sorted(s.length for _, s, _ in cache.snapshots()) == [150, 229, 229, 229]
    assert [*cache.snapshots()[-1][1].ids] == prompts[-1][:229]
