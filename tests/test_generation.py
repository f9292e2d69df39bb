"""The public API on a tiny random model: text, prompts, caches over turns, mlx-lm's callables, threads."""

import dataclasses
import random
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
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import save_config, save_model
from rig import TINY, leaves, mlx_lm_twin, same_bits, small_tokenizer, stock_leaves, tiny
from scripted import ScriptedDrafter, all_right, all_wrong, right_with, wrong_at

import specmlx
from specmlx.generation import GenerationResponse, generate, stream_generate
from specmlx.prompt_cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from specmlx.speculation.sampling import make_sampler
from specmlx.speculation.stops import StopStrings
from specmlx.targets.hybrid import Model

SMALL = dict(num_hidden_layers=4, full_attention_interval=2, vocab_size=282)
STORY = "🙂 the 漢字 and 👨‍👩‍👧 čeština: naïve\n\nthe  cat ⛵ jumps — ok"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model():
    return tiny(0, **SMALL)


@pytest.fixture(scope="module")
def twin(model):
    return mlx_lm_twin(model, **SMALL)


class Parrot(Model):
    """Says the ids of `script`, by absolute position, whatever it is told."""

    def verify(self, states, rows, tap_ids=()):
        at = states.length + 1
        done = super().verify(states, rows, tap_ids)
        ids = mx.array(self.script[at : at + rows.shape[1]])
        return done._replace(logits=(mx.arange(self.vocab_size) == ids[:, None]).astype(mx.float32)[None])


@pytest.fixture(scope="module")
def parrot():
    model = tiny(0, **SMALL | {"num_hidden_layers": 2})
    bird = Parrot(model.config)
    bird.update(model.parameters())
    bird.eval()
    return bird


def saying(parrot, tokenizer, text: str, guess=all_right, max_width=7):
    """The parrot set on a text, its ids, a one-token prompt, and a drafter that knows it."""
    ids = tokenizer.encode(text)
    parrot.script = [5, *ids, *[tokenizer.eos_token_id] * 20]
    return ids, dict(prompt=[5], draft_model=ScriptedDrafter(parrot.script, guess, max_width, tap_ids=()))


def collect(responses) -> tuple[str, list[int], GenerationResponse]:
    found = list(responses)
    assert all(r.finish_reason is None for r in found[:-1]) and found[-1].finish_reason
    assert [r.generation_tokens for r in found] == list(range(1, len(found) + 1))
    assert [r.stats.generation_tokens for r in found] == [r.generation_tokens for r in found]
    return "".join(r.text for r in found), [r.token for r in found], found[-1]


GUESSES = {"all": all_right, "none": all_wrong, "wrong at 1": wrong_at(1), "right with .7": right_with(0.7)}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 16])
def test_the_joined_stream_is_the_text_however_blocks_cut_its_characters(parrot, tokenizer, guess, width):
    ids, options = saying(parrot, tokenizer, STORY, GUESSES[guess], width)
    assert len(ids) > len(STORY)
    text, tokens, last = collect(stream_generate(parrot, tokenizer, max_tokens=200, **options))
    assert tokens == [*ids, tokenizer.eos_token_id] and last.finish_reason == "stop"
    assert text == STORY
    _, options = saying(parrot, tokenizer, STORY, GUESSES[guess], width)
    assert generate(parrot, tokenizer, max_tokens=200, **options) == STORY


def test_a_character_that_max_tokens_cuts_ends_as_in_mlx_lm(parrot, tokenizer):
    for count in range(1, len(tokenizer.encode(STORY)), 3):
        ids, options = saying(parrot, tokenizer, STORY)
        text, tokens, last = collect(stream_generate(parrot, tokenizer, max_tokens=count, **options))
        detokenizer = tokenizer.detokenizer
        for token in ids[:count]:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert text == detokenizer.text and tokens == ids[:count] and last.finish_reason == "length"


class Counting(BPEStreamingDetokenizer):
    """Counts on its class, since every request has a copy of its own."""

    calls: list[str] = []

    def add_token(self, token):
        self.calls.append("add")
        super().add_token(token)

    def finalize(self):
        self.calls.append("finalize")
        super().finalize()


@pytest.mark.parametrize("max_tokens", [3, 200])
def test_a_text_is_decoded_token_by_token_and_finalized_once(parrot, tokenizer, max_tokens):
    ids, options = saying(parrot, tokenizer, STORY)
    counting = TokenizerWrapper(tokenizer._tokenizer, Counting)
    Counting.calls.clear()
    generate(parrot, counting, max_tokens=max_tokens, **options)
    assert Counting.calls == ["add"] * min(max_tokens, len(ids)) + ["finalize"]


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|im_end|>", "cat"])
def test_every_stop_token_of_the_tokenizer_ends_the_text_and_is_no_part_of_it(parrot, tokenizer, name):
    wrapped = TokenizerWrapper(tokenizer._tokenizer, BPEStreamingDetokenizer, eos_token_ids=[0])
    stop = wrapped.convert_tokens_to_ids(name) if name != "cat" else wrapped.encode("a")[0]
    wrapped.add_eos_token(wrapped.convert_ids_to_tokens(stop))
    ids, options = saying(parrot, wrapped, "the fox")
    parrot.script[5:] = [stop, *ids]
    options["draft_model"].text = list(parrot.script)
    text, tokens, last = collect(stream_generate(parrot, wrapped, max_tokens=20, **options))
    assert tokens == [*parrot.script[1:5], stop] and last.finish_reason == "stop"
    assert text == wrapped.decode(parrot.script[1:5])


def test_stop_tokens_are_those_of_the_tokenizer_and_of_the_generation_config(tmp_path):
    small_tokenizer(tmp_path)
    save_model(tmp_path, tiny(0, **SMALL))
    save_config(TINY | SMALL | {"eos_token_id": 9}, tmp_path / "config.json")
    assert specmlx.load(str(tmp_path))[1].eos_token_ids == {2, 9}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert specmlx.load(str(tmp_path))[1].eos_token_ids == {2, 7, 0}


@pytest.mark.parametrize("width", [1, 3, 7, 16])
@pytest.mark.parametrize("stop", ["jumps", "漢字", "🙂", "\n\n", "ok"])
def test_a_stop_string_ends_the_text_across_tokens_and_blocks(parrot, tokenizer, stop, width):
    assert len(tokenizer.encode(stop)) > 1
    ids, options = saying(parrot, tokenizer, STORY, wrong_at(2), width)
    text, tokens, last = collect(stream_generate(parrot, tokenizer, max_tokens=200, stop=stop, **options))
    assert text == STORY[: STORY.index(stop)]
    assert last.finish_reason == "stop"
    # It ended with the token that completed the string.
    assert stop in tokenizer.decode(tokens) and stop not in tokenizer.decode(tokens[:-1])


@pytest.mark.parametrize("max_tokens", [*range(40, 52), 200])
def test_what_was_held_back_for_a_stop_string_is_given_at_the_end(parrot, tokenizer, max_tokens):
    ids, options = saying(parrot, tokenizer, STORY)
    plain = generate(parrot, tokenizer, max_tokens=max_tokens, **options)
    stops = ["jumps — okay", "cat ⛵ jumps around", "— ok!", "zebra"]
    ids, options = saying(parrot, tokenizer, STORY)
    assert generate(parrot, tokenizer, max_tokens=max_tokens, stop=stops, **options) == plain


def test_stop_strings_are_found_as_in_the_whole_text_however_it_is_cut():
    rng = random.Random(0)

    def word(most: int) -> str:
        return "".join(rng.choice("ab") for _ in range(rng.randint(1, most)))

    for _ in range(500):
        stops, pieces = [word(5) for _ in range(rng.randint(1, 3))], [word(4) for _ in range(8)]
        watch, out, text = StopStrings(stops), "", ""
        for piece in pieces:
            text += piece
            out += watch.feed(piece)
            found = [text.index(stop) for stop in stops if stop in text]
            assert watch.stopped == bool(found)
            if found:
                break
            # What can't be the beginning of a stop string has left.
            assert any(stop.startswith(text[len(out) :]) for stop in stops)
        out += watch.flush()
        assert out == (text[: min(found)] if found else text), (stops, pieces)


@pytest.mark.parametrize("stop", [None, [], ()])
def test_no_stop_strings_may_be_said_in_any_way(model, tokenizer, stop):
    assert generate(model, tokenizer, "the", max_tokens=3, stop=stop) == generate(model, tokenizer, "the", max_tokens=3)


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
        (dict(max_tokens=-2), "max_tokens is -2"),
        (dict(prefill_step_size=0), "prefill_step_size is 0"),
        (dict(kv_bits=8), "kv_bits"),
        (dict(max_kv_size=512), "max_kv_size"),
        (dict(input_embeddings=mx.zeros((1, 64))), "input_embeddings"),
        (dict(num_draft_tokens=3), "num_draft_tokens is 3 but there is no drafter"),
        (dict(draft_model=7), "draft_model is a int"),
        (dict(draft_model="no/such/dir"), "no/such/dir"),
        (dict(stop=""), "stop string is empty"),
        (dict(stop=["a", ""]), "stop string is empty"),
        (dict(sampler=lambda logprobs: logprobs.argmax(-1), seed=1), "seed=1"),
        (dict(sampler=0.5), "sampler must be callable"),
        (dict(seed="x"), "seed must be an integer"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(model, tokenizer, options, word):
    with pytest.raises(ValueError) as error:
        stream_generate(model, tokenizer, **{"prompt": "the", **options})
    assert word in str(error.value) and "\n" not in str(error.value)


def test_another_model_is_refused(twin, tokenizer):
    with pytest.raises(ValueError, match="not a specmlx model"):
        stream_generate(twin, tokenizer, "the")


def test_responses_have_mlx_lms_fields_first():
    ours = [f.name for f in dataclasses.fields(GenerationResponse)]
    theirs = [f.name for f in dataclasses.fields(mlx_lm.generate.__globals__["GenerationResponse"])]
    assert ours[: len(theirs)] == theirs


def plain_ids(model, prompts: list[list[int]], count: int):
    """A conversation by the model's own passes, one token a pass: what each turn gave, and the states."""
    states, pending, turns = model.new_states(), [], []
    for prompt in prompts:
        ids = [*pending, *prompt]
        for _ in model.prefill(states, mx.array([ids[:-1]], dtype=mx.int32)):
            pass
        anchor, given = ids[-1], []
        for _ in range(count):
            logits = model.verify(states, mx.array([[anchor]], dtype=mx.int32)).logits[0, -1]
            states.evaluate()
            states.commit(1)
            anchor = logits.argmax().item()
            given.append(anchor)
        pending = [anchor]
        turns.append(given)
    return turns, states


PROMPTS = [[7, 8, 9] * 30, [4], [11, 12, 13], [20] * 70]


@pytest.mark.linux_bits
@pytest.mark.parametrize("by", ["plain", "drafter", "other drafter"])
def test_a_prompt_cache_over_turns_is_one_conversation(model, tokenizer, by, tmp_path):
    want, states = plain_ids(model, PROMPTS, 9)
    text = [token for prompt, given in zip(PROMPTS, want, strict=True) for token in (*prompt, *given)]
    scripted = ScriptedDrafter(text, right_with(0.7), tap_ids=())
    conversation = make_prompt_cache(model)
    for turn, prompt in enumerate(PROMPTS):
        drafter = {"plain": None, "drafter": scripted}.get(by, scripted if turn % 2 else None)
        options = dict(max_tokens=9, draft_model=drafter, prompt_cache=conversation)
        _, ids, last = collect(stream_generate(model, tokenizer, prompt, **options))
        assert ids == want[turn] and last.prompt_tokens == len(prompt)
        assert last.stats.mode == ("plain" if drafter is None else "speculative")
    assert same_bits(leaves(conversation.states), leaves(states))
    assert conversation.tokens == text


@pytest.mark.linux_bits
def test_a_saved_conversation_goes_on_where_it_was(model, tokenizer, tmp_path):
    want, _ = plain_ids(model, PROMPTS, 9)
    conversation = make_prompt_cache(model)
    for turn, prompt in enumerate(PROMPTS):
        given = list(stream_generate(model, tokenizer, prompt, max_tokens=9, prompt_cache=conversation))
        assert [r.token for r in given] == want[turn]
        save_prompt_cache(tmp_path / "chat.safetensors", conversation, {"turn": str(turn)})
        conversation, metadata = load_prompt_cache(tmp_path / "chat.safetensors", return_metadata=True)
        assert metadata == {"turn": str(turn)}
    empty = tmp_path / "empty.safetensors"
    save_prompt_cache(str(empty), make_prompt_cache(model))
    begun = load_prompt_cache(str(empty))
    assert [r.token for r in stream_generate(model, tokenizer, PROMPTS[0], 9, prompt_cache=begun)] == want[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat.safetensors", "empty.safetensors"]


def test_what_is_no_prompt_cache_is_refused_in_one_line(model, tokenizer, tmp_path):
    other = make_prompt_cache(tiny(0, num_hidden_layers=8))
    (tmp_path / "text.safetensors").write_text("no tensors in here")
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.zeros(2)})
    for use, error, word in (
        (lambda: next(stream_generate(model, tokenizer, "a", prompt_cache=other)), ValueError, "8 layers"),
        (lambda: next(stream_generate(model, tokenizer, "a", prompt_cache="x")), TypeError, "make_prompt_cache"),
        (lambda: next(stream_generate(model, tokenizer, "a", prompt_cache=[])), ValueError, "0 layers"),
        (lambda: make_prompt_cache(model, max_kv_size=64), ValueError, "max_kv_size=64"),
        (lambda: load_prompt_cache(str(tmp_path / "none.safetensors")), ValueError, "none.safetensors"),
        (lambda: load_prompt_cache(str(tmp_path / "text.safetensors")), ValueError, "text.safetensors"),
        (lambda: load_prompt_cache(str(tmp_path / "weights.safetensors")), ValueError, "weights.safetensors"),
    ):
        with pytest.raises(error) as raised:
            use()
        assert word in str(raised.value) and "\n" not in str(raised.value)


def by_mlx_lm(model, prompt: list[int], count: int, caches: list | None = None) -> list[int]:
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=caches)]


def offsets(caches: list) -> list[int]:
    return [cache.offset for cache in caches if isinstance(cache, stock.KVCache)]


@pytest.mark.linux_bits
@pytest.mark.parametrize("width", [0, 5])
def test_a_stock_cache_list_ends_as_mlx_lm_leaves_it(model, twin, tokenizer, width):
    theirs, ours = twin.make_cache(), stock.make_prompt_cache(model)
    kinds = [type(cache) for cache in ours]
    assert kinds == [type(cache) for cache in theirs]
    # One-token prompts: without prefill, whose rounding differs from stepping, all bits can be compared.
    want = by_mlx_lm(twin, [5], 12, theirs)
    scripted = ScriptedDrafter([5, *want], right_with(0.7), tap_ids=())
    options = dict(draft_model=scripted if width else None, prompt_cache=ours)
    assert [r.token for r in stream_generate(model, tokenizer, [5], max_tokens=12, **options)] == want
    assert [type(cache) for cache in ours] == kinds
    assert offsets(ours) == offsets(theirs) == [13, 13]
    assert same_bits(stock_leaves(ours), stock_leaves(theirs))
    # mlx-lm goes on with what we left, and we with what it left.
    want = by_mlx_lm(twin, [9], 5, theirs)
    assert by_mlx_lm(twin, [9], 5, ours) == want
    assert [r.token for r in stream_generate(model, tokenizer, [3], max_tokens=4, prompt_cache=ours)] == by_mlx_lm(
        twin, [3], 4, theirs
    )
    assert same_bits(stock_leaves(ours), stock_leaves(theirs))


@pytest.mark.linux_bits
def test_a_stock_list_holds_the_stop_token_too(model, twin, tokenizer):
    want = by_mlx_lm(twin, [5], 12)
    stopping = TokenizerWrapper(tokenizer._tokenizer, BPEStreamingDetokenizer, eos_token_ids=[want[6]])
    theirs, ours = twin.make_cache(), model.make_cache()
    for run, m, caches in ((mlx_lm.stream_generate, twin, theirs), (stream_generate, model, ours)):
        last = list(run(m, stopping, [5], max_tokens=12, prompt_cache=caches))[-1]
        assert last.finish_reason == "stop" and last.generation_tokens == want.index(want[6]) + 1
    assert offsets(ours) == offsets(theirs)
    assert same_bits(stock_leaves(ours), stock_leaves(theirs))


@pytest.mark.linux_bits
@pytest.mark.parametrize("taken", [1, 2, 3, 6])
def test_a_stock_list_goes_on_while_a_generator_still_holds_it(model, twin, tokenizer, taken):
    theirs, ours = twin.make_cache(), model.make_cache()
    want = by_mlx_lm(twin, [5], taken, theirs)
    whole = by_mlx_lm(twin, [5], 12)
    held = stream_generate(
        model, tokenizer, [5], draft_model=ScriptedDrafter([5, *whole], all_right, 3, tap_ids=()), prompt_cache=ours
    )
    assert [next(held).token for _ in range(taken)] == want
    want = by_mlx_lm(twin, [9], 5, theirs)
    assert [r.token for r in stream_generate(model, tokenizer, [9], max_tokens=5, prompt_cache=ours)] == want
    with pytest.raises(RuntimeError, match="another request"):
        next(held)
    assert offsets(ours) == offsets(theirs)
    # The token that was pending went in by prefill, which differs from mlx-lm's stepping by rounding.
    for a, b in zip(stock_leaves(ours), stock_leaves(theirs), strict=True):
        assert mx.allclose(a, b, rtol=0, atol=1e-5).item()


@pytest.mark.linux_bits
@pytest.mark.parametrize("held", [False, True])
def test_a_stock_list_can_be_saved_after_a_break(model, twin, tokenizer, held, tmp_path):
    ours, want = model.make_cache(), by_mlx_lm(twin, [5], 3)
    responses = stream_generate(model, tokenizer, [5], prompt_cache=ours)
    assert [next(responses).token for _ in range(3)] == want
    if not held:
        responses.close()
    save_prompt_cache(str(tmp_path / "list.safetensors"), ours, {"a": "b"})
    loaded, metadata = load_prompt_cache(str(tmp_path / "list.safetensors"), return_metadata=True)
    assert metadata == {"a": "b"} and offsets(loaded) == [4, 4]
    theirs = twin.make_cache()
    by_mlx_lm(twin, [5], 3, theirs)
    assert same_bits(stock_leaves(loaded), stock_leaves(theirs))
    assert same_bits(stock_leaves(stock.load_prompt_cache(str(tmp_path / "list.safetensors"))), stock_leaves(theirs))
    if held:
        with pytest.raises(RuntimeError, match="another request"):
            next(responses)


@pytest.mark.parametrize("when", ["sampler", "progress"])
def test_a_stock_list_is_given_back_after_an_exception(model, tokenizer, when):
    def fail(*_):
        raise ArithmeticError

    ours = model.make_cache()
    options = {"sampler": dict(sampler=fail), "progress": dict(prompt_progress_callback=fail)}[when]
    with pytest.raises(ArithmeticError):
        list(stream_generate(model, tokenizer, [5, 6, 7], prompt_cache=ours, **options))
    assert offsets(ours) == ([3, 3] if when == "sampler" else [0, 0])
    assert generate(model, tokenizer, [8], max_tokens=3, prompt_cache=ours)


def test_a_cache_that_cannot_be_read_is_named(model, tokenizer):
    for index, bad, word in (
        (1, stock.RotatingKVCache(8), "layer 1 is a RotatingKVCache: specmlx reads KVCache there"),
        (0, stock.KVCache(), "layer 0 is a KVCache: specmlx reads ArraysCache there"),
    ):
        caches = model.make_cache()
        caches[index] = bad
        with pytest.raises(TypeError, match=word):
            next(stream_generate(model, tokenizer, [5], prompt_cache=caches))
        assert caches[index] is bad
    caches = model.make_cache()
    model(mx.array([[1, 2, 3]]), cache=caches)
    caches[1].trim(1)
    with pytest.raises(ValueError, match=r"different lengths \[2, 3\]"):
        next(stream_generate(model, tokenizer, [5], prompt_cache=caches))


@pytest.mark.linux_bits
@pytest.mark.parametrize("prompt", [[5], [5] * 12, list(range(40))])
def test_mlx_lm_generates_with_our_model_as_with_its_own(model, twin, tokenizer, prompt):
    theirs, ours = (stock.make_prompt_cache(m) for m in (twin, model))
    want = mlx_lm.generate(twin, tokenizer, prompt, max_tokens=16, prompt_cache=theirs)
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=16, prompt_cache=ours) == want
    assert offsets(ours) == [len(prompt) + 16] * 2
    # Up to 16 rows are stepped, more are prefill.
    assert same_bits(stock_leaves(ours), stock_leaves(theirs)) == (len(prompt) <= 17)
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
    options = dict(draft_model=drafter, logits_processors=[seen_by(calls)], max_tokens=max_tokens)
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
    options = dict(draft_model=drafter, logits_processors=[seen_by(calls)], max_tokens=20)
    _, given, last = collect(stream_generate(model, stopping, [5, 6], **options))
    assert given == whole[: stop + 1] and last.finish_reason == "stop"
    assert calls == [[5, 6, *given[:n]] for n in range(stop + 1)]


def test_mlx_lms_sampler_and_processors_give_the_text_they_give_mlx_lm(model, twin, tokenizer):
    options = dict(max_tokens=16, logits_processors=mlx_lm_processors({3: 2.0}, 1.4, 5))
    want = [r.token for r in mlx_lm.stream_generate(twin, tokenizer, [5], **options)]
    for guess in (all_right, right_with(0.5)):
        drafter = ScriptedDrafter([5, *want], guess, tap_ids=())
        assert [r.token for r in stream_generate(model, tokenizer, [5], draft_model=drafter, **options)] == want
    # One draw from the global stream for each token that leaves, in order.
    options = dict(max_tokens=8, sampler=mlx_lm_sampler(0.8))
    mx.random.seed(4)
    want = [r.token for r in mlx_lm.stream_generate(twin, tokenizer, [5], **options)]
    mx.random.seed(4)
    assert [r.token for r in stream_generate(model, tokenizer, [5], **options)] == want
    mx.random.seed(4)
    drafter = ScriptedDrafter([5, *want, 0], wrong_at(5), tap_ids=())
    drafted = list(stream_generate(model, tokenizer, [5], draft_model=drafter, **options))
    assert [r.token for r in drafted] == want
    assert drafted[-1].stats.accepted == 6 and "sampler" in drafted[-1].stats.reason


def test_a_seed_gives_one_text_in_any_thread_with_any_other_request_between(model, tokenizer):
    def text(out: list, drafter=None):
        options = dict(max_tokens=20, seed=7, sampler=make_sampler(1.0, top_p=0.9), draft_model=drafter)
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
        options = dict(max_tokens=9, prompt_cache=conversation, draft_model=drafter)
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
        options = dict(max_tokens=10, draft_model=drafter, seed=i, sampler=make_sampler(1.0))
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
        generate(model, tokenizer, [5], max_tokens=6, draft_model=idle)
    busy = ScriptedDrafter([5, *whole], all_wrong, tap_ids=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, tokenizer, [5], max_tokens=6, draft_model=busy)
        generate(model, tokenizer, [5], max_tokens=6)


def test_verbose_prints_the_text_on_stdout_and_figures_on_stderr(parrot, tokenizer, capsys):
    _, options = saying(parrot, tokenizer, STORY)
    generate(parrot, tokenizer, verbose=True, max_tokens=200, **options)
    out, err = capsys.readouterr()
    assert out == STORY + "\n"
    assert "speculative" in err and "tokens per target pass" in err and err.count("\n") == 1


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
import specmlx, specmlx.generation
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
    code = code.replace("TESTS", repr(str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_names_of_mlx_lm_are_importable_from_specmlx():
    for name in ("load", "generate", "stream_generate", "make_sampler", "make_logits_processors"):
        assert callable(getattr(specmlx, name))
    for name in ("make_prompt_cache", "save_prompt_cache", "load_prompt_cache"):
        assert callable(getattr(specmlx, name))
