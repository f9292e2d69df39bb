"""The demo's questions, their tokenizer and their packing."""

import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

import specmlx.demo
from specmlx.demo import tasks
from specmlx.demo.tasks import KINDS

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from make_demo.chats import QUESTION_WEIGHT, PackedChats, packed_batches  # noqa: E402
from make_demo.templates import COPYING, held_out_examples, is_held_out, sample, training_examples  # noqa: E402
from make_demo.tokenizer import SPECIAL_TOKENS, train_tokenizer  # noqa: E402

TARGET = Path(specmlx.demo.__file__).parent / "target"


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded():
    from mlx_lm.utils import load_tokenizer

    return load_tokenizer(TARGET)


@pytest.fixture(scope="module")
def held_out():
    return held_out_examples(45)


def test_at_least_twelve_kinds_and_at_most_a_third_only_copy():
    assert len(KINDS) >= 12 and COPYING < set(KINDS) and 3 * len(COPYING) <= len(KINDS)
    with pytest.raises(ValueError, match="'poem'.*count up"):
        sample("poem", Random(0))


def test_a_question_has_one_answer_in_every_kind():
    answers = {}
    for example in training_examples(1, 6000):
        assert answers.setdefault(example.question, example.answer) == example.answer


def test_answers_are_right_by_an_independent_reading():
    for example in held_out_examples(20, seed=3):
        answer = example.answer
        numbers = [int(word.strip(".,?")) for word in example.question.split() if word.strip(".,?").isdigit()]
        if example.kind == "count down":
            assert [int(n) for n in answer.split()] == list(range(max(numbers), min(numbers) - 1, -1))
        elif example.kind == "times table":
            rows = [line.partition("=") for line in answer.splitlines()]
            assert all(eval(product) == int(value) for product, _, value in rows)
            factor, first, last = numbers
            assert [row[0] for row in rows] == [f"{k}*{factor}" for k in range(first, last + 1)]
        elif example.kind == "sum":
            made, _, rest = answer.partition(" = ")
            assert eval(made) == int(rest.partition(",")[0])
        elif example.kind == "json":
            assert json.loads(answer)["age"] == numbers[0]
        elif example.kind in ("function", "class"):
            compile(answer, "answer", "exec")


def test_training_never_sees_a_held_out_question_and_kinds_are_equally_often():
    examples = list(training_examples(2, 150 * len(KINDS)))
    assert not any(is_held_out(example.question) for example in examples)
    assert set(Counter(example.kind for example in examples).values()) == {150}
    assert examples[:40] == list(training_examples(2, 40))


def test_held_out_questions_are_distinct_held_out_and_the_same_every_time(held_out):
    assert len({example.question for example in held_out}) == len(held_out) == 45 * len(KINDS) >= 600
    assert all(is_held_out(example.question) for example in held_out)
    assert held_out == held_out_examples(45)
    with pytest.raises(ValueError, match="fewer than 400 .*'count up'"):
        held_out_examples(400)


def test_the_installed_questions_are_what_the_templates_make(held_out):
    assert tasks.held_out_examples(45) == held_out
    assert tasks.held_out_examples(1) == held_out_examples(1)
    with pytest.raises(ValueError, match="46 is too many: there are 45 .*'count up'"):
        tasks.held_out_examples(46)
    stored = list(tasks.training_examples("train", 8000))
    assert stored == list(training_examples("train", 8000))
    other = list(tasks.training_examples("other", 8001))
    assert other[:40] == list(tasks.training_examples("other", 40)) != stored[:40]
    assert Counter(other[:8000]) == Counter(stored)


def test_answers_are_long_enough_and_do_not_loop(tokenizer, held_out):
    lengths, shares = [], []
    for example in held_out:
        ids = tokenizer.encode(example.answer).ids
        grams = list(zip(ids, ids[1:], ids[2:], strict=False))
        lengths.append(len(ids))
        shares.append(len(set(grams)) / len(grams))
    assert np.mean(lengths) >= 24 and max(lengths) <= 110
    assert np.mean(np.array(lengths) >= 16) >= 0.98
    assert np.mean(shares) >= 0.85


def test_mlx_lm_loads_the_tokenizer_with_its_streaming_byte_level_detokenizer(loaded, recwarn):
    assert type(loaded.detokenizer).__name__ == "BPEStreamingDetokenizer"
    assert [loaded.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert loaded.eos_token_ids == {2} and loaded.pad_token == "<|endoftext|>"
    text = "héé 🎉 👨‍👩‍👧 日本 self.x\n\n    1234"
    ids = loaded.encode(text)
    detokenizer = loaded.detokenizer
    detokenizer.reset()
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == loaded.decode(ids) == text
    assert json.loads((TARGET / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert not recwarn.list


def test_the_template_renders_chatml(loaded):
    user = {"role": "user", "content": "Hi."}
    render = loaded.apply_chat_template
    asked = "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    assert render([user], tokenize=False, add_generation_prompt=True) == asked
    history = [user, {"role": "assistant", "content": "Yes."}]
    assert render(history, tokenize=False) == asked + "Yes.<|im_end|>\n"
    system = [{"role": "system", "content": "S"}, user]
    assert render(system, tokenize=False, add_generation_prompt=True) == "<|im_start|>system\nS<|im_end|>\n" + asked


def test_a_packed_row_is_what_the_template_renders(loaded, tokenizer):
    tokens, weights = PackedChats(tokenizer, seed=5, batch_size=2, length=256).batch(0)
    assert tokens.shape == (2, 257) and tokens.dtype == np.int32
    assert weights.shape == (2, 256) and weights.dtype == np.float32
    examples = training_examples("packed 5 0")
    messages = []
    for example in islice(examples, 12):
        messages += [
            {"role": "user", "content": example.question},
            {"role": "assistant", "content": example.answer},
        ]
    assert tokens[0].tolist() == loaded.apply_chat_template(messages)[:257]


def test_only_the_answer_and_its_end_have_full_weight(tokenizer):
    chats = PackedChats(tokenizer, seed=5, batch_size=1)
    tokens, weights = chats.batch(3)
    learned = tokens[0, 1:][weights[0] == 1].tolist()
    answers = []
    for example in islice(training_examples("packed 5 3"), 12):
        answers += [*tokenizer.encode(example.answer).ids, 2]
    assert len(learned) > 64 and learned == answers[: len(learned)]
    assert set(np.unique(weights)) == {np.float32(QUESTION_WEIGHT), np.float32(1)}


def test_packing_resumes_at_any_step():
    rows = packed_batches(TARGET, seed=1, batch_size=2, length=64)
    third = list(islice(rows, 3))[2]
    resumed = next(packed_batches(TARGET / "tokenizer.json", seed=1, batch_size=2, length=64, start=2))
    assert all(np.array_equal(a, b) for a, b in zip(third, resumed, strict=True))


def test_training_the_tokenizer_writes_what_loads_and_refuses_a_tiny_vocabulary(tmp_path):
    train_tokenizer(["Count from 1 to 9."] * 20, 270, tmp_path)
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    with pytest.raises(ValueError, match="vocab_size is 100; it must be at least 260"):
        train_tokenizer([], 100, tmp_path)
