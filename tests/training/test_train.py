"""Training a drafter for a model of one's own: data, answers, steps, interruptions, what comes out."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from click.testing import CliRunner
from demo_kit import DSPARK, TOKENIZER, write, write_model
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from specmlx.cli import main
from specmlx.decoding.policy import Policy
from specmlx.decoding.stats import Stats
from specmlx.demo.export import write_demo
from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig
from specmlx.evaluation.evaluation import Acceptance
from specmlx.generation.generate import stream_generate
from specmlx.loading.load import load, load_drafter
from specmlx.targets.config import HybridConfig
from specmlx.training.answers import Answers, Dialogue, distinct_3grams
from specmlx.training.batches import Batches, arrays
from specmlx.training.dataset import Row, read_rows
from specmlx.training.geometry import KINDS, drafter_config
from specmlx.training.loop import Schedule, train
from specmlx.training.run import Run, Settings, check_room

FORMS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"prompt": "c", "completion": "d", "category": "letters"},
    {"text": "e f g"},
    {"prompt": "h"},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("train") / "target", eos_token_id=[2])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Count from {i} to {i + 5}."}) + "\n" for i in range(60)))
    return path


def write_lm(directory: Path, model_type: str) -> Path:
    """A random model of mlx-lm's with the demo's tokenizer."""
    module = import_module(f"mlx_lm.models.{model_type}")
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, head_dim=16)
    more = dict(num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=5000.0, max_position_embeddings=2048)
    words = dict(vocab_size=1280, tie_word_embeddings=True, eos_token_id=2)
    config = {"model_type": model_type, **words, **sizes, **more}
    mx.random.seed(1)
    write(directory, config, module.Model(module.ModelArgs.from_dict(config)))
    for file in TOKENIZER.glob("*.json"):
        if file.name != "config.json":
            shutil.copy(file, directory)
    return directory


def arguments(target: Path, data: Path, out: Path, *more: str) -> list[str]:
    small = ["--steps", "24", "--checkpoint-every", "5", "--batch-size", "2", "--anchors", "4", "--max-tokens", "6"]
    return ["train", "--model", str(target), "--data", str(data), "--out", str(out), *small, *more]


def files(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in ("model.safetensors", "config.json", "training/answers.jsonl")}


def squares(model, x):
    return ((model(x) - 1) ** 2).mean(), {}


def test_rows_are_read_in_all_forms_up_to_the_turn_that_the_target_is_to_answer(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*FORMS, FORMS[0], "i"]))
    rows = read_rows(path)
    assert [row.messages[-1]["content"] if row.messages else row.text for row in rows] == ["a", "c", "e f g", "h", "i"]
    assert [row.category for row in rows] == ["", "letters", "", "", ""]


def test_a_line_is_what_a_newline_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\ufeff" + "\r\n".join(f'{{"prompt": "a\u2028b\x85{i}"}}' for i in range(3)) + "\n\n", encoding="utf-8"
    )
    assert [row.messages[0]["content"] for row in read_rows(path)] == [f"a\u2028b\x85{i}" for i in range(3)]


def test_tool_arguments_as_json_text_reach_the_template_as_objects_and_others_are_named_by_line(tmp_path):
    class Template:
        has_chat_template = True

        def apply_chat_template(self, messages, **_):
            return [call["function"]["arguments"] for m in messages for call in m.get("tool_calls") or []]

    def line(arguments) -> str:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        turns = [("user", {}), ("assistant", {"tool_calls": [call]}), ("user", {})]
        return json.dumps({"messages": [{"role": role, "content": "Where?", **more} for role, more in turns]})

    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(line, ('{"city": "Rome"}', {"city": "Oslo"}, "", "{city"))))
    *rows, bad = read_rows(path)
    assert [row.ids(Template()) for row in rows] == [[{"city": "Rome"}], [{"city": "Oslo"}], [""]]
    with pytest.raises(ValueError, match="data.jsonl, line 4: a tool call's arguments are no JSON"):
        bad.ids(Template())


def test_a_row_that_the_template_refuses_is_named_before_the_folder_is_made(target, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    settings = Settings(drafter_config(model.config, "dflash", 3), steps=30)
    data = tmp_path / "data.jsonl"
    roles = ["user"] * 5 + ["stranger"] + ["user"] * 5
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": role, "content": "x"}] for i, role in enumerate(roles)]
    data.write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    # As publishers' templates do with a role that they don't know.
    refuse = "{{ raise_exception('no ' + m.role) if m.role == 'stranger' else m.content }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{refuse}{{% endfor %}}"
    with pytest.raises(ValueError, match="data.jsonl, line 6: the chat template fails on .*: no stranger"):
        Run(model, tokenizer, read_rows(data), settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_chat_template_that_is_missing_or_fails_is_one_clear_error():
    row = Row(({"role": "user", "content": "x"},))

    class Refusing:
        has_chat_template = True

        def apply_chat_template(self, *_, **given):
            raise TypeError(f"roles must alternate, thinking {given['enable_thinking']}")

    with pytest.raises(ValueError, match="no chat template: give rows of text"):
        row.ids(SimpleNamespace(has_chat_template=False))
    with pytest.raises(ValueError, match="fails on .*roles must alternate, thinking False"):
        row.ids(Refusing(), {"enable_thinking": False})


def test_a_run_goes_on_with_its_own_settings_rows_and_target_only(target, data, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    rows = read_rows(data)
    settings = Settings(drafter_config(model.config, "dflash", 3), steps=30)
    Run(model, tokenizer, rows, settings, tmp_path)
    assert Run(model, tokenizer, rows[::-1], settings, tmp_path, resume=True).settings.steps == 30
    for changed, says in (
        (dict(steps=31), "steps is 31, but the training in .* has 30"),
        (dict(config=settings.config | {"block_size": 4}), "block_size is 4"),
        (dict(seed=1), "seed is 1"),
    ):
        with pytest.raises(ValueError, match=says):
            Run(model, tokenizer, rows, replace(settings, **changed), tmp_path, resume=True)
    with pytest.raises(ValueError, match="rows of --data are not those"):
        Run(model, tokenizer, rows[1:], settings, tmp_path, resume=True)
    other, _ = load(str(target), draft_model=None, dtype="float16")
    with pytest.raises(ValueError, match="model is not the one"):
        Run(other, tokenizer, rows, settings, tmp_path, resume=True)


def test_a_calibration_that_was_cut_short_begins_again_and_answers_are_counted_once(target, data, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    settings = Settings(drafter_config(model.config, "dflash", 3), steps=None, minutes=1)
    left = [tmp_path / "training" / name for name in ("checkpoint.safetensors", "answers.jsonl")]
    left[0].parent.mkdir()
    for file in left:
        file.with_name(f".{file.name}.1.partial").touch()
    Run(model, tokenizer, read_rows(data), settings, tmp_path)
    for file in left:
        file.write_bytes(b"of a step that nobody timed")
    run = Run(model, tokenizer, read_rows(data), settings, tmp_path, resume=True)
    assert not any(file.exists() for file in left)
    # 20 steps in 10 s, and 10 s for 20 answers: .5 s a step, .5 s a row, each row once.
    run.answers.seconds, run.answers.made = 10.0, 20
    assert run._fitting(20.0) == round((60 - len(run.learned) / 2) / 0.5)


def test_each_step_is_told_of_before_it_is_made(target, data, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    config = drafter_config(model.config, "dflash", 3)
    settings = Settings(config, steps=11, batch_size=1, accumulate=2, anchors=2, max_tokens=4)
    told = []
    records = Run(model, tokenizer, read_rows(data), settings, tmp_path).steps(told.append)
    assert next(records)["step"] == 10 and told == [*range(1, 11)]
    assert next(records)["step"] == 11 and told == [*range(1, 12)]


def test_two_trainings_in_one_folder_keep_out_of_each_others_way(target, data, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    settings = Settings(drafter_config(model.config, "dflash", 3), steps=30)
    run = Run(model, tokenizer, read_rows(data), settings, tmp_path)
    written = {path: path.read_bytes() for path in run.folder.iterdir()}
    with pytest.raises(ValueError, match="another training runs in .*: wait for its end, or choose another"):
        Run(model, tokenizer, read_rows(data), settings, tmp_path, resume=True)
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == written
    del run
    Run(model, tokenizer, read_rows(data), settings, tmp_path, resume=True)


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path):
    out = tmp_path / "not" / "there"
    check_room(out, 1_000_000, lambda path: SimpleNamespace(free=28_000_000))
    with pytest.raises(ValueError, match=f"{tmp_path} has 0.03 GB free: checkpoints need 0.04 GB"):
        check_room(out, 1_500_000, lambda path: SimpleNamespace(free=28_000_000))
    assert not list(tmp_path.iterdir())


def test_prompts_that_leave_no_room_for_an_answer_are_counted_and_nothing_is_made_of_them_alone(target, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i} " + "x" * 20 * (i % 2)}) + "\n" for i in range(12)))
    result = CliRunner().invoke(main, arguments(target, data, tmp_path / "some", "--max-length", "32", "--steps", "4"))
    assert result.exit_code == 0 and "not learned: " in result.stderr and "rows (too long)" in result.stderr
    result = CliRunner().invoke(main, arguments(target, data, tmp_path / "none", "--max-length", "8"))
    assert result.exit_code == 2 and "nothing to learn: every answer loops, or no prompt leaves room" in result.stderr
    assert not (tmp_path / "none" / "model.safetensors").exists()


def test_a_training_that_diverges_ends_in_a_line_with_the_step_and_the_last_good_checkpoint(target, data, tmp_path):
    options = ["--learning-rate", "1e30", "--checkpoint-every", "1"]
    result = CliRunner().invoke(main, arguments(target, data, tmp_path / "out", *options))
    assert result.exit_code == 2 and "a lower --learning-rate may help" in result.stderr
    step, has = (int(x) for x in re.search(r"at step (\d+): .* has step (\d+);", result.stderr).groups())
    assert has == step - 1 and not (tmp_path / "out" / "model.safetensors").exists()


def test_a_dflash_drafter_becomes_a_dflash2_one_that_proposes_the_same_at_first(target, data, tmp_path):
    out = tmp_path / "out"
    still = ["--init", str(target / "dflash"), "--kind", "dflash2", "--learning-rate", "0", "--steps", "1"]
    result = CliRunner().invoke(main, arguments(target, data, out, *still))
    assert result.exit_code == 0, result.stderr
    model, _ = load(str(target), draft_model=None)
    before, after = (load_drafter(str(path), model, draft_quantize="none") for path in (target / "dflash", out))
    assert (before.config.kind, after.config.kind) == ("dflash", "dflash2")
    trunk, grown = (dict(tree_flatten(drafter.model.parameters())) for drafter in (before, after))
    assert all(mx.array_equal(x, grown[name]).item() for name, x in trunk.items())
    width = before.config.hidden_size * len(before.tap_ids)
    features = mx.random.normal((1, 9, width), key=mx.random.key(1))
    rows = []
    for drafter in (before, after):
        context = drafter.new_context()
        drafter.observe(context, mx.zeros((1, 9), dtype=mx.int32), features, 9)
        rows.append(drafter.propose(context, mx.array([5]), drafter.max_width, Policy().at(0)).tokens)
    assert mx.array_equal(*rows).item()


def test_a_drafter_that_can_not_be_trained_is_no_beginning(target, data, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    quantized = build(DrafterConfig.from_dict(DSPARK), model).model
    nn.quantize(quantized, group_size=32, bits=4, class_predicate=lambda name, _: name == "fc")
    config = DSPARK | {"quantization": {"group_size": 32, "bits": 4}}
    write(tmp_path / "quantized", config, quantized)
    settings = Settings(config, init=str(tmp_path / "quantized"))
    with pytest.raises(ValueError, match="is quantized: begin with"):
        Run(model, tokenizer, read_rows(data), settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_question_is_held_out_whatever_stands_around_it(tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(2000)]
    one.write_text("\n".join(lines))
    other.write_text("\n".join(reversed(lines[:1000])))
    held = {row.key for row in read_rows(one) if row.held_out}
    assert 60 <= len(held) <= 140
    assert {row.key for row in read_rows(other) if row.held_out} == held & {row.key for row in read_rows(other)}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: no JSON"),
        ("3", "line 2: a int"),
        ('\n{"prompt": "y"}', "line 2 is empty"),
        ('{"question": "x"}', "line 2: has question"),
        ('{"prompt": ""}', "line 2: prompt must be"),
        ('{"messages": []}', "line 2: messages ask nothing"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: messages ask nothing"),
        ('{"messages": "x"}', "line 2: messages must be"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, says, target, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n' + line)
    result = CliRunner().invoke(main, arguments(target, path, tmp_path / "out"))
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--taps", "7"], "tap 7 can't be used"),
        (["--taps", "x"], "layer numbers"),
        (["--block-size", "1"], "block_size is 1"),
        (["--mask-token-id", "5000"], "5000"),
        (["--resume"], "no training to go on with"),
        (["--minutes", "1"], "can't go together"),
        (["--init", "demo/dflash", "--kind", "dspark"], "is a dflash drafter"),
        (["--init", "demo/dflash", "--block-size", "4"], "--block-size and --init"),
        (["--max-length", "999999999"], "max_length is 999999999"),
        (["--export", "zlab"], "--export zlab holds dflash and dflash2 drafters"),
    ],
)
def test_bad_options_end_in_one_line_and_write_nothing(options, says, target, data, tmp_path):
    result = CliRunner().invoke(main, arguments(target, data, tmp_path / "out", *options))
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert not (tmp_path / "out").exists()


def test_answers_are_the_targets_own_and_made_once(target, data, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    rows = read_rows(data)[:5]
    made = Answers(model, tokenizer, tmp_path / "answers.jsonl", Settings({}, max_tokens=6, max_length=64), max_lanes=3)
    dialogues = made.of(rows)
    for row, dialogue in zip(rows, dialogues, strict=True):
        prompt = row.ids(tokenizer)
        alone = [r.token for r in stream_generate(model, tokenizer, prompt, 6)]
        assert dialogue == Dialogue(prompt + alone, len(prompt))
        weights = arrays([dialogue], 1, np.random.default_rng(0))[1][0, : len(prompt + alone) - 1]
        assert weights.tolist() == [0] * (len(prompt) - 1) + [1] * len(alone)
    # A crash cut the last line short: its answer is made again, the others are read.
    lines = (tmp_path / "answers.jsonl").read_bytes()
    (tmp_path / "answers.jsonl").write_bytes(lines[:-9])
    assert made.of(rows) == dialogues
    fresh = Answers(model, tokenizer, tmp_path / "answers.jsonl", Settings({}, max_tokens=6, max_length=64))
    assert len(fresh._known) == 4
    assert fresh.of(rows) == dialogues and (tmp_path / "answers.jsonl").read_bytes() == lines


def test_an_answer_that_goes_round_in_circles_is_left_out():
    assert distinct_3grams([1, 2, 3] * 20) < 0.1 and distinct_3grams(list(range(30))) == 1


def test_a_step_learns_the_same_whenever_it_is_asked_for(target, data, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    rows = read_rows(data)[:21]

    def batches(name: str) -> Batches:
        settings = Settings({}, max_tokens=5, max_length=64, batch_size=4, anchors=3, seed=7, pool=8)
        return Batches(Answers(model, tokenizer, tmp_path / name, settings), rows, settings)

    one, other = batches("one"), batches("other")
    in_turn = [one(step) for step in range(14)]
    late = other(9)
    assert all(mx.array_equal(a, b).item() for a, b in zip(in_turn[9], late, strict=True))
    assert not mx.array_equal(in_turn[0][0], in_turn[12][0]).item()
    tokens, weights, anchors = (np.array(x) for x in in_turn[3])
    assert tokens.shape[1] == weights.shape[1] + 1 and weights.shape[1] % 16 == 0
    assert all(weights[b, a] == 1 for b, row in enumerate(anchors) for a in row if a >= 0)


@pytest.mark.linux_bits
def test_a_run_killed_at_any_moment_and_resumed_ends_with_the_very_same_files(target, data, tmp_path):
    whole = CliRunner().invoke(main, arguments(target, data, tmp_path / "whole"))
    assert whole.exit_code == 0, whole.stderr
    rng, out, kills = random.Random(3), tmp_path / "killed", 0
    environment = os.environ | {"MLX_DISABLE_COMPILE": "1"}
    while not (out / "README.md").exists():
        resume = ["--resume"] if (out / "training" / "run.json").exists() else []
        command = [sys.executable, "-m", "specmlx", *arguments(target, data, out, *resume)]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        if kills < 4:
            # From here on it writes: answers, log and checkpoints.
            while process.poll() is None and not (out / "training" / "run.json").exists():
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 1.5))
            process.send_signal(signal.SIGKILL if kills % 2 else signal.SIGTERM)
        process.wait()
        kills += 1
    assert kills > 2
    assert files(out) == files(tmp_path / "whole")
    steps = [[json.loads(x)["step"] for x in open(f / "training" / "log.jsonl")] for f in (out, tmp_path / "whole")]
    assert steps[0] == steps[1] == [10, 20, 24]


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_out_serves_the_target_and_says_how_it_was_made(kind, target, data, tmp_path):
    out = tmp_path / kind
    options = ["--kind", kind, "--window", "64", "--export", "speculators"]
    result = CliRunner().invoke(main, arguments(target, data, out, *options))
    assert result.exit_code == 0, result.stderr
    log = [json.loads(line) for line in (out / "training" / "log.jsonl").read_text().splitlines()]
    assert [("held_out_tau" in record) for record in log] == [False, False, True]
    card = (out / "README.md").read_text()
    assert "24 steps" in card and "τ" in card and "texts identical" in card
    assert json.loads((out / "export-speculators" / "config.json").read_text())["speculators_model_type"] == kind
    assert (out / "export-speculators" / "README.md").read_text() == card
    model, tokenizer = load(str(target), draft_model=str(out))
    *_, last = stream_generate(model, tokenizer, "Count.", 6)
    assert last.stats.mode == "speculative" and last.stats.proposed > 0
    report = CliRunner().invoke(
        main,
        [
            "evaluate",
            "--model",
            str(target),
            "--draft-model",
            str(out),
            "--data",
            str(data),
            "-m",
            "6",
            "--json",
            "--limit",
            "8",
        ],
    )
    assert report.exit_code == 0, report.stderr
    found = json.loads(report.stdout)["categories"]["all"]
    assert found["identical"] == found["prompts"] == 8
    assert sum(found["accept_histogram"]) == found["rounds"]
    assert found["acceptance_length"] == pytest.approx(found["tokens"] / found["rounds"])
    assert bool(found["calibration"]) == (kind == "dspark")


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_drafters_are_trained_for_other_models_of_mlx_lms_too(model_type, data, tmp_path):
    lm = write_lm(tmp_path / "lm", model_type)
    out = tmp_path / "out"
    result = CliRunner().invoke(main, arguments(lm, data, out, "--steps", "3", "--export", "deepspec"))
    assert result.exit_code == 0, result.stderr
    assert "texts identical" in result.stderr
    config = json.loads((out / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert config["rope_theta"] == 5000.0 and config["target_layer_ids"] == [1, 2]
    model, tokenizer = load(str(lm), draft_model=str(out))
    *_, last = stream_generate(model, tokenizer, "Count.", 6)
    assert last.stats.mode == "speculative" and last.stats.proposed > 0
    ids = mx.array([[5, 6, 7, 8], [9, 8, 7, 6]])
    logits, taps = model.scored(ids, (0, 2))
    assert mx.array_equal(logits, model.lm(ids)).item() and taps.shape == (2, 4, 128)


def test_a_drafter_that_training_begins_with_is_where_it_begins(target, data, tmp_path):
    start, out = target / "dspark", tmp_path / "out"
    still = ["--init", str(start), "--learning-rate", "0"]
    result = CliRunner().invoke(main, arguments(target, data, out, *still))
    assert result.exit_code == 0, result.stderr
    model, _ = load(str(target), draft_model=None)
    before, after = (load_drafter(str(path), model).model.parameters() for path in (start, out))
    pairs = zip(tree_flatten(before), tree_flatten(after), strict=True)
    assert all(mx.array_equal(a, b).item() for (_, a), (_, b) in pairs)


def test_a_fine_tunes_drafter_begins_where_its_bases_drafter_ended(tmp_path):
    demo = write_demo(tmp_path / "demo")
    model, _ = load(str(demo), draft_model=None)
    linear_to_lora_layers(model, len(model.layers), {"rank": 2, "scale": 1.0, "dropout": 0.0})
    for seed, (_, module) in enumerate(tuned := [x for x in model.named_modules() if isinstance(x[1], LoRALinear)]):
        module.lora_b = 0.05 * mx.random.normal(module.lora_b.shape, key=mx.random.key(seed))
    model.update_modules(tree_unflatten([(name, module.fuse()) for name, module in tuned]))
    mx.save_safetensors(str(demo / "model.safetensors"), dict(tree_flatten(model.parameters())))
    data = tmp_path / "few.jsonl"
    data.write_text("".join((demo / "train.jsonl").read_text().splitlines(keepends=True)[:16]))
    options = ["--init", str(demo / "dspark"), "--steps", "1", "--max-tokens", "40"]
    result = CliRunner().invoke(main, arguments(demo, data, tmp_path / "out", *options))
    assert result.exit_code == 0, result.stderr
    begun = json.loads((tmp_path / "out" / "training" / "log.jsonl").read_text())
    # A drafter with random weights has 1.0.
    assert begun["held_out_tau"] > 4


@pytest.mark.linux_bits
def test_a_training_that_began_with_a_drafter_goes_on_to_the_very_same_weights(target, data, tmp_path):
    model, tokenizer = load(str(target), draft_model=None)
    rows, init = read_rows(data), target / "dspark"
    small = dict(steps=12, batch_size=2, anchors=4, max_tokens=4, pool=4, checkpoint_every=5)
    settings = Settings(json.loads((init / "config.json").read_text()), init=str(init), **small)

    def run(name: str, resume: bool = False) -> Run:
        return Run(model, tokenizer, rows, settings, tmp_path / name, resume)

    whole = run("whole")
    assert [record["step"] for record in whole.steps()] == [10, 12]
    next(run("cut").steps())
    resumed = run("cut", resume=True)
    assert [record["step"] for record in resumed.steps()] == [12]
    pairs = zip(*(tree_flatten(x.drafter.model.parameters()) for x in (whole, resumed)), strict=True)
    assert all(mx.array_equal(a, b).item() for (_, a), (_, b) in pairs)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(target, tmp_path):
    model = nn.Linear(2, 1)

    def batch(step):
        return (mx.full((1, 2), mx.nan if step == 12 else 1.0),)

    with pytest.raises(FloatingPointError, match="at step 13.* has step 10"):
        list(train(model, squares, batch, Schedule(1e-3, 20), tmp_path, checkpoint_every=5))


def test_the_log_of_accumulated_batches_has_the_means_of_all_of_them(tmp_path):
    model = nn.Linear(2, 1)
    model.weight, model.bias = mx.zeros((1, 2)), mx.zeros(1)

    def loss(model, x):
        value, _ = squares(model, x * 0)
        return value * x.mean(), {"tau": x.max()}

    (record,) = train(model, loss, lambda i: (mx.full((1, 2), i + 1.0),), Schedule(0.0, 1), tmp_path, accumulate=3)
    assert (record["loss"], record["tau"]) == (2.0, 2.0)


def test_accumulated_batches_make_the_gradient_of_one_large_batch(tmp_path):
    def run(name, batch, accumulate):
        mx.random.seed(0)
        model = nn.Linear(3, 1)
        list(train(model, squares, batch, Schedule(1e-2, 4), tmp_path / name, accumulate=accumulate))
        return model.weight

    rows = mx.random.normal((4, 2, 3), key=mx.random.key(1))
    large = run("large", lambda step: (mx.concatenate([rows[0], rows[1]]),), 1)
    small = run("small", lambda i: (rows[i % 2],), 2)
    assert mx.allclose(large, small, atol=1e-6).item()


@pytest.mark.parametrize("depth", [4, 8, 24, 48, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_default_geometry_is_one_that_the_loader_takes(kind, depth):
    sizes = dict(
        hidden_size=64,
        intermediate_size=96,
        num_key_value_heads=2,
        num_hidden_layers=depth,
        num_attention_heads=4,
        vocab_size=96,
    )
    config = drafter_config(HybridConfig(**sizes), kind, 95)
    parsed = DrafterConfig.from_dict(config)
    assert parsed.kind == kind and parsed.is_causal is False and parsed.block_size == 8
    assert parsed.target_layer_ids == tuple(sorted(set(parsed.target_layer_ids)))
    assert max(parsed.target_layer_ids) < depth - 1
    assert depth != 64 or parsed.target_layer_ids == (1, 16, 31, 46, 61), "z-lab's own for 64 layers"
    assert depth != 8 or parsed.target_layer_ids == (1, 3, 6), "the demo's"


def test_slots_and_calibration_are_counted_as_by_hand():
    found = Acceptance(
        speculative=[Stats(rounds=3, accept_histogram=[1, 1, 0, 1]), Stats(rounds=1, accept_histogram=[0, 1])]
    )
    assert found.prompts == 2 and found.sums.accept_histogram == [1, 2, 0, 1] and found.sums.rounds == 4
    assert found.slots() == pytest.approx([3 / 4, 1 / 3, 1 / 1])
    found.confidences = [(0.95, True), (0.91, False), (0.12, False)]
    assert found.calibration() == [(0.12, 0.0, 1), (pytest.approx(0.93), 0.5, 2)]
