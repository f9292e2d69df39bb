"""The engine: requests from any thread, answered together by one worker."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rig import SMALL, small_tokenizer, tiny

from specmlx import (
    Engine,
    PromptCache,
    QueueFull,
    batch_generate,
    generate,
    load_drafter,
    make_sampler,
    stream_generate,
)

PROMPTS = [[7, 8, 9] * n for n in (1, 5, 22, 43)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model():
    return tiny(0, **SMALL)


def options(i: int) -> dict:
    sampled = dict(sampler=make_sampler(0.9), seed=i % 3) if i % 2 else {}
    return dict(max_tokens=4 + i % 5, **sampled)


def raises(tokens, logits):
    raise KeyError("poisoned")


def test_two_hundred_requests_of_eight_threads_get_their_own_texts_among_cancelled_and_poisoned_ones(model, tokenizer):
    alone = {}
    for i in range(60):
        alone[i] = generate(model, tokenizer, PROMPTS[i % 4], **options(i))
    wrong, counts = [], {"whole": 0, "cancelled": 0, "dropped": 0, "failed": 0, "refused": 0}

    def client(thread: int) -> None:
        rng = random.Random(thread)
        for _ in range(25):
            i, fate = rng.randrange(60), rng.random()
            prompt = PROMPTS[i % 4]
            if fate < 0.1:
                # The last is longer than the model has positions.
                with pytest.raises(ValueError):
                    engine.submit(rng.choice([[], [400], [-1], [3.5], [5] * 5000]), **options(i))
                counts["refused"] += 1
            elif fate < 0.2:
                with pytest.raises(KeyError):
                    engine.submit(prompt, **options(i), logits_processors=[raises]).text()
                counts["failed"] += 1
            elif fate < 0.35:
                request = engine.submit(prompt, 10**9 if fate < 0.3 else 50)
                for _ in range(rng.randrange(3)):
                    next(request)
                request.cancel()
                list(request)
                counts["cancelled"] += 1
            elif fate < 0.45:
                request = engine.submit(prompt, 10**9)
                next(request)
                del request
                counts["dropped"] += 1
            else:
                text = engine.submit(prompt, **options(i)).text()
                counts["whole"] += 1
                if text != alone[i]:
                    wrong.append((i, text))

    cache = PromptCache(max_bytes=1 << 20, keep_answers=False)
    drafting = dict(draft_model=load_drafter("ngram", model), num_draft_tokens=2)
    with Engine(model, tokenizer, max_lanes=6, prefill_step_size=64, prompt_cache=cache, **drafting) as engine:
        threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a request never ended"
        held = []
        for _ in range(30):
            engine.submit(PROMPTS[3], 4).text()
            held.append(mx.get_active_memory())
        # As much after thirty more as after one, but for what the worker is about to drop: nothing is kept of a request
        # that is over, not even fifteen rows of logits.
        assert max(held[15:]) <= max(held[:15]) + 4096, held
    assert wrong == [] and sum(counts.values()) == 200 and min(counts.values()) > 5, (wrong[:2], counts)
    assert cache.counters.hits > 50 and cache.nbytes <= cache.max_bytes


def test_log_probabilities_can_be_read_in_any_thread(model, tokenizer):
    want = [r.logprobs.tolist() for r in stream_generate(model, tokenizer, PROMPTS[0], 5)]
    with Engine(model, tokenizer) as engine:
        requests = [engine.submit(prompt, 5) for prompt in PROMPTS]
        assert [r.logprobs.tolist() for r in requests[0]] == want
    drafting = dict(draft_model=load_drafter("ngram", model), num_draft_tokens=2)
    for options in ({}, drafting):
        with ThreadPoolExecutor(1) as pool:
            given = pool.submit(lambda: list(stream_generate(model, tokenizer, PROMPTS[0], 5, **options))).result()  # noqa: B023
        assert [r.logprobs.tolist() for r in given] == want


def test_a_short_request_is_not_kept_waiting_by_long_ones(model, tokenizer):
    with Engine(model, tokenizer, max_lanes=2) as engine:
        long = engine.submit(PROMPTS[0], 400)
        next(long)
        order = []
        short = [engine.submit(PROMPTS[1], 3) for _ in range(3)]
        for request in short:
            request.text()
            order.append("short")
        assert not long.ended, "the long one was over first: a weak test"
        long.cancel()


def test_responses_can_be_awaited_by_many_tasks_without_a_thread_each(model, tokenizer):
    want = [generate(model, tokenizer, prompt, max_tokens=6) for prompt in PROMPTS]

    async def answer(engine, prompt):
        return "".join([response.text async for response in engine.submit(prompt, 6)])

    async def answers(engine):
        before = threading.active_count()
        found = await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS * 20))
        assert threading.active_count() == before
        return found

    with Engine(model, tokenizer) as engine:
        assert asyncio.run(answers(engine)) == want * 20


def test_a_full_queue_refuses_and_a_closed_engine_ends_everything(model, tokenizer):
    engine = Engine(model, tokenizer, max_lanes=1, max_waiting=2)
    running = engine.submit(PROMPTS[0], -1)
    next(running)
    waiting = [engine.submit(PROMPTS[1], 5) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(PROMPTS[1], 5)
    engine.close()
    engine.close()
    for request in [running, *waiting]:
        with pytest.raises(RuntimeError, match="closed"):
            request.text()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(PROMPTS[0])


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()], ids=repr
)
def test_what_a_callable_raises_to_end_a_thread_ends_its_request_only(model, tokenizer, error):
    def raises(*_):
        raise error

    with Engine(model, tokenizer) as engine:
        other = engine.submit(PROMPTS[0], 20)
        for callables in (dict(logits_processors=[raises]), dict(sampler=raises)):
            with pytest.raises(RuntimeError, match=f"this request raised {type(error).__name__}"):
                engine.submit(PROMPTS[1], 5, **callables).text()
        assert other.text() == generate(model, tokenizer, PROMPTS[0], max_tokens=20)


def test_an_engine_that_a_callable_closes_ends_its_requests(model, tokenizer):
    engine = Engine(model, tokenizer)
    request = engine.submit(PROMPTS[0], 50, logits_processors=[lambda tokens, logits: engine.close() or logits])
    with pytest.raises(RuntimeError, match="closed"):
        request.text()
    engine.close()


def test_lazy_arrays_of_a_thread_outlive_what_it_generates_there(model, tokenizer):
    def work():
        lazy = mx.arange(3) + 1
        text = generate(model, tokenizer, PROMPTS[0], max_tokens=3)
        return lazy.tolist(), (lazy * 2).tolist(), text

    found = []
    thread = threading.Thread(target=lambda: found.extend(work()))
    thread.start()
    thread.join()
    assert found == [[1, 2, 3], [2, 4, 6], generate(model, tokenizer, PROMPTS[0], max_tokens=3)]


@pytest.mark.parametrize("work", [generate, batch_generate, stream_generate], ids=lambda f: f.__name__)
def test_a_thread_clears_its_streams_once_its_own_code_is_over(model, tokenizer, monkeypatch, work):
    order, clear = [], mx.clear_streams
    monkeypatch.setattr(mx, "clear_streams", lambda: (order.append(threading.get_native_id()), clear()))

    def generates():
        prompt = [PROMPTS[0]] if work is batch_generate else PROMPTS[0]
        for _ in range(2):
            given = work(model, tokenizer, prompt, max_tokens=3)
            kept.append(given if work is not stream_generate else (next(given), given))
        order.append("over")
        return threading.get_native_id()

    kept = []
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(generates).result()
    assert order == ["over", thread]
    generates()
    assert order == ["over", thread, "over"], "the main thread's streams are cleared"


@pytest.mark.skipif(sys.platform != "linux", reason="cases are forks, which only Linux has without trouble")
def test_a_program_that_ends_while_an_engine_or_a_thread_is_at_work_keeps_its_exit_code():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parents[1] / "scripts" / "ends.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert json.loads(done.stdout) == {
        "normally": 0,
        "SystemExit": 5,
        "an error": 1,
        "asyncio": 6,
        "a callable": 7,
        "a callable that never returns": 8,
        "a thread": 9,
        "a forked process": 10,
    }, done.stderr


def test_a_template_that_does_not_end_stops_nobody_elses_request(model, tokenizer):
    threads, begun, may_end, texts = set(), threading.Event(), threading.Event(), []

    def template(messages, **_):
        threads.add(threading.current_thread().name)
        if threading.current_thread().name == "stuck":
            begun.set()
            assert may_end.wait(60)
        return "".join(f"<|im_start|>{m['content']}<|im_end|>" for m in messages) + "<|im_start|>"

    chatting = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=tokenizer.eos_token_ids, chat_template=template)
    with Engine(model, chatting, prompt_cache=PromptCache()) as engine:
        stuck = threading.Thread(target=lambda: texts.append(engine.submit(PROMPTS[2], 3).text()), name="stuck")
        stuck.start()
        assert begun.wait(60)
        assert engine.submit(PROMPTS[2], 3).text() == generate(model, tokenizer, PROMPTS[2], max_tokens=3)
        assert not texts
        may_end.set()
        stuck.join(60)
    assert texts == [generate(model, tokenizer, PROMPTS[2], max_tokens=3)]
    assert threads == {"stuck", "MainThread"}
