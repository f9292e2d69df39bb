"""What `specmlx bench` measures, and what it says of it."""

import json
import sys

import pytest
from click.testing import CliRunner
from demo_kit import write_model

from specmlx import PromptCache
from specmlx.cli import main
from specmlx.cli.bench import lines
from specmlx.decoding.sampling import make_sampler
from specmlx.decoding.stats import Stats, host_share
from specmlx.evaluation.answer import Answer, answer
from specmlx.evaluation.bench import AlwaysWrong, Spread, differing, measure, table
from specmlx.evaluation.machine import this_machine
from specmlx.evaluation.suites import SUITES, suite
from specmlx.generation.generate import stream_generate
from specmlx.generation.scheduler import Scheduler
from specmlx.loading.load import load


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Hello\n\nTwo\n")
    return file


def sample(seconds: float, accepted: list[int], tokens=(1, 2, 3), ttft=0.1) -> Answer:
    stats = Stats(decode_seconds=seconds)
    for n in accepted:
        stats.begin_round(3)
        for slot in range(n + 1):
            stats.deliver(slot < n)
    return Answer(tuple(tokens), stats=stats, ttft=ttft, seconds=seconds + ttft)


def turn(plain: tuple[float, float], full: tuple[float, float], tokens=(1, 2, 3)):
    return {
        "plain": [sample(seconds, [0, 0, 0]) for seconds in plain],
        "full": [sample(seconds, [1, 0], tokens) for seconds in full],
    }


def test_ratios_are_made_of_the_turns_and_tau_of_the_rounds():
    measured = [[turn((2.0, 2.0), (1.0, 1.0)), turn((4.0, 4.0), (1.9, 2.1))], [turn((1.0, 3.0), (1.0, 1.0))]]
    plain, full = table(measured)
    assert plain.acceptance_length == 1 and plain.decode_ratio is None
    assert full.acceptance_length == 1.5 and full.accept_histogram == (6, 6) and full.acceptance == (0.5,)
    assert full.decode_ratio == Spread(2, 2, 2) and full.decode_ratio.conclusive
    assert full.end_to_end_ratio.median == pytest.approx(4.2 / 2.2)
    assert full.ttft.median == 0.1 and full.answers == 6 and full.tokens == 18


def test_without_the_same_tokens_there_is_no_ratio():
    measured = [[turn((2.0, 2.0), (1.0, 1.0))], [turn((2.0, 2.0), (1.0, 1.0), tokens=(1, 2, 4))]]
    assert differing(measured) == [1]
    assert all(row.decode_ratio is None and row.end_to_end_ratio is None for row in table(measured))


def test_a_spread_larger_than_the_difference_is_called_inconclusive(directory, prompts):
    assert not Spread.of([0.8, 1.1, 1.5, 1.2]).conclusive and Spread.of([1.5, 1.52, 1.48]).conclusive
    result = CliRunner().invoke(main, ["bench", "--model", str(directory), "--prompts", str(prompts), "--json", *QUICK])
    report = json.loads(result.stdout)
    row = report["suites"]["prompts.txt"][1]
    assert "inconclusive: decode, end to end" in "\n".join(lines(report)), "two turns tell nothing"
    row["answers"] = 6
    row["decode_ratio"] = dict(median=1.2, low=0.9, high=1.5)
    row["end_to_end_ratio"] = dict(median=1.2, low=1.1, high=1.2)
    shown = next(line for line in lines(report) if line.startswith("  full "))
    assert shown.endswith("inconclusive: decode") and "1.20 (0.90–1.50)" in shown


QUICK = ["--runs", "1", "-m", "4", "--ignore-chat-template"]


def test_the_command_states_machine_versions_weights_parity_and_figures(directory, prompts, tmp_path):
    output = tmp_path / "out.json"
    command = ["bench", "--model", str(directory), "--prompts", str(prompts), "--output", str(output), *QUICK]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "Every answer was the same in all modes." in result.stdout and "× plain" in result.stdout
    report = json.loads(output.read_text())
    assert {"chip", "backend", "system"} <= report["machine"].keys() and report["versions"]["mlx"]
    assert len(report["model"]["fingerprint"]) == 32 and report["draft_model"]["kind"] == "DSpark"
    rows = report["suites"]["prompts.txt"]
    assert [row["mode"] for row in rows] == ["plain", "full", "auto"] and not report["differing"]
    assert all(row["answers"] == 4 and row["tokens"] == 16 for row in rows)
    assert rows[1]["decode_ratio"]["median"] > 0 and rows[1]["acceptance_length"] >= 1


def test_a_plot_has_the_modes_and_the_machine(directory, prompts, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'specmlx[plot]'")
    picture = tmp_path / "x.svg"
    command = ["bench", "--model", str(directory), "--prompts", str(prompts), "--plot", str(picture), *QUICK]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert all(word in picture.read_text() for word in ("plain", "full", "auto", this_machine().chip))


def test_a_floor_that_is_not_reached_is_exit_code_1(directory, prompts):
    command = ["bench", "--model", str(directory), "--prompts", str(prompts), *QUICK, "--json"]
    result = CliRunner().invoke(main, [*command, "--floor", "1000"])
    assert result.exit_code == 1 and "times plain decoding end to end, less than 1000" in result.stderr
    assert CliRunner().invoke(main, [*command, "--floor", "nan"]).exit_code == 1
    assert CliRunner().invoke(main, [*command, "--floor", "0.0001"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "prose"], "there is no suite prose: choose from code, math, chat, long, hopeless, demo"),
        (["--draft-model", "none"], "nothing to compare"),
        (["--suite", "code", "--prompts", "{file}"], "give one of them"),
        (["--prompts", "{file}"], "holds no prompt"),
        (["--output", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
    ],
)
def test_bad_options_end_in_one_line_before_anything_is_measured(directory, tmp_path, arguments, says):
    file = tmp_path / "empty.txt"
    file.write_text("\n")
    given = [argument.format(file=file) for argument in arguments]
    result = CliRunner().invoke(main, ["bench", "--model", str(directory), *given])
    assert result.exit_code == 2 and says in result.stderr and result.stdout == ""


def test_modes_take_turns_and_the_first_prompt_warms_up(directory):
    model, tokenizer = load(str(directory))
    done = []
    measured = measure(
        model, tokenizer, model.draft_model, [[5, 6], [7]], runs=2, max_tokens=3, progress=lambda: done.append(1)
    )
    assert len(done) == 2 * 2 * 6 and [len(turns) for turns in measured] == [2, 2]
    for turns in measured:
        for each in turns:
            assert {mode: len(samples) for mode, samples in each.items()} == {"plain": 2, "full": 2, "auto": 2}
            for s in (s for samples in each.values() for s in samples):
                assert len(s.tokens) == 3 and 0 < s.ttft <= s.seconds


def test_a_drafter_that_is_always_wrong_costs_what_the_other_does_and_keeps_nothing(directory):
    model, tokenizer = load(str(directory))
    wrong = AlwaysWrong(model.vocab_size)
    plain = answer(Scheduler(model, tokenizer, None), [5, 6, 7], 12)
    drafted = answer(Scheduler(model, tokenizer, num_draft_tokens="full", on_proposal=wrong), [5, 6, 7], 12)
    assert drafted.tokens == plain.tokens and drafted.stats.accepted <= 1 and drafted.stats.proposed > 12


def test_the_suites_are_of_this_package_and_the_same_every_time():
    assert {name: len(suite(name)) for name in SUITES} == {"code": 6, "math": 6, "chat": 6, "long": 2, "hopeless": 6}
    assert suite("long") == suite("long") and len(suite("long")[0]) > 8000


def test_a_profiled_turn_goes_on_with_the_drafters_rows_and_leaves_them_to_the_next_one(directory):
    model, tokenizer = load(str(directory))

    def rows_kept(*profiled: bool) -> list[dict[str, list]]:
        cache, text = PromptCache(keep_answers=True), [5, 6, 7] * 30
        for profile in profiled:
            for r in stream_generate(model, tokenizer, text, 5, prompt_cache=cache, profile=profile):
                text = [*text, r.token]
            text += [8, 9]
        drafts = [draft for _, snapshot, _ in cache.snapshots() for draft in snapshot.drafts.values()]
        return [{name: x.tolist() for name, x in draft.items()} for draft in drafts]

    assert rows_kept(False, False) == rows_kept(True, False) == rows_kept(False, True)


def test_a_profile_takes_the_decoding_of_the_same_text_apart(directory):
    model, tokenizer = load(str(directory))
    options = dict(max_tokens=12, sampler=make_sampler(1.0), seed=2)
    usual = [r.token for r in stream_generate(model, tokenizer, [5, 6, 7], **options, draft_model=None)]
    options |= {"num_draft_tokens": "full", "profile": True}
    *_, last = found = list(stream_generate(model, tokenizer, [5, 6, 7], **options))
    assert [r.token for r in found] == usual
    phases = last.stats.phases
    parts = {"draft", "observe", "verify", "accept", "send and read", "commit", "detokenize", "other host work"}
    assert phases.keys() == parts and 0 < phases["commit"] < last.stats.decode_seconds
    assert host_share(phases) == pytest.approx(
        (phases["commit"] + phases["detokenize"] + phases["other host work"]) / sum(phases.values())
    )
    decoding = sum(seconds for name, seconds in phases.items() if name != "detokenize")
    assert all(seconds >= 0 for seconds in phases.values()) and decoding == pytest.approx(last.stats.decode_seconds)
    assert not found[0].stats.phases.get("other host work")
    result = CliRunner().invoke(main, ["generate", "--model", str(directory), "-m", "4", "--profile"])
    assert result.exit_code == 0 and "verify" in result.stderr and "without --profile they overlap" in result.stderr


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
def test_a_profile_drafts_by_the_very_calls_of_a_run_without_one(drafter, temp, directory):
    model, tokenizer = load(str(directory), draft_model=str(directory / drafter))

    def calls(profile: bool) -> list[str]:
        found = []

        def record(frame, event, arg):
            if event == "call" and "/specmlx/drafters/" in frame.f_code.co_filename.replace("\\", "/"):
                found.append(frame.f_code.co_qualname)

        options = dict(num_draft_tokens=3, seed=1, sampler=make_sampler(temp=temp), profile=profile)
        list(stream_generate(model, tokenizer, "Hello", 4, **options))
        sys.setprofile(record)
        try:
            list(stream_generate(model, tokenizer, "Hello", 16, **options))
        finally:
            sys.setprofile(None)
        # A profile waits for what the drafter holds, and so reads which arrays these are.
        return [name for name in found if ".arrays" not in name]

    plain = calls(False)
    assert calls(True) == plain and any("propose" in name for name in plain)
