"""What benchmarks/run.py compares: a pair that nobody trained, and programs that may differ or fail."""

import sys
from pathlib import Path

import click
import pytest
from demo_kit import TOKENIZER

from specmlx.generation.generate import stream_generate
from specmlx.loading.load import load, load_drafter

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bigram  # noqa: E402
import run  # noqa: E402
import worker  # noqa: E402


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return bigram.write_bigram(tmp_path_factory.mktemp("work") / "bigram", TOKENIZER)


@pytest.mark.linux_bits
@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_drafters_that_nobody_trained_are_right_often_and_not_always(pair, kind):
    model, tokenizer = load(str(pair), draft_model=None)
    prompt = tokenizer.encode("Can you count from 62 up to 73?")
    plain = [r.token for r in stream_generate(model, tokenizer, prompt, 64)]
    drafter = load_drafter(str(pair / kind), model)
    *_, last = found = list(stream_generate(model, tokenizer, prompt, 64, drafter, num_draft_tokens="full"))
    assert [r.token for r in found] == plain and len(set(plain)) > 10
    assert 2 < last.stats.acceptance_length < 7


def test_each_program_gets_the_drafters_that_it_reads(pair):
    names = worker.programs(pair).keys()
    assert {"mlx-lm", "specmlx dspark", "mlx-dspark dflash2", "mlx-vlm dspark", "dflash dflash2"} <= names
    assert not {"dflash dspark", "specmlx dflash"} & names


class Said:
    """A program that takes so many seconds, says these tokens, and fails at its nth answer."""

    def __init__(self, name, seconds, tokens=(1, 2, 3), fails_at=None):
        self.name, self.seconds, self.tokens, self.left = name, seconds, list(tokens), fails_at

    def ask(self, prompt, max_tokens):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                return None
        return {"tokens": self.tokens, "seconds": self.seconds, "ttft": 0.1, "passes": 2, "peak_memory": 1.0}


def test_other_tokens_have_no_ratio_and_what_fails_is_told_and_left_out(capsys):
    programs = [Said("mlx-lm", 2.0), Said("fast", 0.5), Said("wrong", 0.1, (1, 2, 4)), Said("late", 1.0, fails_at=3)]
    programs.append(Said("never", 1.0, fails_at=0))
    rows = {row["program"]: row for row in run.compare(programs, [[5], [6]], 1, 8)}
    assert rows.keys() == {"mlx-lm", "fast", "wrong"}
    assert rows["fast"]["ratio"]["median"] == 4 and rows["fast"]["tokens_per_pass"] == 1.5
    assert rows["wrong"]["ratio"] is None and not rows["wrong"]["same_tokens"]
    # mlx-lm's own row is made of its answers around the other's.
    assert rows["mlx-lm"]["ratio"] == {"median": 1, "low": 1, "high": 1}
    told = capsys.readouterr().err
    assert told.count("\n") == 2 and "late: failed while answering" in told and "never: failed while" in told


@pytest.mark.parametrize("fails_at", [0, 2])
def test_without_mlx_lm_there_is_nothing_to_compare(fails_at):
    with pytest.raises(click.ClickException, match="nothing to compare"):
        run.compare([Said("mlx-lm", 1.0, fails_at=fails_at), Said("fast", 0.5)], [[5]], 1, 8)
