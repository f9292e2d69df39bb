"""The trained drafters of the demo: text as without them, acceptance, and what quantized projections draft."""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten

import specmlx.demo
from specmlx.cli import main
from specmlx.demo.drafting import DRAFTERS, measure, run, same_slots
from specmlx.demo.tasks import held_out_examples
from specmlx.generation.batch import batch_generate
from specmlx.loading.load import load, load_drafter

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from make_demo.pair import DRAFTER_CONFIGS, MTP_CONFIG, VOCABULARY, train_drafter  # noqa: E402

HERE = Path(specmlx.demo.__file__).parent


@pytest.fixture(scope="module")
def demo():
    target, tokenizer = load("demo", draft_model=None)
    return target, tokenizer


def prompts(tokenizer, per_kind: int = 1) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": example.question}], add_generation_prompt=True)
        for example in held_out_examples(per_kind)
    ]


@pytest.fixture(scope="module")
def plain(demo):
    """Questions, and their answers without a drafter."""
    target, tokenizer = demo
    asked = prompts(tokenizer)[2::4]
    return asked, {mode: run(target, tokenizer, asked, None, mode)[0] for mode in ("greedy", "seeded")}


@pytest.mark.parametrize(("name", "least"), [("demo/dflash2", 6.0), ("demo/mtp", 5.0), ("ngram", 1.05)])
def test_text_is_the_plain_text_and_most_of_it_is_drafted(name, least, demo, plain):
    target, tokenizer = demo
    asked, texts = plain
    for mode in texts:
        drafted, tau = run(target, tokenizer, asked, load_drafter(name, target), mode)
        assert drafted == texts[mode]
        assert tau >= least, mode


@pytest.mark.parametrize("name", ["demo/dflash2", "demo/mtp", "ngram"])
def test_lanes_of_a_batch_are_given_what_they_would_be_alone(name, demo, plain):
    target, tokenizer = demo
    asked, alone, drafter = plain[0], plain[1]["greedy"], load_drafter(name, target)
    options = dict(max_tokens=160, num_draft_tokens="full", return_token_ids=True)
    together = batch_generate(target, tokenizer, asked, draft_model=drafter, **options)
    assert together.token_ids == [text[:-1] for text in alone]
    assert together.stats.passes < max(map(len, alone))


@pytest.mark.parametrize("name", ["demo/dflash", "demo/dflash2", "demo/dspark", "demo/mtp"])
def test_projections_in_8_bits_propose_the_same_tokens_in_95_percent_of_200_blocks_slots(name, demo):
    target, tokenizer = demo
    answers = [tokenizer.encode(example.answer, add_special_tokens=False) for example in held_out_examples(3)]
    whole, cheap = (load_drafter(name, target, draft_quantize=bits) for bits in ("none", "8"))
    assert 0.95 <= same_slots(target, whole, cheap, prompts(tokenizer, 3), answers) <= 1


def test_a_shortlist_of_the_demos_frequent_tokens_drafts_the_same_text(demo):
    target, tokenizer = demo
    ids = json.loads((HERE / "target" / "token_frequencies.json").read_text())
    assert sorted(ids) == list(range(VOCABULARY))
    report = measure(target, tokenizer, prompts(tokenizer)[:1], ("ngram",), "demo/dspark")
    assert all(f["identical"] for f in [*report["drafters"].values(), *report["settings"]])


def test_cheaper_drafters_are_compared_and_answer_on_the_command_line():
    prompt = ["--prompt", "Can you count from 62 up to 65?", "--max-tokens", "24"]
    cheaper = ["--draft-quantize", "8", "--draft-vocab", "640"]
    args = [*prompt, "--draft-model", "demo/dflash2", "--draft-model", "demo/mtp", *cheaper, "--json"]
    result = CliRunner().invoke(main, ["parity", *args])
    assert result.exit_code == 0, result.stderr
    assert list(json.loads(result.stdout)["comparisons"]) == ["demo/dflash2", "demo/mtp"]
    result = CliRunner().invoke(main, ["generate", *prompt, "--draft-model", "ngram", "--draft-quantize", "8"])
    assert result.exit_code == 2 and "a NGram drafter has no use for it" in result.stderr
    result = CliRunner().invoke(main, ["generate", *prompt, "--draft-markov-top-k", "64", "--verbose", "false"])
    assert result.exit_code == 0 and result.stdout.startswith("62 63 64 65 ")


def test_the_embedded_drafters_are_those_that_the_code_trains_and_fit_in_the_wheel():
    stored = {name: json.loads((HERE / name / "config.json").read_text()) for name in (*DRAFTER_CONFIGS, "mtp")}
    assert stored == {**DRAFTER_CONFIGS, "mtp": MTP_CONFIG}
    assert set(DRAFTERS) == {f"demo/{name}" for name in stored} | {"ngram"}
    weights = list(HERE.glob("*/model.safetensors"))
    assert len(weights) == 5
    assert sum(file.stat().st_size for file in weights) <= 8e6
    assert all(w.dtype == mx.float16 for file in weights for w in mx.load(str(file)).values())


def test_the_demos_drafters_are_made_by_the_run_that_specmlx_train_drives(tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    for folder in ("target", "dflash"):
        shutil.copytree(HERE / folder, out / folder)
    made = train_drafter("dflash2", out, work, 1).model
    log = work / "dflash2" / "training" / "log.jsonl"
    assert json.loads(log.read_text())["tau"] > 5, "it begins with the trained DFlash"
    again = train_drafter("dflash2", out, work, 1).model
    pairs = zip(tree_flatten(made.parameters()), tree_flatten(again.parameters()), strict=True)
    assert all(mx.array_equal(a, b).item() for (_, a), (_, b) in pairs)
    answers = (work / "dflash2" / "training" / "answers.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in answers if "ids" in json.loads(line)]
    assert len(answers) >= 64 and all(answer["ids"][-1] == 2 for answer in kept), "the target's own, to their end"
