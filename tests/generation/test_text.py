"""Text as it streams: characters, stop tokens and stop strings across the borders of tokens and blocks."""

import json
import random
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from any_lm_kit import SIZES, random_lm
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import save_config, save_model
from rig import SMALL, TINY, collect, small_tokenizer, tiny
from scripted import ScriptedDrafter, all_right, all_wrong, right_with, wrong_at

import specmlx
from specmlx.formats.checkpoint import eos_token_ids
from specmlx.generation.generate import generate, stream_generate
from specmlx.generation.responses import StopStrings
from specmlx.targets.hybrid import Model

STORY = "🙂 the 漢字 and 👨‍👩‍👧 čeština: naïve\n\nthe  cat ⛵ jumps — ok"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Parrot(Model):
    """Says the ids of `script`, by absolute position, whatever it is told."""

    def verify(self, states, rows, tap_ids=()):
        at = states.length + 1
        done = super().verify(states, rows, tap_ids)
        ids = mx.array(self.script)[at + mx.arange(rows.shape[1])]
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
    parrot.script = [5, *ids, *[tokenizer.eos_token_id] * 60]
    by = ScriptedDrafter(parrot.script, guess, max_width, tap_ids=())
    return ids, dict(prompt=[5], draft_model=by, num_draft_tokens="full")


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


def nested(folder):
    text = {key: value for key, value in (TINY | SMALL).items() if key != "model_type"} | {"eos_token_id": 11}
    save_model(folder, tiny(0, **SMALL))
    save_config({"model_type": "qwen3_5", "text_config": text, "eos_token_id": [9]}, folder / "config.json")
    return folder, {9, 11}


def llama(folder):
    save_model(folder, random_lm("llama", vocab_size=282))
    config = {"model_type": "llama", **SIZES, "vocab_size": 282, "eos_token_id": 9, "text_config": {}}
    save_config(config, folder / "config.json")
    return folder, {9}


def gguf(folder):
    shutil.copy(Path(__file__).parents[1] / "goldens" / "gguf" / "model.gguf", folder)
    return folder / "model.gguf", set()


@pytest.mark.parametrize("write", [nested, llama, gguf])
def test_stop_tokens_are_those_of_config_text_config_generation_config_and_tokenizer(write, tmp_path):
    small_tokenizer(tmp_path)
    path, named = write(tmp_path)
    model, tokenizer, config = specmlx.load(str(path), draft_model=None, return_config=True)
    assert tokenizer.eos_token_ids == {2} | named and set(config.get("eos_token_id") or []) == named
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0, 7]}')
    tokenizer = specmlx.load(str(path), draft_model=None)[1]
    assert tokenizer.eos_token_ids == {2, 7, 0} | named
    ending = specmlx.make_logits_processors(logit_bias={7: 1000.0})
    (only,) = specmlx.stream_generate(model, tokenizer, [1, 2, 3], max_tokens=6, logits_processors=ending)
    assert only.finish_reason == "stop" and only.token == 7


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "x"], [[2]], {"id": 2}, -1, [2, -1]])
def test_a_stop_token_that_is_none_is_refused_in_one_line(value, tmp_path):
    for config in ({"eos_token_id": value}, {"text_config": {"eos_token_id": value}}):
        with pytest.raises(ValueError, match=f"^{tmp_path}: eos_token_id of .+ is no token id$"):
            eos_token_ids(config, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match="eos_token_id of generation_config.json is .+ is no token id$"):
        eos_token_ids({}, tmp_path)


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
def test_no_stop_strings_may_be_said_in_any_way(parrot, tokenizer, stop):
    _, options = saying(parrot, tokenizer, STORY)
    assert generate(parrot, tokenizer, max_tokens=200, stop=stop, **options) == STORY


def test_verbose_prints_the_text_on_stdout_and_figures_on_stderr(parrot, tokenizer, capsys):
    _, options = saying(parrot, tokenizer, STORY)
    generate(parrot, tokenizer, verbose=True, max_tokens=200, **options)
    out, err = capsys.readouterr()
    assert out == STORY + "\n"
    assert "speculative" in err and "tokens per target pass" in err and err.count("\n") == 1
