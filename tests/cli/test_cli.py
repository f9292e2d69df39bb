"""The command line: answers on stdout, the rest on stderr, errors in one line; chats that send only what is new."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from demo_kit import OFTEN, write_model

import specmlx
from specmlx.cli import main
from specmlx.cli.generate import PROMPT
from specmlx.decoding.stats import Stats
from specmlx.formats.checkpoint import read_config
from specmlx.generation.responses import GenerationResponse, summary

FIELDS = """text tokens prompt_tokens cached_tokens generation_tokens rounds draft_passes proposed accepted
    acceptance_length accept_histogram prefill_seconds decode_seconds phases prompt_tps generation_tps end_to_end_tps
    peak_memory finish_reason mode reason"""
# As fast as it is on a busy machine, drafting may not pay: then a request decodes plainly, and says so.
FULL = ["--num-draft-tokens", "full"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(directory):
    return specmlx.load(directory)


def run(*args, stdin=None):
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def answer(*args, stdin=None):
    result = run("generate", *args, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout.removesuffix("\n")


def as_json(*args):
    return json.loads(answer(*args, "--json"))


def subprocess_of(*args, **options):
    return subprocess.run([sys.executable, "-m", "specmlx", *map(str, args)], capture_output=True, text=True, **options)


def test_help_lists_the_commands_without_importing_mlx():
    code = "import sys; from specmlx.cli import main; main(standalone_mode=False); print('mlx' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert all(f"\n  {name} " in result.stdout for name in ("generate", "chat", "parity", "demo-export"))
    assert result.stdout.endswith("False\n")
    assert run("--version").stdout == f"main, version {specmlx.__version__}\n"


def test_what_small_files_tell_is_said_before_what_takes_seconds_to_import(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    begun = tmp_path / "begun"
    (begun / "training").mkdir(parents=True)
    (begun / "training" / "run.json").write_text("{}")
    wrong = {
        "no such directory": ["generate", "--model", tmp_path / "nowhere"],
        "temp is -1.0: it must be a finite number of at least 0": ["chat", "--temp", "-1"],
        "config.json lacks hidden_size": ["parity", "--model", tmp_path],
        "is a drafter (DFlashDraftModel)": ["generate", "--model", "demo/dflash"],
        "no demo part named": ["bench", "--draft-model", "demo/nothing"],
        "can't serve this target: ": ["generate", "--draft-model", tmp_path],
        "the demo's drafter is demo/dflash2": ["generate", "--draft-model", "dflash2"],
        "demo is a target; its drafters are demo/dflash, demo/dflash2, demo/dspark, demo/mtp": [
            *("generate", "--draft-model", "demo")
        ],
        f"config.json is a file: name its directory, {tmp_path}": ["chat", "--model", tmp_path / "config.json"],
        "no such command: generaet; did you mean generate?": ["generaet"],
        f"holds an unfinished training: go on with specmlx train … --out {begun} --resume": [
            *("generate", "--draft-model", begun)
        ],
    }
    (tmp_path / "commands.json").write_text(json.dumps([list(map(str, args)) for args in wrong.values()]))
    code = """
import json, sys
from click.testing import CliRunner
from specmlx.cli import main
for args in json.load(open(sys.argv[1])):
    print(CliRunner().invoke(main, args).stderr.strip())
print("mlx_lm" in sys.modules)
"""
    commands = [sys.executable, "-c", code, str(tmp_path / "commands.json")]
    said = subprocess.run(commands, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == len(wrong) + 1 and said[-1] == "False"
    for word, line in zip(wrong, said, strict=False):
        assert line.startswith("Error: ") and word in line


def test_the_answer_alone_is_on_stdout(directory, pair):
    result = subprocess_of("generate", "--model", directory, "--prompt", "Hello", "-m", 12, *FULL)
    model, tokenizer = pair
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert result.stdout == specmlx.generate(model, tokenizer, prompt, max_tokens=12) + "\n"
    mode, statistics = result.stderr.splitlines()
    assert mode.endswith("speculative decoding with DSpark, up to 4 drafted tokens a pass")
    assert "12 generated tokens" in statistics and statistics.endswith("speculative")
    assert result.returncode == 0


@pytest.mark.parametrize("name", ["doctor", "bench", "roofline", "view", "generate"])
def test_help_has_an_example(name):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0 and re.search(rf"Examples:\n(.*\n)* +specmlx {name}\b", result.stdout)


def test_the_first_line_promises_no_drafting_that_may_not_pay_and_the_last_one_says_what_was_done(directory):
    first, _ = run("generate", "--model", directory, "-p", "Hello", "-m", 4).stderr.splitlines()
    assert first.endswith("DSpark drafts 0 (plain decoding) to 4 tokens a pass, whatever is fastest")
    stats = Stats("speculative", generation_tokens=8)
    for proposed in (0, 3, 0, 0):
        stats.begin_round(proposed)
    response = GenerationResponse("", 1, None, False, 5, 1.0, 8, 1.0, 0.0, "length", stats)
    assert summary(response).endswith("speculative in 25% of the passes, plain in 75%")


def test_the_prompt_that_is_answered_where_none_is_given_is_told_and_stdin_is_left_alone(directory):
    told, *_ = run("generate", "--model", directory, "-m", 2, stdin="Hello\n").stderr.splitlines()
    assert told == f'no --prompt (- reads stdin), so this one is answered: "{PROMPT}"'
    assert "no --prompt" not in run("generate", "--model", directory, "-m", 2, "-p", PROMPT).stderr


def test_an_error_is_one_line_on_stderr_and_exit_code_2(tmp_path):
    result = subprocess_of("generate", "--model", tmp_path / "nowhere")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: no such directory: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "--model", "missing/model"],
        ["generate", "--no-such-flag"],
        ["generate", "--max-tokens", "0"],
        ["parity", "--model", "./missing"],
        ["bench", "--model", "./missing"],
        ["evaluate", "--data", "missing.jsonl"],
        ["inspect", "./missing"],
        ["roofline", "--chip", "no such chip"],
        ["kernels", "--off", "nothing"],
        ["models", "extra"],
        ["doctor", "extra"],
        ["generat"],
    ],
    ids=" ".join,
)
def test_with_json_a_failure_is_one_object_too(args):
    result = run(*args, "--json")
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert json.loads(result.stdout) == {"error": result.stderr.removeprefix("Error: ").removesuffix("\n")}
    assert run(*args).stdout == ""


def test_json_is_one_object_with_every_figure(directory, pair):
    got = as_json("--model", directory, "-p", "Hello", "-m", 40, *OFTEN, *FULL)
    assert list(got) == FIELDS.split()
    assert got["generation_tokens"] == len(got["tokens"]) == got["accepted"] + got["rounds"]
    assert got["proposed"] > got["accepted"] > 10
    assert sum(got["accept_histogram"]) == got["rounds"]
    assert got["text"] == pair[1].decode([token for token in got["tokens"] if token != 2])
    assert got["finish_reason"] == ("stop" if got["tokens"][-1] == 2 else "length")
    assert got["end_to_end_tps"] < got["generation_tps"]


def test_a_seed_gives_the_same_text_with_any_drafter_or_none(directory):
    common = ("--model", directory, "-m", 40, *OFTEN)
    plain = as_json(*common, "--draft-model", "none")
    assert (plain["mode"], plain["reason"]) == ("plain", "draft_model is None")
    for drafter in ("auto", directory / "dflash"):
        for width in (1, 3):
            got = as_json(*common, "--draft-model", drafter, "--num-draft-tokens", width)
            assert got["mode"] == "speculative" and got["accepted"] > 5
            assert got["tokens"] == plain["tokens"]
    assert as_json(*common, "--seed", 4)["tokens"] != plain["tokens"]


def test_a_prompt_comes_from_stdin_and_through_the_template(directory, pair):
    model, tokenizer = pair
    common = ("--model", directory, "-m", 8)
    assert answer(*common, "-p", "-", stdin="Hello\n") == answer(*common, "-p", "Hello")
    assert answer(*common, "-p", r"a\nb") == answer(*common, "-p", "a\nb")
    raw = as_json(*common, "-p", "Hello", "--ignore-chat-template")
    assert raw["prompt_tokens"] == len(tokenizer.encode("Hello"))
    begun = as_json(*common, "-p", "Hello", "--system-prompt", "Be kind.", "--prefill-response", "Well")
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nWell"
    want = specmlx.generate(model, tokenizer, tokenizer.encode(text), max_tokens=8)
    assert begun["text"] == want


def test_stop_strings_and_stop_tokens_end_the_answer(directory, pair):
    common = ("--model", directory, "-m", 40, *OFTEN, "--logit-bias", json.dumps({50: 30, 60: 30, 70: 30}))
    whole = as_json(*common)
    assert whole["finish_reason"] == "length"
    stop = whole["text"][3:5]
    stopped = as_json(*common, "--stop", "never", "--stop", stop)
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    token = whole["tokens"][5]
    word = pair[1].convert_ids_to_tokens(token)
    ended = as_json(*common, "--extra-eos-token", word)
    assert ended["tokens"] == as_json(*common, "--extra-eos-token", str(token))["tokens"]
    assert ended["tokens"] == whole["tokens"][: whole["tokens"].index(token) + 1]
    assert ended["finish_reason"] == stopped["finish_reason"] == "stop"


def test_a_saved_conversation_is_gone_on_from(directory, pair, tmp_path):
    model, tokenizer = pair
    cache = specmlx.make_prompt_cache(model)
    head = tokenizer.encode("<|im_start|>user\nThe word is moon. ")
    for _ in specmlx.stream_generate(model, tokenizer, head, max_tokens=1, prompt_cache=cache):
        pass
    cache.pending = None
    specmlx.save_prompt_cache(tmp_path / "head.safetensors", cache, {"model": str(directory)})
    tail = tokenizer.encode("Which word?<|im_end|>\n<|im_start|>assistant\n")
    want = specmlx.generate(model, tokenizer, head + tail, max_tokens=12)
    assert answer("--prompt-cache-file", tmp_path / "head.safetensors", "-p", "Which word?", "-m", 12) == want
    result = run("generate", "--model", "other/model", "--prompt-cache-file", tmp_path / "head.safetensors")
    assert result.exit_code == 2 and "belongs to the model" in result.stderr


def test_verbose_false_prints_the_answer_only(directory):
    result = run("generate", "--model", directory, "-m", 3, "--verbose", "F")
    assert result.stdout and result.stderr == ""


@pytest.mark.parametrize(
    "args",
    [
        ["--kv-bits", "7"],
        ["--kv-bits", "4", "--kv-group-size", "48"],
        ["--kv-bits", "4", "--quantized-kv-start", "-1"],
        ["--max-kv-size", "0"],
        ["-qa"],
        ["--image", "cat.png"],
        ["--prompt", "a \udcff"],
        ["--prompt", "a \udcff", "--ignore-chat-template"],
        ["--temp", "warm"],
        ["--temp", "-1"],
        ["--top-p", "2"],
        ["--max-tokens", "0"],
        ["--max-tokens", "-2"],
        ["--num-draft-tokens", "-1"],
        ["--num-draft-tokens", "5"],
        ["--num-draft-tokens", "2", "--draft-model", "none"],
        ["--prompt", ""],
        ["--stop", ""],
        ["--dtype", "int8"],
        ["--chat-template-config", "[1]"],
        ["--chat-template-config", "{"],
        ["--logit-bias", '{"a": 1}'],
        ["--logit-bias", '{"5000": 1}'],
        ["--extra-eos-token", "zzqqx"],
        ["--top-k", "100000", "--temp", "1"],
        ["--prompt-cache-file", "missing.safetensors"],
        ["--adapter-path", "missing"],
        ["--draft-model", "missing/drafter"],
        ["--draft-model", "./missing"],
        ["--model", "missing/model"],
        ["--no-such-flag"],
        ["extra"],
    ],
    ids=" ".join,
)
def test_bad_flags_end_in_one_line(args, directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_line("--model", directory, *args)
    assert list(tmp_path.iterdir()) == []


def assert_one_line(*args, say=""):
    result = run("generate", "-m", 2, *args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1, result.stderr
    assert say in result.stderr


@pytest.fixture
def copy(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "copy")


def change_config(directory, **changes):
    (directory / "config.json").write_text(json.dumps(read_config(directory) | changes))


def cut(file, keep):
    with file.open("r+b") as stream:
        stream.truncate(int(file.stat().st_size * keep))


def test_damaged_files_end_in_one_line(copy):
    for part in (copy / "dspark", copy):
        weights = part / "model.safetensors"
        whole = weights.read_bytes()
        for damage in (
            lambda file: cut(file, 0.9),
            lambda file: cut(file, 0),
            lambda file: file.write_bytes(b"x" * 99),
        ):
            damage(weights)
            assert_one_line("--model", copy, say="model.safetensors" if part != copy else "")
        weights.unlink()
        assert_one_line("--model", copy, say="safetensors")
        weights.write_bytes(whole)
    (copy / "tokenizer.json").write_text("{")
    assert_one_line("--model", copy, say="tokenizer")


def test_what_is_no_model_or_no_fitting_drafter_says_why(copy):
    assert_one_line("--model", copy / "dspark", say="is a drafter")
    assert_one_line("--model", copy, "--draft-model", copy, say="recurrent layers, whose state can't be trimmed")
    for changes, reason in [
        ({"num_target_layers": 9}, "layers: the drafter wants a target of 9, this one has 8"),
        ({"vocab_size": 1281}, "vocabulary: the drafter's is 1281, the target's 1280"),
        ({"hidden_size": 64}, "hidden size: the drafter's is 64, the target's 128"),
    ]:
        kept = read_config(copy / "dspark")
        change_config(copy / "dspark", **changes)
        assert_one_line("--model", copy, say=reason)
        change_config(copy / "dspark", **kept)
    change_config(copy / "dspark", rope_theta=[])
    assert_one_line("--model", copy, say="")
    change_config(copy, model_type="llama")
    assert_one_line("--model", copy, say="can't load the weights")
    change_config(copy, model_type="lama")
    assert_one_line("--model", copy, say="has model_type 'lama', which mlx-lm ")
    (copy / "config.json").write_text("{")
    assert_one_line("--model", copy, say="not JSON")


def test_a_template_that_fails_ends_in_one_line_and_leaves_a_chat_alive(copy):
    broken = "{{ raise_exception('no\nsystem message') if messages[0]['content'] == 'x' }}{{ messages[-1]['content'] }}"
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": broken}))
    assert_one_line("--model", copy, "-p", "x", say="no system message")
    result = run("chat", "--model", copy, "-m", 3, stdin="x\nhello\n")
    assert result.exit_code == 0
    assert result.stderr.count("Error: the chat template fails on these messages: no system message\n") == 1
    assert "3 generated tokens" in result.stderr


def test_a_group_alone_prints_its_help():
    for args, word in (((), "generate "), (("cache",), "clear ")):
        result = run(*args)
        assert result.exit_code == 0 and f"\n  {word}" in result.stdout and result.stderr == ""
