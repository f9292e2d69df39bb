"""The store of snapshots: what it shares, what it drops first, and several threads at once."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from reuse_kit import after, ids, run
from rig import SMALL, prefilled, small_tokenizer, tiny, tokens

from specmlx import PromptCache
from specmlx.cache.conversation import Conversation
from specmlx.cache.snapshots import take
from specmlx.cache.store import CHECKPOINT
from specmlx.generation.generate import stream_generate


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def fp32():
    return tiny(3, **SMALL)


def test_of_two_snapshots_of_the_same_ids_one_stays_with_the_drafts_of_both(fp32):
    prompt, cache = tokens(4, 128, 282), PromptCache()
    conversation = Conversation(prefilled(fp32, prompt), prompt[0].tolist())
    for drafter in ("a", "b", "a"):
        kept = cache.put("m", take(conversation, None, drafter, {"x": mx.zeros(8)}))
    assert len(cache) == 1 and sorted(kept.drafts) == ["a", "b"]
    assert cache.nbytes == kept.nbytes + kept.piece.nbytes
    with cache.find("another model", prompt[0].tolist() + [1]) as found:
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
    assert len(held) == 8 and pieces <= longest * (row + 4)
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
    assert last.cached_tokens == 129
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


def test_threads_share_a_cache(fp32, tokenizer):
    shared = ids(7, 130)
    prompts = [shared + ids(seed, 40) for seed in range(4)]
    want = [run(fp32, tokenizer, prompt)[0] for prompt in prompts]
    probe = PromptCache()
    run(fp32, tokenizer, prompts[0], probe)
    cache = PromptCache(max_bytes=4 * probe.nbytes)

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


def test_room_is_made_among_checkpoints_first_and_by_last_use_within_a_class(fp32):
    def snapshot(seed: int):
        prompt = tokens(seed, 64, 282)
        conversation = Conversation(prefilled(fp32, prompt), prompt[0].tolist())
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
