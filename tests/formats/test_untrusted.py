"""What a file says is data: never an option, never code, and never a terminal's command."""

import inspect
import io
import json
import os
import shutil
import stat
import sys
import unicodedata

import mlx.core as mx
import pytest
from click.testing import CliRunner
from demo_kit import write_model
from transformers import PreTrainedTokenizerBase

import specmlx
from specmlx import PromptCache
from specmlx.cli import main
from specmlx.formats.printable import printable

CODE = """from pathlib import Path
Path(__file__).with_name("ran").write_text("x")
from transformers import PreTrainedTokenizerFast
class T(PreTrainedTokenizerFast): pass
"""


def run(*args, stdin=None):
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin, color=True)


def refused(*args) -> str:
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(directory):
    return specmlx.load(directory, draft_model=None)


@pytest.fixture(params=["prompts", "conversation", "mlx-lm's"])
def saved(request, pair, tmp_path):
    """A function that writes a cache of 70 tokens with metadata, in one of three formats."""
    model, tokenizer = pair
    kind, file = request.param, tmp_path / "cache.safetensors"
    cache = {
        "prompts": lambda: PromptCache(keep_answers=True),
        "conversation": lambda: specmlx.make_prompt_cache(model),
        "mlx-lm's": model.make_cache,
    }[kind]()
    list(specmlx.stream_generate(model, tokenizer, [5] * 70, 2, prompt_cache=cache))

    def save(**metadata):
        cache.save(file, metadata) if kind == "prompts" else specmlx.save_prompt_cache(str(file), cache, metadata)
        return file

    return save


def test_a_cache_file_turns_on_no_remote_code(saved, directory, tmp_path):
    evil = shutil.copytree(directory, tmp_path / "evil")
    (evil / "evil.py").write_text(CODE)
    config = json.loads((evil / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "evil.T"]}, "tokenizer_class": "T"}
    (evil / "tokenizer_config.json").write_text(json.dumps(config))
    settings = json.dumps({"trust_remote_code": True, "revision": "x", "cache_dir": str(tmp_path / "hub")})
    file = saved(model=str(evil), tokenizer_config=settings, trust_remote_code="true")
    # Without that code transformers reads the same files by itself.
    run("generate", "--prompt-cache-file", file, "-m", 2)
    assert not (evil / "ran").exists() and not (tmp_path / "hub").exists()


@pytest.mark.parametrize("kind", ["AutoProcessor", "AutoTokenizer", "RagTokenizer", "pipeline", ["T"]])
def test_a_tokenizers_class_is_a_tokenizer_so_that_no_answer_on_stdin_runs_code(kind, directory, tmp_path):
    evil = shutil.copytree(directory, tmp_path / "evil")
    (evil / "evil.py").write_text(CODE)
    code = {"auto_map": {"AutoProcessor": "evil.T", "AutoTokenizer": [None, "evil.T"]}}
    (evil / "processor_config.json").write_text(json.dumps(code))
    config = json.loads((evil / "tokenizer_config.json").read_text())
    (evil / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": kind}))
    result = run("chat", "--model", evil, "--draft-model", "none", "-m", 1, stdin="y\n")
    assert result.exit_code == 2 and "is no tokenizer" in result.stderr and result.stderr.count("\n") == 1
    assert not (evil / "ran").exists()


@pytest.mark.parametrize("name", ["owner/name", "demo/dspark", "missing", "owner/name@main", "\0"])
def test_a_cache_files_model_is_taken_by_name_only_where_it_is_here(saved, name, monkeypatch):
    monkeypatch.setattr("specmlx.loading.resolve.download", None)
    assert f"belongs to the model {name}".rstrip("\0 ") in refused("generate", "--prompt-cache-file", saved(model=name))


def test_a_cache_goes_on_with_its_model_where_that_is_a_directory_here(saved, directory):
    file = saved(model=str(directory), tokenizer_config="not JSON")
    assert run("generate", "--prompt-cache-file", file, "-m", 2).exit_code == 0
    said = refused("generate", "--model", "demo", "--prompt-cache-file", file)
    assert f"belongs to the model {str(directory)[:100]}" in said


def test_a_drafter_that_a_config_names_is_never_downloaded(directory, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("specmlx.loading.resolve.download", lambda *args: asked.append(args) or directory / "dspark")
    copy = shutil.copytree(directory, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"draft_model": "owner/name"}))
    assert specmlx.load(copy)[0].fallback is None
    local_only = True
    assert asked == [("owner/name", None, local_only)]


def test_settings_of_a_template_are_none_of_the_names_it_is_called_with(directory):
    free = {"tools", "documents", "kwargs"}
    names = [*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"]
    for name in names:
        if name not in free:
            said = refused("generate", "--model", directory, "--chat-template-config", json.dumps({name: "x"}))
            assert f"{name} is no setting of a chat template" in said
    for name in ("tokenizer", "config", "answer_begun", "tools", "enable_thinking", "args"):
        settings = json.dumps({name: []})
        result = run("generate", "--model", directory, "--chat-template-config", settings, "-m", 1)
        assert result.exit_code == 0, result.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_a_terminal(monkeypatch):
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)


RAW = "\x1b[31mred\x1b[0m \x9b2J\u202eevil\u2069\r\n\tçğ世🙂"
SHOWN = "\\x1b[31mred\\x1b[0m \\x9b2J\\u202eevil\\u2069\\r\n\tçğ世🙂"


def test_a_terminal_is_shown_every_control_character_escaped_and_a_pipe_gets_them_as_they_are():
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in range(1 << 16):
        char = chr(code)
        escaped = unicodedata.category(char) in ("Cc", "Cs") or unicodedata.bidirectional(char) in turning
        shown = printable(char, Terminal())
        assert shown == (ascii(char)[1:-1] if escaped and char not in "\n\t" else char)
        assert printable(char, io.StringIO()) == char
    assert printable(RAW, Terminal()) == SHOWN


def test_text_that_comes_byte_by_byte_is_shown_as_one_that_comes_whole(pair, monkeypatch):
    model, tokenizer = pair
    ids = tokenizer.encode(RAW)
    assert len(ids) > len(RAW)

    def next_of(tokens, logits):
        return mx.where(mx.arange(logits.shape[-1]) == ids[len(tokens) - 1], 0.0, -mx.inf)[None]

    given = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        specmlx.generate(model, tokenizer, [5], True, max_tokens=len(ids), logits_processors=[next_of])
        given[type(stream)] = stream.getvalue()
    assert given == {Terminal: SHOWN + "\n", io.StringIO: RAW + "\n"}


def test_commands_show_text_of_models_and_files_escaped_on_a_terminal(pair, directory, tmp_path, request):
    model, tokenizer = pair
    cache, file = PromptCache(keep_answers=True), tmp_path / "cache\x1b[1m.safetensors"
    list(specmlx.stream_generate(model, tokenizer, [5] * 70, 2, prompt_cache=cache))
    cache.save(file, {"model": RAW})
    odd = shutil.copytree(directory, tmp_path / "odd\x1b]0;title\x07")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"model_type": RAW}))
    bias = json.dumps({tokenizer.encode("\x1b")[0]: 1000})
    answers = "--model", directory, "--logit-bias", bias, "-m", 3
    commands = {
        ("cache", "list", file): 0,
        ("inspect", odd): 0,
        ("generate", *answers): 0,
        ("parity", *answers, "-p", "x", "--prefill-step-size", 64, "--draft-model", "ngram"): 0,
        ("chat", *answers, "--show-draft"): 0,
        ("generate", "--prompt-cache-file", file): 2,
        ("generate", "--model", odd): 2,
    }

    def said():
        found = {}
        for args, code in commands.items():
            result = run(*args, stdin="Hello\n" if args[0] == "chat" else None)
            assert result.exit_code == code, result.output
            found[args] = result.stdout + result.stderr
        return found

    piped = said()
    assert "\x1b\x1b\x1b" in piped["generate", *answers] and RAW[:20] in piped["cache", "list", file]
    request.getfixturevalue("on_a_terminal")
    for args, text in said().items():
        for ours in ("\r\x1b[K", "\x1b[32m", "\x1b[0m"):
            text = text.replace(ours, "")
        assert printable(text, Terminal()) == text, args
        if args[0] != "parity":
            assert "\\x1b" in text


def test_a_trace_that_is_no_regular_file_or_too_deep_is_refused_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "deep").write_text("[" * 100_000)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(8 << 30)
    assert "is a FIFO" in refused("view", tmp_path / "fifo")
    assert "is not JSON" in refused("view", tmp_path / "deep")
    assert "no such file has more" in refused("view", tmp_path / "sparse")


def test_what_holds_a_conversation_is_readable_by_its_owner_only(directory, tmp_path):
    trace, page = tmp_path / "trace.json", tmp_path / "trace.html"
    for file in (trace, page):
        file.touch(0o644)
    assert run("generate", "--model", directory, "-m", 2, "--trace", trace).exit_code == 0
    assert run("view", trace).exit_code == 0
    for file in (trace, page):
        assert file.stat().st_size and stat.S_IMODE(file.stat().st_mode) == 0o600
