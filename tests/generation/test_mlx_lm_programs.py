"""Programs written for mlx-lm print the same under specmlx, with nothing but their import lines changed."""

import contextlib
import importlib
import inspect
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

import specmlx

PROGRAMS = sorted((Path(__file__).parents[1] / "programs").glob("*.py"))
EVERY_IMPORT = r"^from mlx_lm[\w.]* import "
FIRST_IMPORT = r"^from mlx_lm import "


def run(path: Path, model: Path, monkeypatch) -> tuple[str, dict]:
    monkeypatch.setattr(sys, "argv", [str(path), str(model)])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        names = runpy.run_path(str(path), run_name="__main__")
    return out.getvalue(), names


@pytest.fixture(scope="module")
def answers():
    """What each program printed under mlx_lm: run once, compared with twice."""
    return {}


def under_mlx_lm(program: Path, model: Path, monkeypatch, answers) -> str:
    if program.name not in answers:
        answers[program.name], _ = run(program, model, monkeypatch)
    return answers[program.name]


def under_specmlx(program: Path, pattern: str, model: Path, monkeypatch, tmp_path) -> tuple[str, dict]:
    text, lines = re.subn(pattern, "from specmlx import ", program.read_text(), flags=re.M)
    assert lines
    changed = tmp_path / program.name
    changed.write_text(text)
    return run(changed, model, monkeypatch)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_only_the_import_lines_change(program, demo_directory, monkeypatch, tmp_path, answers):
    want = under_mlx_lm(program, demo_directory, monkeypatch, answers)
    got, names = under_specmlx(program, EVERY_IMPORT, demo_directory, monkeypatch, tmp_path)
    assert got == want
    assert len(want) > 200
    assert names["model"].draft_model is not None
    if "response" in names:
        assert names["response"].stats.mode == "speculative"
        assert names["response"].stats.accepted > 0


@pytest.mark.parametrize("program", ["cache_turns", "sampler_processors"])
def test_caches_and_samplers_made_by_mlx_lm_are_taken(program, demo_directory, monkeypatch, tmp_path, answers):
    path = Path(__file__).parents[1] / "programs" / f"{program}.py"
    want = under_mlx_lm(path, demo_directory, monkeypatch, answers)
    got, _ = under_specmlx(path, FIRST_IMPORT, demo_directory, monkeypatch, tmp_path)
    assert got == want


def differences() -> set[str]:
    """What the quickstart says of programs written for mlx-lm, in code font."""
    text = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    section = text.split("## From an mlx-lm program", 1)[1].split("\n## ", 1)[0].split("What is not mlx-lm's", 1)[1]
    return set(re.findall(r"`([^`]+)`", section))


# What only mlx-lm's own command needs.
COMMAND = {"main", "setup_arg_parser", "str2bool"}


@pytest.mark.parametrize("module", ["mlx_lm", "mlx_lm.generate", "mlx_lm.sample_utils", "mlx_lm.models.cache"])
def test_every_public_name_of_mlx_lm_is_there_or_listed_as_a_difference(module):
    importlib.import_module(module)
    # mlx_lm has a function of its module's name.
    home = sys.modules[module]
    own = [
        name for name, value in vars(home).items() if getattr(value, "__module__", None) == module and callable(value)
    ]
    listed = getattr(home, "__all__", own)
    names = {name for name in listed if not name.startswith("_")} - COMMAND
    assert len(names) >= 5
    assert names - set(specmlx.__all__) - differences() == set()


def test_every_option_of_mlx_lms_functions_is_there_or_listed_as_a_difference():
    import mlx_lm

    step = inspect.signature(sys.modules["mlx_lm.generate"].generate_step).parameters
    for name in ("load", "generate", "stream_generate", "batch_generate"):
        want = {*inspect.signature(getattr(mlx_lm, name)).parameters, *(step if name == "stream_generate" else ())}
        have = set(inspect.signature(getattr(specmlx, name)).parameters)
        assert want - have - {"kwargs"} <= differences(), name


def test_a_cache_is_trimmed_as_far_as_it_can_be(demo_directory):
    from mlx_lm.models.cache import KVCache

    model, tokenizer = specmlx.load(demo_directory)
    conversation = specmlx.make_prompt_cache(model)
    specmlx.generate(model, tokenizer, "Hello", max_tokens=4, prompt_cache=conversation)
    held = list(conversation.tokens)
    assert not specmlx.can_trim_prompt_cache(conversation) and specmlx.trim_prompt_cache(conversation, 2) == 0
    assert conversation.tokens == held
    stock = KVCache()
    stock.offset = 5
    assert specmlx.can_trim_prompt_cache([stock]) and specmlx.trim_prompt_cache([stock], 2) == 2 and stock.offset == 3
