"""What a file says is data: never an option, never code, and never a terminal's command."""

import inspect
import json
import shutil

import pytest
from click.testing import CliRunner
from demo_kit import write_model
from transformers import PreTrainedTokenizerBase

import specmlx
from specmlx import PromptCache
from specmlx.cli import main

CODE = """from pathlib import Path
Path(__file__).with_name("ran").write_text("x")
from transformers import PreTrainedTokenizerFast
class T(PreTrainedTokenizerFast): pass
"""


def run(*args, stdin=None):
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


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


@pytest.mark.parametrize("name", ["owner/name", "demo/dspark", "missing", "owner/name@main", "\0"])
def test_a_cache_files_model_is_taken_by_name_only_where_it_is_here(saved, name, monkeypatch):
    monkeypatch.setattr("specmlx.places.download", None)
    assert f"belongs to the model {name}".rstrip("\0 ") in refused("generate", "--prompt-cache-file", saved(model=name))


def test_a_cache_goes_on_with_its_model_where_that_is_a_directory_here(saved, directory):
    file = saved(model=str(directory), tokenizer_config="not JSON")
    assert run("generate", "--prompt-cache-file", file, "-m", 2).exit_code == 0
    said = refused("generate", "--model", "demo", "--prompt-cache-file", file)
    assert f"belongs to the model {str(directory)[:100]}" in said


def test_a_drafter_that_a_config_names_is_never_downloaded(directory, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("specmlx.places.download", lambda *args: asked.append(args) or directory / "dspark")
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
