"""The public API on a tiny random model: prompts, options, mlx-lm's callables, threads."""

import dataclasses
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from drafter_kit import case_weights, golden_config, write_drafter
from mlx_lm.models import cache as stock
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from rig import (
    SMALL,
    collect,
    leaves,
    mlx_lm_twin,
    offsets,
    plain_ids,
    same_bits,
    small_tokenizer,
    stock_leaves,
    tiny,
)
from scripted import ScriptedDrafter, all_right, all_wrong, right_with, wrong_at

import specmlx
from specmlx.decoding.sampling import make_sampler
from specmlx.generation.generate import generate, stream_generate
from specmlx.generation.prompt_cache import make_prompt_cache
from specmlx.generation.responses import GenerationResponse

PROMPTS = [[7, 8, 9] * 30, [4], [11, 12, 13], [20] * 70]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model():
    return tiny(0, **SMALL)


@pytest.fixture(scope="module")
def twin(model):
    return mlx_lm_twin(model, **SMALL)


def test_a_prompt_may_be_text_or_ids_of_any_kind(model, tokenizer):
    ids = tokenizer.encode("the quick fox")
    kinds = ["the quick fox", ids, tuple(ids), mx.array(ids), mx.array(ids, dtype=mx.uint32), np.array(ids)]
    texts = {generate(model, tokenizer, prompt, max_tokens=8) for prompt in kinds}
    assert len(texts) == 1
    assert generate(model, tokenizer._tokenizer, ids, max_tokens=8) in texts


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(prompt=""), "prompt is empty"),
        (dict(prompt=[]), "prompt is empty"),
        (dict(prompt=[1, 282]), "token 282: the vocabulary has 282"),
        (dict(prompt=[-1]), "token -1"),
        (dict(prompt=mx.array([[1, 2]])), "flat sequence"),
        (dict(prompt=[0.5]), "flat sequence"),
        (dict(max_tokens=0), "max_tokens is 0"),
        (dict(max_tokens="5"), "max_tokens is '5'"),
        (dict(max_tokens=2.5), "max_tokens is 2.5"),
        (dict(logits_processors=len), "logits_processors must be a list"),
        (dict(prompt="a \udcff"), r"holds '\udcff' at place 2"),
        (dict(max_tokens=-2), "max_tokens is -2"),
        (dict(prefill_step_size=0), "prefill_step_size is 0"),
        (dict(kv_bits=7), "kv_bits"),
        (dict(max_kv_size=5000), "max_kv_size"),
        (dict(input_embeddings=mx.zeros((1, 64))), "input_embeddings"),
        (dict(num_draft_tokens=3), "num_draft_tokens is 3 but there is no drafter"),
        (dict(draft_model=7), "draft_model is 7, of the kind int"),
        (dict(draft_model="no/such/dir"), "no/such/dir"),
        (dict(stop=""), "stop string is empty"),
        (dict(stop=5), "stop is 5: give a text or a list of texts"),
        (dict(stop=[5]), "stop holds 5: give a text or a list of texts"),
        (dict(stop=["a", ""]), "stop string is empty"),
        (dict(sampler=lambda logprobs: logprobs.argmax(-1), seed=1), "seed=1"),
        (dict(sampler=0.5), "sampler must be callable"),
        (dict(seed="x"), "seed is 'x': it must be an integer"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(model, tokenizer, options, word):
    with pytest.raises(ValueError) as error:
        stream_generate(model, tokenizer, **{"prompt": "the", **options})
    assert word in str(error.value) and "\n" not in str(error.value)


def test_responses_have_mlx_lms_fields_first():
    ours = [f.name for f in dataclasses.fields(GenerationResponse)]
    theirs = [f.name for f in dataclasses.fields(mlx_lm.generate.__globals__["GenerationResponse"])]
    assert ours[: len(theirs)] == theirs


@pytest.mark.linux_bits
@pytest.mark.parametrize("prompt", [[5], [5] * 12, list(range(40))])
def test_mlx_lm_generates_with_our_model_as_with_its_own(model, twin, tokenizer, prompt):
    theirs, ours = (stock.make_prompt_cache(m) for m in (twin, model))
    want = mlx_lm.generate(twin, tokenizer, prompt, max_tokens=16, prompt_cache=theirs)
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=16, prompt_cache=ours) == want
    assert offsets(ours) == [len(prompt) + 16] * 2
    assert same_bits(stock_leaves(ours), stock_leaves(theirs))
    assert generate(model, tokenizer, prompt, max_tokens=16) == want


def test_prompt_progress_is_told_as_in_mlx_lm(model, twin, tokenizer):
    told = {}
    for name, run, m in (("theirs", mlx_lm.generate, twin), ("ours", generate, model)):
        seen = told.setdefault(name, [])
        run(
            m,
            tokenizer,
            [5] * 150,
            max_tokens=1,
            prefill_step_size=64,
            prompt_progress_callback=lambda *at, seen=seen: seen.append(at),
        )
    assert told["ours"] == told["theirs"] == [(0, 150), (64, 150), (128, 150), (149, 150), (150, 150)]


def seen_by(processor_calls: list):
    def processor(tokens, logits):
        processor_calls.append(tokens.tolist())
        return logits

    return processor


@pytest.mark.parametrize("max_tokens", [12, 13])
def test_callables_of_mlx_lm_see_what_was_accepted_and_nothing_else(model, tokenizer, max_tokens):
    whole = [r.token for r in stream_generate(model, tokenizer, [5, 6], max_tokens=20)]
    drafter = ScriptedDrafter([5, 6, *whole], right_with(0.6), tap_ids=())
    calls = []
    options = dict(
        draft_model=drafter, logits_processors=[seen_by(calls)], max_tokens=max_tokens, num_draft_tokens="full"
    )
    _, given, last = collect(stream_generate(model, tokenizer, [5, 6], **options))
    assert given == whole[:max_tokens]
    assert calls == [[5, 6, *given[:n]] for n in range(max_tokens)]
    assert last.stats.accepted > 0 and "one by one" in last.stats.reason


@pytest.mark.parametrize("index", range(6))
def test_callables_of_mlx_lm_see_no_row_behind_a_stop_token(model, tokenizer, index):
    whole = [r.token for r in stream_generate(model, tokenizer, [5, 6], max_tokens=20)]
    stop = whole.index(whole[index])
    stopping = TokenizerWrapper(tokenizer._tokenizer, BPEStreamingDetokenizer, eos_token_ids=[whole[index]])
    calls = []
    drafter = ScriptedDrafter([5, 6, *whole], all_right, tap_ids=())
    options = dict(draft_model=drafter, logits_processors=[seen_by(calls)], max_tokens=20, num_draft_tokens="full")
    _, given, last = collect(stream_generate(model, stopping, [5, 6], **options))
    assert given == whole[: stop + 1] and last.finish_reason == "stop"
    assert calls == [[5, 6, *given[:n]] for n in range(stop + 1)]


def test_mlx_lms_sampler_and_processors_give_the_text_they_give_mlx_lm(model, twin, tokenizer):
    options = dict(max_tokens=16, logits_processors=mlx_lm_processors({3: 2.0}, 1.4, 5))
    want = [r.token for r in mlx_lm.stream_generate(twin, tokenizer, [5], **options)]
    for guess in (all_right, right_with(0.5)):
        drafter = ScriptedDrafter([5, *want], guess, tap_ids=())
        drafted = stream_generate(model, tokenizer, [5], draft_model=drafter, num_draft_tokens="full", **options)
        assert [r.token for r in drafted] == want
    # One draw from the global stream for each token that leaves, in order.
    options = dict(max_tokens=8, sampler=mlx_lm_sampler(0.8))
    mx.random.seed(4)
    want = [r.token for r in mlx_lm.stream_generate(twin, tokenizer, [5], **options)]
    mx.random.seed(4)
    assert [r.token for r in stream_generate(model, tokenizer, [5], **options)] == want
    mx.random.seed(4)
    drafter = ScriptedDrafter([5, *want, 0], wrong_at(5), tap_ids=())
    drafted = list(stream_generate(model, tokenizer, [5], draft_model=drafter, num_draft_tokens="full", **options))
    assert [r.token for r in drafted] == want
    assert drafted[-1].stats.accepted == 6 and "sampler" in drafted[-1].stats.reason


def test_a_seed_gives_one_text_in_any_thread_with_any_other_request_between(model, tokenizer):
    def text(out: list, drafter=None):
        options = dict(max_tokens=20, seed=7, sampler=make_sampler(1.0, top_p=0.9), draft_model=drafter)
        options |= {"num_draft_tokens": "full"}
        out.append([r.token for r in stream_generate(model, tokenizer, [5, 6, 7], **options)])

    texts: list = []
    text(texts)
    mx.random.seed(1)
    generate(model, tokenizer, [5], max_tokens=3, sampler=make_sampler(1.0))
    text(texts)
    thread = threading.Thread(target=text, args=(texts,))
    thread.start()
    thread.join()
    text(texts, ScriptedDrafter([5, 6, 7, *texts[0], *[0] * 9], right_with(0.7), tap_ids=()))
    assert len(texts) == 4 and all(t == texts[0] for t in texts)


@pytest.mark.parametrize("case", ["dflash_sliding", "dspark"])
def test_a_conversation_goes_from_thread_to_thread_with_its_drafter(tokenizer, case, tmp_path):
    model = tiny(0, num_hidden_layers=6, full_attention_interval=3)
    drafter = specmlx.load_drafter(str(write_drafter(tmp_path, golden_config(case), case_weights(case))), model)
    want, states = plain_ids(model, PROMPTS, 9)
    conversation, turns = make_prompt_cache(model), []

    def turn(prompt):
        # Its width ends each answer with a round that observes and proposes nothing.
        options = dict(max_tokens=9, prompt_cache=conversation, draft_model=drafter, num_draft_tokens="full")
        turns.append([r.token for r in stream_generate(model, tokenizer, prompt, **options)])

    for i, prompt in enumerate(PROMPTS):
        if i % 2:
            turn(prompt)
        else:
            thread = threading.Thread(target=turn, args=(prompt,))
            thread.start()
            thread.join()
    assert turns == want
    assert same_bits(leaves(conversation.states), leaves(states))


def test_threads_at_once_on_one_model_and_drafter_give_what_each_gives_alone(tokenizer, tmp_path):
    model = tiny(0, num_hidden_layers=6, full_attention_interval=3)
    path = write_drafter(tmp_path, golden_config("dspark"), case_weights("dspark"))
    drafter = specmlx.load_drafter(str(path), model)

    def run(i: int, texts: dict) -> None:
        options = dict(max_tokens=10, draft_model=drafter, seed=i, sampler=make_sampler(1.0), num_draft_tokens="full")
        texts[i] = [r.token for r in stream_generate(model, tokenizer, [7, i] * 20 * i, **options)]

    alone, together = {}, {}
    for i in (1, 2, 3):
        run(i, alone)
    threads = [threading.Thread(target=run, args=(i, together)) for i in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_two_streams_of_one_model_do_not_disturb_each_other(model, tokenizer):
    alone = [[r.token for r in stream_generate(model, tokenizer, p, max_tokens=12)] for p in ([5, 6], [7])]
    drafters = [ScriptedDrafter([5, 6, *alone[0]], wrong_at(1), tap_ids=()), None]
    streams = [
        stream_generate(model, tokenizer, p, max_tokens=12, draft_model=d)
        for p, d in zip(([5, 6], [7]), drafters, strict=True)
    ]
    mixed = [[], []]
    for _ in range(12):
        for given, stream in zip(mixed, streams, strict=True):
            given.append(next(stream).token)
    assert mixed == alone


def test_a_drafter_that_never_proposes_is_a_warning(model, tokenizer):
    whole = [r.token for r in stream_generate(model, tokenizer, [5], max_tokens=6)]
    idle = ScriptedDrafter([5, *whole], all_right, widths=[0] * 20, tap_ids=())
    with pytest.warns(UserWarning, match="never proposed"):
        generate(model, tokenizer, [5], max_tokens=6, draft_model=idle, num_draft_tokens="full")
    busy = ScriptedDrafter([5, *whole], all_wrong, tap_ids=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, tokenizer, [5], max_tokens=6, draft_model=busy, num_draft_tokens="full")
        generate(model, tokenizer, [5], max_tokens=6, draft_model=busy)
        generate(model, tokenizer, [5], max_tokens=6)


@pytest.mark.parametrize(("right", "warned"), [(4, 1), (5, 0)])
def test_a_drafter_of_whose_first_100_proposals_fewer_than_5_are_kept_says_so_once(model, tokenizer, right, warned):
    whole = [r.token for r in stream_generate(model, tokenizer, [5], max_tokens=20)]
    kept = []

    def guess(index: int, slot: int, id: int) -> int:
        if slot == 0 and len(kept) < right:
            kept.append(index)
            return id
        return (id + 1) % model.vocab_size

    drafter = ScriptedDrafter([5, *whole], guess, tap_ids=())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        # Of 4 requests the first three have 100 proposals together.
        proposed = [
            list(stream_generate(model, tokenizer, [5], 12, drafter, num_draft_tokens="full"))[-1].stats.proposed
            for _ in range(4)
        ]
    assert sum(proposed[:2]) < 100 <= sum(proposed[:3])
    assert [str(w.message).partition(" were")[0] for w in told] == [
        f"the drafter hardly helps: {right} of its first 100 proposals"
    ] * warned


def test_nothing_of_mlx_or_mlx_lm_is_changed():
    code = """
import sys
import mlx.core as mx, mlx.nn, mlx_lm, mlx_lm.models.qwen3_5, mlx_lm.models.cache, mlx_lm.sample_utils

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("mlx", "mlx_lm") and module is not None:
            for key, value in vars(module).items():
                found[name, key] = value
                if isinstance(value, type):
                    found |= {(name, key, k): v for k, v in vars(value).items()}
    return found

before, device, stream = snapshot(), mx.default_device(), mx.default_stream(mx.default_device())
import specmlx, specmlx.generation.generate
sys.path[:0] = [TESTS]
from rig import small_tokenizer, tiny
import tempfile
model = tiny(0, num_hidden_layers=4, full_attention_interval=2, vocab_size=282)
tokenizer = small_tokenizer(tempfile.mkdtemp())
specmlx.generate(model, tokenizer, "the", max_tokens=3, prompt_cache=specmlx.make_prompt_cache(model), seed=1)
specmlx.generate(model, tokenizer, "the", max_tokens=3, prompt_cache=mlx_lm.models.cache.make_prompt_cache(model))
after = snapshot()
# Left by Python itself: by warnings, and by copy.copy.
ignored = {"__warningregistry__", "__slotnames__"}
changed = [k for k, v in before.items() if k not in after or (after[k] is not v and k[-1] not in ignored)]
assert not changed, changed
added = [k for k in after if len(k) == 3 and k not in before and k[:2] in before and k[-1] not in ignored]
assert not added, added
assert mx.default_device() == device and mx.default_stream(device) == stream, (device, stream)
"""
    code = code.replace("TESTS", repr(str(Path(__file__).parents[1])))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_names_of_mlx_lm_are_importable_from_specmlx():
    for name in ("load", "generate", "stream_generate", "make_sampler", "make_logits_processors"):
        assert callable(getattr(specmlx, name))
    for name in ("make_prompt_cache", "save_prompt_cache", "load_prompt_cache"):
        assert callable(getattr(specmlx, name))


def test_a_sampling_argument_of_its_own_is_refused_with_the_way_to_pass_it():
    with pytest.raises(TypeError, match=r"generate\(\) takes no temp: pass sampler=make_sampler\(temp="):
        specmlx.generate(None, None, "Hello", temp=0.7)
