"""What reuse gives against a cold run: on the demo pair and on random hybrids that forget slowly, in three formats."""

import random
from copy import deepcopy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from reuse_kit import CHATML, after, cold_and_warm, everything, ids, run
from rig import SMALL, prefilled, same_bits, small_tokenizer, tiny, tokens
from scripted import ScriptedDrafter, right_with

import specmlx
from specmlx import PromptCache
from specmlx.cache.conversation import Conversation
from specmlx.cache.snapshots import restore, take
from specmlx.cli.dialogue import Dialogue

FORMATS = {"fp32": mx.float32, "bf16": mx.bfloat16, "4-bit": mx.float32}


def demo(name: str):
    model, tokenizer = specmlx.load(draft_model=None, dtype=FORMATS[name])
    if name == "4-bit":
        nn.quantize(model, group_size=32, bits=4)
        mx.eval(model.parameters())
    return model, tokenizer


@pytest.fixture(scope="module", params=[f"{kind} {name}" for kind in ("random", "demo") for name in FORMATS])
def pair(request, tmp_path_factory):
    """A model and its tokenizer."""
    kind, name = request.param.split()
    if kind == "demo":
        return demo(name)
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return tiny(3, FORMATS[name], 4 if name == "4-bit" else None, **SMALL), tokenizer


@pytest.mark.linux_bits
def test_a_reused_prompt_equals_a_cold_run_bit_for_bit(pair):
    prompt = ids(1, 200)
    edited = prompt[:120] + ids(2, 80)
    cache = PromptCache(checkpoint_every=64, keep_answers=False)
    run(*pair, prompt, cache, n=1)
    for asked, cached in ((prompt, 199), (prompt[:199], 128), (edited, 64)):
        cold, warm, last = cold_and_warm(*pair, asked, cache)
        assert last.cached_tokens == cached and last.prompt_tokens == len(asked)
        assert same_bits(cold, warm)


@pytest.mark.linux_bits
def test_every_split_leaves_the_state_of_a_cold_run(pair, request):
    model, n = pair[0], 70 if request.node.callspec.id == "random fp32" else 20
    prompt = tokens(4, n, 282)
    whole = everything(take(Conversation(prefilled(model, prompt), prompt[0].tolist())))
    for k in range(1, n):
        first = Conversation(prefilled(model, prompt[:, :k]), prompt[0, :k].tolist())
        snapshot = take(first)
        conversation = restore(snapshot, model.new_states(), 128)
        for _ in model.prefill(conversation.states, prompt[:, k:]):
            pass
        conversation.processed = prompt[0].tolist()
        assert same_bits(whole, everything(take(conversation, snapshot.piece))), k


@pytest.mark.linux_bits
def test_random_splits_widths_and_acceptances_change_no_bit(pair):
    rng, counts = random.Random(0), set()
    for prompt in (ids(1, 97), ids(2, 30)):
        n, fresh = len(prompt), PromptCache(keep_answers=True)
        given, _ = run(*pair, prompt, fresh, n=12)
        text = prompt + given
        cold = everything(after(fresh, text[:-1]))
        for _ in range(4):
            k, cache = rng.randrange(1, n), PromptCache(keep_answers=True)
            run(*pair, prompt[:k], cache, n=1)
            right, width = right_with(rng.random(), rng.randrange(9)), rng.randrange(1, 8)
            scripted = ScriptedDrafter(text, right, width, tap_ids=())
            warm, last = run(*pair, prompt, cache, 12, scripted, num_draft_tokens="full")
            assert last.cached_tokens == k and warm == given
            assert same_bits(cold, everything(after(cache, text[:-1])))
            counts.add(tuple(last.stats.accept_histogram))
    assert len(counts) > 4, "the rounds accept alike: a weak test"


@pytest.mark.linux_bits
def test_six_turns_with_kept_answers_and_files_equal_six_cold_runs(pair, tmp_path):
    prompt, cache = [], PromptCache(keep_answers=True)
    for turn in range(6):
        prompt = prompt + ids(turn, 15)
        cold, warm, last = cold_and_warm(*pair, prompt, cache)
        assert last.cached_tokens == max(len(prompt) - 16, 0) and same_bits(cold, warm)
        prompt = cache.snapshots()[-1][1].ids.tolist() + [last.token]
        if turn % 2:
            cache.save(tmp_path / "prompts")
            cache = PromptCache(keep_answers=True)
            cache.load(tmp_path / "prompts")


@pytest.mark.linux_bits
def test_a_template_that_drops_thoughts_reuses_all_but_the_answer(pair):
    model, tokenizer = pair[0], deepcopy(pair[1]._tokenizer)
    tokenizer.chat_template = CHATML
    tokenizer = TokenizerWrapper(tokenizer)
    messages = [dict(role="system", content="the lazy dog " * 20), dict(role="user", content="jumps over " * 20)]
    first = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    cache = PromptCache()
    run(model, tokenizer, first, cache)
    messages += [dict(role="assistant", content="a fox"), dict(role="user", content="and the cat " * 9)]
    second = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    stable = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    system = tokenizer.apply_chat_template(messages[:1], tokenize=False) + "<|im_start|>user\n"
    shared = len(tokenizer.encode(system)) - 1
    # The last token of either may be merged with what follows.
    assert [s.length for _, s, _ in cache.snapshots()] == [shared, stable - 1]
    cold, warm, last = cold_and_warm(model, tokenizer, second, cache)
    assert last.cached_tokens == stable - 1 and same_bits(cold, warm)
    other = [messages[0], dict(role="user", content="lazy " * 9)]
    other = tokenizer.apply_chat_template(other, tokenize=True, add_generation_prompt=True)
    cold, warm, last = cold_and_warm(model, tokenizer, other, cache)
    assert last.cached_tokens == shared and same_bits(cold, warm)


@pytest.mark.linux_bits
def test_six_turns_of_the_demo_in_bf16_say_the_same_on_reused_answers():
    # In float32: tests/cli/test_chat.py, which counts the tokens that run as well.
    model, tokenizer = demo("bf16")
    model.attach(specmlx.load_drafter("demo/dspark", model))
    warm, cold = (Dialogue(model, tokenizer, max_tokens=40, num_draft_tokens="full") for _ in range(2))
    cold.prompt_cache = PromptCache(max_bytes=0)
    for turn in range(6):
        question = f"Can you count from {10 + turn} up to {22 + turn}?"
        given = [[response.token for response in talk.ask(question)] for talk in (warm, cold)]
        assert given[0] == given[1] and len(given[0]) > 8
    assert warm.prompt_cache.counters.hits == 5
