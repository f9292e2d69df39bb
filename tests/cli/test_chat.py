"""Chats: each turn sends only what is new, however the last answer ended; Ctrl-C stops an answer, not the chat."""

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from demo_kit import OFTEN, write_model

import specmlx
from specmlx import PromptCache
from specmlx.cli import main
from specmlx.cli.dialogue import Dialogue
from specmlx.targets.hybrid import Model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(directory):
    return specmlx.load(directory)


def run(*args, stdin=None):
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def dialogue(pair, **options):
    return Dialogue(*pair, **options)


def ask(talk, question):
    responses = list(talk.ask(question))
    return responses, "".join(response.text for response in responses)


CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def spoken(tokenizer, *parts):
    """Ids of questions (text) and answers (ids), as the template puts them."""
    return [i for part in parts for i in (tokenizer.encode(part) if isinstance(part, str) else part)]


@pytest.mark.parametrize("ending", ["stop", "length", "closed"])
def test_a_second_turn_sends_only_new_tokens_however_the_first_ended(pair, ending):
    tokenizer = pair[1]
    bias = {50: 30, 2: 100 if ending == "stop" else -100}
    talk = dialogue(
        pair,
        system_prompt="Be brief.",
        max_tokens=12,
        logits_processors=specmlx.make_logits_processors({50: 30}),
    )
    if ending == "stop":
        talk.options["logits_processors"] = specmlx.make_logits_processors(bias)
        first = [r.token for r in ask(talk, "One?")[0]]
        assert first == [2]
    else:
        stream = talk.ask("One?")
        first = [next(stream).token for _ in range(3)] if ending == "closed" else [r.token for r in stream]
        stream.close()
    talk.options["logits_processors"] = None
    responses, text = ask(talk, "Two?")
    system = "<|im_start|>system\nBe brief.<|im_end|>\n" + CHATML.format("One?")
    shown = first[:-1] if ending == "stop" else first
    second = "<|im_end|>\n" + CHATML.format("Two?")
    assert talk.tokens == spoken(tokenizer, system, shown, second, [r.token for r in responses])
    assert responses[0].prompt_tokens == len(spoken(tokenizer, system, shown, second))
    # An answer's last token, unless it is the stop token, has left but is not in yet.
    assert responses[0].prompt_tokens - responses[0].cached_tokens == len(tokenizer.encode(second)) + (ending != "stop")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    cold = specmlx.generate(*pair, spoken(tokenizer, system, shown, second), max_tokens=12)
    assert text == cold


class Counting(Model):
    """Counts the rows that prefill runs."""

    rows = 0

    def prefill(self, states, tokens, tap_ids=(), step_size=2048):
        self.rows += tokens.shape[1]
        yield from super().prefill(states, tokens, tap_ids, step_size)


@pytest.mark.linux_bits
def test_six_turns_of_the_demo_run_their_new_tokens_only_and_say_the_same():
    demo, tokenizer = specmlx.load()
    model = Counting(demo.args)
    model.update(demo.parameters())
    model.attach(specmlx.load_drafter("demo/dspark", model))
    warm, cold = Dialogue(model, tokenizer, max_tokens=40), Dialogue(model, tokenizer, max_tokens=40)
    cold.prompt_cache = PromptCache(max_bytes=0)
    for turn in range(6):
        question = f"Can you count from {10 + turn} up to {22 + turn}?"
        held, model.rows = len(warm.tokens), 0
        responses, text = ask(warm, question)
        # But for the closing of the last answer, nothing before the question is run again.
        assert model.rows == responses[0].prompt_tokens - responses[0].cached_tokens - 1
        assert model.rows <= responses[0].prompt_tokens - held
        assert ask(cold, question)[1] == text
    assert warm.tokens == cold.tokens and len(warm.tokens) > 128
    assert warm.prompt_cache.counters.hits == 5


def test_a_question_stopped_while_it_is_read_is_as_if_never_asked(pair):
    talk, other = dialogue(pair, max_tokens=8), dialogue(pair, max_tokens=8)
    first = ask(talk, "One?")[1]
    assert ask(other, "One?")[1] == first

    def stop(processed, total):
        if processed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(talk.ask("Something long. " * 20, stop))
    again = [r.token for r in ask(talk, "Two?")[0]]
    assert again == [r.token for r in ask(other, "Two?")[0]]
    assert talk.tokens == other.tokens
    assert talk.messages == other.messages


def test_chat_answers_forgets_and_quits(directory):
    result = run("chat", "--model", directory, "-m", 6, stdin="Hello\nHello\nh\n\nr\nHello\nq\nHello\n")
    assert result.exit_code == 0
    assert result.stderr.count("generated tokens") == 3
    statistics = [line for line in result.stderr.splitlines() if "generated tokens" in line]
    first, _, third = (line.split(" generated")[0] for line in statistics)
    assert first == third
    assert result.stderr.count("forgets the conversation") == 2
    assert "forgotten" in result.stderr
    single = run("generate", "--model", directory, "-m", 6, "-p", "Hello").stdout
    assert result.stdout.startswith(single) and result.stdout.endswith("\n" + single)


@pytest.mark.parametrize("word", ["q", "quit", "exit", " /exit "])
def test_a_chat_is_left_by_the_words_of_other_programs_too(word, directory):
    result = run("chat", "--model", directory, "-m", 3, stdin=f"/help\n{word}\nHello\n")
    assert result.exit_code == 0 and result.stdout == ""
    assert result.stderr.count("q (quit, exit, /exit) quits") == 2


def test_the_budget_of_bytes_is_kept(directory):
    chat = ("chat", "--model", directory, "-m", 6, "--prompt-cache-bytes")
    found = [run(*chat, budget, stdin="Hello\nHello\n") for budget in (1 << 24, 0)]
    assert found[0].stdout == found[1].stdout
    assert [result.stderr.count("of them cached") for result in found] == [1, 0]
    refused = run(*chat, -1, stdin="Hello\n")
    assert refused.exit_code == 2 and "-1" in refused.stderr and refused.stdout == ""


def test_show_draft_colours_drafted_tokens_on_demand(directory):
    flags = ("--model", directory, "-m", 30, "--num-draft-tokens", 4, *OFTEN)
    common = ("chat", *flags)
    plain = run(*common, stdin="Hello\n").stdout
    piped = run(*common, "--show-draft", stdin="Hello\n").stdout
    coloured = run(*common, "--show-draft", "--color", stdin="Hello\n").stdout
    assert piped == plain
    assert coloured.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain
    alone = run("generate", *flags, "-p", "Hello", "--json")
    assert coloured.count("\x1b[32m") == json.loads(alone.stdout)["accepted"] > 5


def test_ctrl_c_is_obeyed_between_two_tokens(directory, monkeypatch):
    def interrupted(*args, **kwargs):
        for n, response in enumerate(specmlx.stream_generate(*args, **kwargs)):
            if n == 2:
                signal.raise_signal(signal.SIGINT)
            yield response

    monkeypatch.setattr(specmlx.cli.dialogue, "stream_generate", interrupted)
    result = run("chat", "--model", directory, "-m", 9, stdin="Hello\n")
    assert "Stopped.\n" in result.stderr and "and 3 generated tokens" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("when", ["within the answer", "before a question", "while it is saved"])
def test_a_chat_that_is_ended_by_a_signal_keeps_its_session(number, when, directory, tmp_path, monkeypatch):
    file, answers = tmp_path / "chat", []

    def stream(*args, **kwargs):
        for n, response in enumerate(specmlx.stream_generate(*args, **kwargs)):
            if n == 2 and when == "within the answer":
                signal.raise_signal(number)
            answers.append(response)
            yield response

    def lines():
        yield "Hello " * 70
        if when != "while it is saved":
            signal.raise_signal(number)
            yield "Never answered"

    def save(*args):
        if when == "while it is saved":
            signal.raise_signal(number)
        kept(*args)

    kept = PromptCache.save
    monkeypatch.setattr(PromptCache, "save", save)
    monkeypatch.setattr(specmlx.cli.dialogue, "stream_generate", stream)
    monkeypatch.setattr("specmlx.cli.chat._lines", lines)
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGTERM)
    try:
        result = run("chat", "--model", directory, "-m", 9, "--prompt-cache-file", file)
        assert (signal.default_int_handler, before[1]) == (
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGTERM),
        )
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert result.exit_code == (130 if number == signal.SIGINT else 128 + number), result.output
    within = when == "within the answer"
    assert len(answers) <= 3 if within else len(answers) > 3
    model, _ = specmlx.load(directory, draft_model=None)
    cache = specmlx.PromptCache()
    assert cache.load(file, model.fingerprint) == {"model": str(directory)} and len(cache)


def test_ctrl_c_stops_the_answer_and_not_the_chat(directory):
    # The bias forbids the end, so the answer would go on for ever.
    args = ["chat", "--model", str(directory), "-m", "-1", "--logit-bias", json.dumps({2: -100, 0: -100})]
    chat = subprocess.Popen(
        [sys.executable, "-m", "specmlx", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # A test run in the background ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        for _ in range(2):
            chat.stdin.write(b"Hello\n")
            chat.stdin.flush()
            os.read(chat.stdout.fileno(), 1)
            chat.send_signal(signal.SIGINT)
            seen = b""
            while b"peak memory" not in seen:
                seen += os.read(chat.stderr.fileno(), 1000)
                assert chat.poll() is None
            assert b"Stopped." in seen
            rest = b""
            while not rest.endswith(b"\n"):
                rest += os.read(chat.stdout.fileno(), 1000)
        chat.send_signal(signal.SIGINT)
        assert chat.wait(60) == 130
        assert chat.stderr.read() == b""
    finally:
        chat.kill()
        chat.wait()


def test_a_conversation_that_could_not_be_kept_does_not_begin(tmp_path):
    result = run("chat", "--model", "no/model", "--prompt-cache-file", tmp_path / "none" / "chat.safetensors")
    assert result.exit_code == 2 and "there is no directory" in result.stderr and result.stderr.count("\n") == 1


def test_words_that_are_no_text_end_neither_the_chat_nor_an_answer(pair):
    talk = dialogue(pair, max_tokens=4)
    with pytest.raises(ValueError, match="is no character"):
        ask(talk, "a \udcff")
    assert talk.messages == [] and ask(talk, "b")[1]


def test_an_unknown_word_after_a_slash_is_no_question(directory):
    result = run("chat", "--model", directory, "-m", 3, stdin="/reset\n/reset it\n")
    assert "There is no /reset here: q (quit" in result.stderr and result.stderr.count("generated tokens") == 1
