"""Reuse of prompts: warm runs against cold ones, on models whose states forget slowly."""

import random
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rig import SMALL, collect, mlx_lm_twin, prefilled, same_bits, small_tokenizer, tiny, tokens
from scripted import ScriptedDrafter, right_with

import specmlx
from specmlx import PromptCache
from specmlx.generation import stream_generate
from specmlx.state.conversation import Conversation
from specmlx.state.prefix import restore, spans, take
from specmlx.state.store import CHECKPOINT
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


def ids(seed: int, n: int) -> list[int]:
    return tokens(seed, n, 282)[0].tolist()


def run(model, tokenizer, prompt, cache=None, n=6, drafter=None, **options):
    """Ids and the last response; without a cache, a cold run."""
    stream = stream_generate(model, tokenizer, prompt, n, draft_model=drafter, prompt_cache=cache, **options)
    _, given, last = collect(stream)
    return given, last


def everything(snapshot) -> list[mx.array]:
    """All that a snapshot holds of the target, keys and values in one piece."""
    pieces = snapshot.piece.chain()
    kvs = [mx.concatenate([piece.kvs[i][part] for piece in pieces], axis=2) for i in pieces[0].kvs for part in (0, 1)]
    return kvs + [x for layer in snapshot.recurrent.values() for x in layer[:2]]


def after(cache, text: list[int]):
    """The cache's snapshot of just these ids."""
    return next(s for _, s, _ in cache.snapshots() if s.ids.tolist() == text)


def cold_and_warm(model, tokenizer, prompt, cache, drafter=None, cold_drafter=None, n=6):
    """Runs a prompt without and with what the cache holds; both end states, and the warm run's last response."""
    fresh = PromptCache()
    cold, _ = run(model, tokenizer, prompt, fresh, n, cold_drafter or drafter)
    warm, last = run(model, tokenizer, prompt, cache, n, drafter)
    assert warm == cold
    text = prompt + cold[:-1]
    return everything(after(fresh, text)), everything(after(cache, text)), last


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


def test_of_two_snapshots_of_the_same_ids_the_exact_one_stays(fp32):
    prompt = tokens(4, 128, 282)

    def snapshot(exact: bool, name: str):
        conversation = Conversation(prefilled(fp32, prompt), prompt[0].tolist())
        conversation.exact = 128 if exact else 0
        return take(conversation, None, name, {"x": mx.zeros(8)})

    for order in ((False, True), (True, False)):
        cache = PromptCache()
        for exact in order:
            kept = cache.put("m", snapshot(exact, str(exact)))
        assert len(cache) == 1 and kept.exact and sorted(kept.drafts) == ["False", "True"]
        assert cache.nbytes == kept.nbytes + kept.piece.nbytes
    other = PromptCache()
    other.put("m", snapshot(False, ""))
    with other.find("another model", prompt[0].tolist() + [1]) as found:
        assert found is None


def test_snapshots_of_a_conversation_share_their_rows(fp32, tokenizer):
    cache, prompt, longest = PromptCache(), [], 0
    for turn in range(4):
        prompt = prompt + ids(turn, 90)
        prompt += run(fp32, tokenizer, prompt, cache)[0]
        longest = max(longest, len(prompt))
    held = [snapshot for _, snapshot, _ in cache.snapshots()]
    row = 2 * 2 * 2 * 32 * 4
    state = 2 * (4 * 32 * 32 * 4 + 3 * 256 * 4)
    pieces = sum(piece.nbytes for piece in {p for s in held for p in s.piece.chain()})
    assert len(held) == 6 and pieces <= longest * (row + 4)
    assert cache.nbytes == pieces + len(held) * state


def test_the_budget_holds_and_what_is_in_use_stays(fp32, tokenizer):
    probe = PromptCache()
    run(fp32, tokenizer, ids(0, 130), probe)
    cache = PromptCache(max_bytes=3 * probe.nbytes)
    mx.clear_cache()
    for seed in range(12):
        run(fp32, tokenizer, ids(seed, 130), cache)
        assert cache.nbytes <= cache.max_bytes
    counters = cache.counters
    assert counters.misses == 12 and counters.evictions > 10 and counters.bytes == cache.nbytes
    _, last = run(fp32, tokenizer, ids(11, 130), cache)
    assert last.cached_tokens == 128
    with cache.find(fp32.fingerprint, ids(11, 130)) as pinned:
        cache.max_bytes = 0
        run(fp32, tokenizer, ids(50, 130), cache)
        assert [snapshot.ids.tolist() for _, snapshot, _ in cache.snapshots()] == [pinned.ids.tolist()]
    assert len(cache) == 0 and cache.nbytes == 0


def test_memory_is_flat_over_thirty_requests(fp32, tokenizer):
    cache, used = PromptCache(max_bytes=1 << 20), []
    for seed in range(30):
        run(fp32, tokenizer, ids(seed % 10, 130), cache, n=2)
        mx.clear_cache()
        used.append(mx.get_active_memory())
    assert max(used[15:]) - min(used[15:]) < 1 << 18


def test_a_prefill_shows_the_drafter_what_it_will_still_see():
    assert [*spans(0, 10_000, [], None)] == [(10_000, True)]
    assert [*spans(0, 10_000, [], 100)] == [(9856, False), (10_000, True)]
    assert [*spans(100, 10_000, [4096], 100)] == [(3968, False), (4096, True), (9856, False), (10_000, True)]
    assert [*spans(0, 150, [64, 128], 4096)] == [(64, True), (128, True), (150, True)]
    assert [*spans(70, 70, [64], 9)] == []


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", ["demo/dflash", "demo/dspark"])
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
    # Without its context the drafter would know the question from its last few tokens only.
    for other in (None, "demo/dflash" if name == "demo/dspark" else "demo/dspark"):
        cache = PromptCache()
        other = other and specmlx.load_drafter(other, model)
        list(stream_generate(model, tokenizer, prompt, 2, draft_model=other, prompt_cache=cache))
        served = list(stream_generate(model, tokenizer, prompt, 40, prompt_cache=cache))
        assert [r.token for r in served] == [r.token for r in cold] and served[-1].cached_tokens > 64
        assert served[-1].stats.mode == "speculative"


def test_what_a_failed_request_began_with_still_serves(fp32, tokenizer):
    prompt, cache = ids(1, 200), PromptCache(checkpoint_every=64)
    want, _ = run(fp32, tokenizer, prompt, cache)

    def stop(done, total):
        assert total == 200
        if done > 192:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(fp32, tokenizer, prompt, cache, prompt_progress_callback=stop)
    assert run(fp32, tokenizer, prompt, cache)[0] == want
    assert np.array_equal(after(cache, prompt[:64]).ids, prompt[:64])


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


def test_threads_share_a_cache(fp32, tokenizer):
    shared = ids(7, 130)
    prompts = [shared + ids(seed, 40) for seed in range(4)]
    want = [run(fp32, tokenizer, prompt)[0] for prompt in prompts]
    probe = PromptCache()
    run(fp32, tokenizer, prompts[0], probe)
    cache = PromptCache(max_bytes=2 * probe.nbytes)

    def ask(n: int) -> tuple[list[int], int]:
        found = list(stream_generate(fp32, tokenizer, prompts[n % 4], 6, prompt_cache=cache))
        return [r.token for r in found], found[0].cached_tokens

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(24)))
    assert [given for given, _ in found] == want * 6
    counters = cache.counters
    assert (counters.hits, counters.misses) == (sum(c > 0 for _, c in found), sum(c == 0 for _, c in found))
    assert counters.reused_tokens == sum(cached for _, cached in found) > 0
    held = [snapshot for _, snapshot, _ in cache.snapshots()]
    pieces = {piece for snapshot in held for piece in snapshot.piece.chain()}
    assert cache.nbytes == sum(x.nbytes for x in [*held, *pieces]) <= cache.max_bytes


def test_a_snapshot_is_left_where_two_prompts_part(fp32, tokenizer):
    prompts = [ids(1, 150) + ids(seed, 80) for seed in (2, 3, 4)]
    cache, cached = PromptCache(keep_answers=False), []
    for prompt in prompts:
        cached.append(run(fp32, tokenizer, prompt, cache, n=1)[1].cached_tokens)
    assert cached == [0, 0, 128]
    assert sorted(s.length for _, s, _ in cache.snapshots()) == [128, 192, 192, 192]
    assert [*cache.snapshots()[-1][1].ids] == prompts[-1][:192]


def test_room_is_made_among_checkpoints_first_and_by_last_use_within_a_class(fp32):
    def snapshot(seed: int):
        prompt = tokens(seed, 64, 282)
        conversation = Conversation(prefilled(fp32, prompt), prompt[0].tolist())
        conversation.exact = 64
        return take(conversation)

    held = [snapshot(seed) for seed in range(5)]
    size = held[0].nbytes + held[0].piece.nbytes
    cache = PromptCache(max_bytes=3 * size + size // 2)

    def left() -> list[int]:
        return [next(n for n, x in enumerate(held) if x is snapshot) for _, snapshot, _ in cache.snapshots()]

    cache.put("m", held[0])
    cache.put("m", held[1])
    cache.put("m", held[2], CHECKPOINT)
    with cache.find("m", [*held[0].ids, 5]) as found:
        assert found is held[0]
    cache.put("m", held[3])
    assert left() == [1, 0, 3]
    cache.put("m", held[4])
    assert left() == [0, 3, 4]
    cache.demote("m", held[4])
    cache.put("m", held[1])
    assert left() == [0, 3, 1]
    assert cache.counters.evictions == 3 and cache.counters.bytes == 3 * size
