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
from specmlx.cli.dialogue import Dialogue
from specmlx.state.conversation import Conversation
from specmlx.state.prefix import restore, take

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


def rounding(model) -> float:
    """How far states may be from a cold run's, as a share of a layer's largest value (or of 1, if that is less)."""
    return 0.02 if model.dtype == mx.bfloat16 else 1e-5


def off(cold: list[mx.array], warm: list[mx.array]) -> float:
    largest = (max(1.0, mx.abs(x.astype(mx.float32)).max().item()) for x in cold)
    return max(mx.abs(a - b).max().item() / most for a, b, most in zip(cold, warm, largest, strict=True))


@pytest.mark.linux_bits
def test_a_prompt_reused_at_grid_points_equals_a_cold_run_bit_for_bit(pair):
    prompt = ids(1, 200)
    edited = prompt[:120] + ids(2, 80)
    cache = PromptCache(checkpoint_every=64, keep_answers=False)
    run(*pair, prompt, cache, n=1)
    for asked, cached in ((prompt, 192), ([*prompt, 5], 192), (prompt[:192], 128), (edited, 64)):
        cold, warm, last = cold_and_warm(*pair, asked, cache)
        assert last.cached_tokens == cached and last.prompt_tokens == len(asked)
        assert same_bits(cold, warm)


@pytest.mark.linux_bits
def test_every_split_leaves_the_state_of_a_cold_run(pair, request):
    # Across a grid point where that takes least time, else within a block.
    model, n = pair[0], 70 if request.node.callspec.id == "random fp32" else 20
    prompt = tokens(4, n, 282)
    whole = everything(take(Conversation(prefilled(model, prompt), prompt[0].tolist())))
    for k in range(1, n):
        first = Conversation(prefilled(model, prompt[:, :k]), prompt[0, :k].tolist())
        first.exact = k
        snapshot = take(first)
        assert snapshot.exact == (k == 64)
        conversation = restore(snapshot, model.new_states(), 128)
        for _ in model.prefill(conversation.states, prompt[:, k:]):
            pass
        conversation.processed = prompt[0].tolist()
        found = everything(take(conversation, snapshot.piece))
        assert same_bits(whole, found) if snapshot.exact else off(whole, found) < rounding(model)


@pytest.mark.linux_bits
def test_random_splits_widths_and_acceptances_change_no_bit(pair):
    rng, counts = random.Random(0), set()
    for prompt in (ids(1, 97), ids(2, 140)):
        n, fresh = len(prompt), PromptCache(keep_answers=True)
        given, _ = run(*pair, prompt, fresh, n=12)
        text = prompt + given
        cold = everything(after(fresh, text[:-1]))
        for _ in range(4):
            k, cache = rng.randrange(65, n), PromptCache(keep_answers=False)
            run(*pair, [*prompt[:k], 7], cache, n=1)
            cache.keep_answers = True
            right, width = right_with(rng.random(), rng.randrange(9)), rng.randrange(1, 8)
            scripted = ScriptedDrafter(text, right, width, tap_ids=())
            warm, last = run(*pair, prompt, cache, 12, scripted, num_draft_tokens="full")
            assert last.cached_tokens == k // 64 * 64 and warm == given
            assert same_bits(cold, everything(after(cache, text[:-1])))
            counts.add(tuple(last.stats.accept_histogram))
    assert len(counts) > 4, "the rounds accept alike: a weak test"


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
    held = [(s.length, s.exact) for _, s, _ in cache.snapshots()]
    stable = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert held == [(stable // 64 * 64, True)]
    cold, warm, last = cold_and_warm(model, tokenizer, second, cache)
    assert last.cached_tokens == stable // 64 * 64 and same_bits(cold, warm)


def test_a_reused_answer_equals_a_cold_run_by_rounding(pair):
    prompt, cache = ids(6, 150), PromptCache()
    answer, _ = run(*pair, prompt, cache, n=30)
    longer = [*prompt, *answer, *ids(6, 90)]
    cold, warm, last = cold_and_warm(*pair, longer, cache)
    assert last.cached_tokens == 150 + len(answer) - 1 > 170
    assert not after(cache, longer[: last.cached_tokens]).exact and not after(cache, longer[:256]).exact
    assert off(cold, warm) < rounding(pair[0])
    exact = PromptCache(exact=True)
    run(*pair, prompt, exact, n=30)
    _, last = run(*pair, longer, exact)
    assert last.cached_tokens == 128 and all(s.exact for _, s, _ in exact.snapshots())


@pytest.mark.linux_bits
def test_six_turns_of_the_demo_in_4_bits_say_the_same_on_reused_answers():
    # In float32: tests/test_chat.py, which counts the tokens that run as well. In bfloat16 a tie may fall otherwise.
    model, tokenizer = demo("4-bit")
    model.attach(specmlx.load_drafter("demo/dspark", model))
    warm, cold = (Dialogue(model, tokenizer, max_tokens=40, num_draft_tokens="full") for _ in range(2))
    cold.prompt_cache = PromptCache(max_bytes=0)
    for turn in range(6):
        question = f"Can you count from {10 + turn} up to {22 + turn}?"
        given = [[response.token for response in talk.ask(question)] for talk in (warm, cold)]
        assert given[0] == given[1] and len(given[0]) > 8
    assert warm.prompt_cache.counters.hits == 5 and any(not s.exact for _, s, _ in warm.prompt_cache.snapshots())
