"""Parity: what counts as identical, what is shown of a difference, and that mlx-lm's own decoding agrees."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner
from demo_kit import OFTEN, write, write_model

import specmlx
from specmlx.cli import main
from specmlx.decoding.stats import Stats
from specmlx.demo.export import write_demo
from specmlx.evaluation import parity
from specmlx.evaluation.answer import Answer, top_2_margin
from specmlx.evaluation.parity import Difference, Verdict
from specmlx.formats.checkpoint import read_config

STATS = Stats("speculative", None, 2, 6, 3, 5, [1, 0, 0, 1])


def decoded(*tokens, stats=None):
    return Answer(tokens, tuple(0.1 * token for token in tokens), stats=stats)


def test_the_first_difference_has_both_tokens_and_plain_decodings_margin():
    plain = decoded(5, 6, 7)
    found = [
        parity.compare(plain, decoded(*other)).difference for other in ((5, 6, 7), (5, 9, 9), (5, 6), (5, 6, 7, 0))
    ]
    assert found[0] is None
    assert found[1] == Difference(1, 6, 9, pytest.approx(0.6))
    assert found[2] == Difference(2, 7, None, pytest.approx(0.7))
    assert found[3] == Difference(3, None, 0, None)


def test_a_run_in_which_nothing_was_proposed_is_no_pass():
    assert parity.compare(decoded(5), decoded(5, stats=STATS)).passed
    nothing = parity.compare(decoded(5), decoded(5, stats=replace(STATS, proposed=0)))
    assert nothing.identical and not nothing.passed
    assert not parity.compare(decoded(5), decoded(6, stats=STATS)).passed
    assert parity.compare(decoded(5), decoded(5)).passed


def test_totals_add_up_rounds_and_histograms_of_different_lengths():
    sums = parity.total([Verdict(5, None, STATS), Verdict(3, Difference(0, 1, 2, 0.1), Stats(rounds=3, proposed=0))])
    assert (sums.generation_tokens, sums.rounds, sums.proposed, sums.accepted) == (8, 5, 6, 3)
    assert sums.accept_histogram == [1, 0, 0, 1]
    assert sums.acceptance_length == 8 / 5


def test_without_consistent_kernels_the_default_choice_is_what_counts():
    row, told, chosen = {"DFlash": Verdict(5, None, STATS)}, [], []

    def choose(consistent):
        chosen.append(consistent)
        if consistent:
            raise ValueError("consistent can't be had")

    assert list(parity.verdicts_by_choice(lambda: [row], choose, told.append)) == [(True, row)]
    assert chosen == [True, False] and told == ["not with --consistent: consistent can't be had"]
    assert list(parity.verdicts_by_choice(lambda: [row], None, told.append)) == [(True, row)]
    both = list(parity.verdicts_by_choice(lambda: [row], chosen.append, told.append))
    assert both == [(True, row), (False, row)] and len(told) == 1


def test_the_margin_is_that_of_the_two_best():
    assert top_2_margin(mx.array([0.5, -1.0, 2.0, 1.25])) == 0.75
    assert top_2_margin(mx.array([2.0, 1.0, 2.0], dtype=mx.bfloat16)) == 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def quantized(directory, bits):
    """A copy of the directory whose target is quantized by mlx's own function."""
    copy = shutil.copytree(directory, directory.with_name(f"{directory.name}-{bits}bit"))
    model, _ = specmlx.load(directory, draft_model=None)
    nn.quantize(model, group_size=64, bits=bits)
    write(copy, read_config(copy) | {"quantization": {"group_size": 64, "bits": bits}}, model)
    return copy


def run(directory, *args):
    prompts = ["-p", "Hello", "-p", "Which words do you know?"]
    result = CliRunner().invoke(main, ["parity", "--model", str(directory), *prompts, "-m", "24", *map(str, args)])
    assert result.exit_code in (0, 1), result.output
    return result


@pytest.mark.parametrize("bits", [None, 4])
def test_three_ways_give_the_same_tokens(directory, bits):
    model = quantized(directory, bits) if bits else directory
    drafters = ["--draft-model", "auto", "--draft-model", directory / "dflash"]
    # Two tokens by turns: greedy, yet with drafts of both kinds, accepted and rejected.
    bias = ["--logit-bias", json.dumps({50: 30, 60: 30}), "--repetition-penalty", "1.1"]
    result = run(model, *drafters, *bias, "--reference", "mlx-lm", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["passed"]
    assert list(report["comparisons"]) == ["DSpark", str(directory / "dflash"), "mlx-lm"]
    for name, found in report["comparisons"].items():
        assert found["passed"] == found["prompts"] == 2
        assert found["tokens"] == 48
        if name != "mlx-lm":
            assert found["proposed"] > found["accepted"] > 0
            assert sum(found["accept_histogram"]) == found["rounds"] < 48


def test_seeded_sampling_is_compared_too(directory):
    result = run(directory, *OFTEN)
    assert result.exit_code == 0
    first, second, sums = result.stdout.splitlines()
    assert first.startswith("prompt 1 of 2, DSpark: identical, ")
    assert sums.startswith("DSpark: 2 of 2 prompts pass") and "rounds by accepted tokens: 0: " in sums


def test_a_difference_is_shown_with_both_tokens_and_exit_code_1(directory, monkeypatch):
    honest = parity.decode_mlx_lm

    def off_by_one(*args, **kwargs):
        for run in honest(*args, **kwargs):
            yield replace(run, tokens=(*run.tokens[:5], (run.tokens[5] + 1) % 1280, *run.tokens[6:]))

    monkeypatch.setattr(parity, "decode_mlx_lm", off_by_one)
    result = run(directory, "--reference", "mlx-lm", "-m", 8)
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if line.startswith("prompt 2 of 2, mlx-lm: "))
    model, tokenizer = specmlx.load(directory)
    messages = [{"role": "user", "content": "Which words do you know?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    *_, sixth = specmlx.stream_generate(model, tokenizer, prompt, max_tokens=6)
    best, second = sorted(sixth.logprobs.tolist())[:-3:-1]
    plain, other = (f"{token} {tokenizer.decode([token])!r}" for token in (sixth.token, (sixth.token + 1) % 1280))
    assert line == (
        f"prompt 2 of 2, mlx-lm: differs at token 5: plain {plain}, here {other}; top-2 margin {best - second:.3g}"
    )
    assert "mlx-lm: 0 of 2 prompts pass" in result.stdout and "DSpark: 2 of 2 prompts pass" in result.stdout
    report = json.loads(run(directory, "--reference", "mlx-lm", "-m", 8, "--json").stdout)
    found = report["comparisons"]["mlx-lm"]["by_prompt"][1]["difference"]
    assert (found["index"], found["plain"], found["other_text"]) == (
        5,
        sixth.token,
        tokenizer.decode([(sixth.token + 1) % 1280]),
    )


def test_a_width_of_zero_is_no_pass(directory):
    result = run(directory, "--num-draft-tokens", "0", "-m", "3")
    assert result.exit_code == 1
    assert "no pass: nothing was proposed for 3 tokens" in result.stdout


def test_prompts_come_from_a_file_one_a_line(directory, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("One?\n\nTwo? Zwölf?\n", encoding="utf-8")
    args = ["parity", "--model", str(directory), "--prompts", str(file), "-m", "2", "--json"]
    report = json.loads(CliRunner().invoke(main, args).stdout)
    assert [entry["prompt"] for entry in report["comparisons"]["DSpark"]["by_prompt"]] == ["One?", "Two? Zwölf?"]


@pytest.mark.parametrize(
    "args",
    [
        ["--temp", "0.8"],
        ["--temp", "0.8", "--seed", "1", "--reference", "mlx-lm"],
        ["--draft-model", "none"],
        ["--num-draft-tokens", "9"],
        ["--prompt", ""],
        ["--prompt", "Hello", "--prompts", __file__],
        ["--prompts", "missing.txt"],
        ["--reference", "vllm"],
    ],
    ids=" ".join,
)
def test_bad_flags_end_in_one_line(args, directory):
    result = CliRunner().invoke(main, ["parity", "--model", str(directory), *args])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_a_target_without_a_drafter_is_compared_with_prompt_lookup(directory, tmp_path):
    alone = tmp_path / "alone"
    shutil.copytree(directory, alone, ignore=shutil.ignore_patterns("dflash", "dspark"))
    result = CliRunner().invoke(main, ["parity", "--model", str(alone), "--prompt", "Hello", "--max-tokens", "8"])
    assert result.exit_code == 0 and "took prompt lookup" in result.stderr


@pytest.mark.parametrize(
    "bits, changes, prompts",
    [
        (None, (), 20),
        (4, (), 20),
        (8, (), 20),
        (None, ("--dtype", "bfloat16"), 20),
        pytest.param(None, (), 60, marks=pytest.mark.slow),
    ],
    ids=["fp32", "4-bit", "8-bit", "bf16", "fp32, 60 prompts"],
)
def test_the_demo_pair_gives_the_tokens_of_mlx_lm(bits, changes, prompts, tmp_path):
    pair = write_demo(tmp_path / "pair", bits=bits)
    questions = (pair / "prompts.txt").read_text().splitlines()
    # Of every kind, one at least.
    (pair / "prompts.txt").write_text("\n".join(questions[:: len(questions) // prompts]))
    drafters = ["--draft-model", str(pair / "dflash"), "--draft-model", str(pair / "dspark")]
    args = [
        "parity",
        "--model",
        str(pair),
        "--prompts",
        str(pair / "prompts.txt"),
        *drafters,
        "--reference",
        "mlx-lm",
        "--json",
        *changes,
    ]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    comparisons = json.loads(result.stdout)["comparisons"]
    assert list(comparisons) == [str(pair / "dflash"), str(pair / "dspark"), "mlx-lm"]
    for name, found in comparisons.items():
        assert found["passed"] == found["prompts"] == prompts
        assert found["tokens"] >= 25 * prompts
        if name != "mlx-lm":
            assert found["acceptance_length"] > 4
            # Every accepted count, 0 to the drafter's most.
            assert len(found["accept_histogram"]) == read_config(Path(name))["block_size"] + name.endswith("dspark")
            assert prompts < 60 or min(found["accept_histogram"]) > 0


def test_the_demo_pair_samples_the_same_with_and_without_a_drafter():
    drafters = ["--draft-model", "demo/dflash", "--draft-model", "demo/dspark"]
    args = ["parity", "--temp", "0.8", "--seed", "1", *drafters, "--json"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert all(found["prompts"] == 15 for found in json.loads(result.stdout)["comparisons"].values())


def test_an_export_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    for args in ([str(tmp_path)], [str(tmp_path / "kept.txt")], [str(tmp_path / "new"), "--bits", "7"]):
        result = CliRunner().invoke(main, ["demo-export", *args])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
    with pytest.raises(ValueError, match="groups of 48"):
        write_demo(tmp_path / "new", bits=4, group_size=48)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_an_export_that_fails_leaves_nothing_in_the_way_of_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("specmlx.demo.export.held_out_examples", lambda n: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_demo(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "new").mkdir()
    assert (write_demo(tmp_path / "new") / "prompts.txt").is_file()


def test_a_limit_takes_the_first_prompts(directory):
    report = json.loads(run(directory, "--limit", "1", "--json").stdout)
    assert [found["prompt"] for found in report["comparisons"]["DSpark"]["by_prompt"]] == ["Hello"]
