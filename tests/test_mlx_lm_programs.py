"""Programs written for mlx-lm print the same under specmlx, with nothing but their import lines changed."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
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
    path = Path(__file__).parent / "programs" / f"{program}.py"
    want = under_mlx_lm(path, demo_directory, monkeypatch, answers)
    got, _ = under_specmlx(path, FIRST_IMPORT, demo_directory, monkeypatch, tmp_path)
    assert got == want
