"""Converted pairs: mlx_lm loads the target, specmlx the pair; a run that ends half-way leaves nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from rig import EXPERTS, NEXT, TINY, by_steps, mlx_lm_twin, same_bits, small_tokenizer, tiny

import specmlx
from specmlx.cli import main
from specmlx.decoding.stats import Stats
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.written import plain_config
from specmlx.formats.checkpoint import read_config
from specmlx.loading.convert import convert
from specmlx.loading.load import load, resolve

GOLDENS = Path(__file__).parents[1] / "goldens"
SMALL = {"num_hidden_layers": 4, "full_attention_interval": 2}
IDS = [3, 1, 4, 1, 5]


def write(path: Path, **changes) -> Path:
    config = json.loads(json.dumps(TINY | SMALL | changes))
    save_model(path, mlx_lm_twin(tiny(0, **config), **config))
    save_config(config, path / "config.json")
    small_tokenizer(path)
    return path


@pytest.mark.linux_bits
@pytest.mark.parametrize("changes", [{}, EXPERTS, NEXT], ids=["dense", "experts", "next"])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_converted_target_is_the_one_that_mlx_lm_makes(changes, bits, tmp_path):
    source = write(tmp_path / "source", **changes)
    out = convert(str(source), tmp_path / "out", bits=bits)
    theirs, config = load_model(source)
    if bits:
        theirs, config = quantize_model(theirs, config, 64, bits)
    converted, _ = load_model(out)
    assert dict(tree_flatten(converted.parameters())).keys() == dict(tree_flatten(theirs.parameters())).keys()
    assert same_bits(by_steps(converted, converted.make_cache(), IDS), by_steps(theirs, theirs.make_cache(), IDS))
    tokenizer = mlx_lm.load(str(out))[1]
    assert tokenizer.encode("the fox") == mlx_lm.load(str(source))[1].encode("the fox")


def answer(model, tokenizer) -> tuple[list[int], Stats]:
    """Tokens of an answer, and its counts, the clocks apart."""
    question = [{"role": "user", "content": "Please write a class Trip in Python that has map and lamp."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    width = model.draft_model.max_width
    found = list(specmlx.stream_generate(model, tokenizer, prompt, 24, num_draft_tokens=width))
    stats = found[-1].stats
    return [r.token for r in found], replace(
        stats, prefill_seconds=0, decode_seconds=0, commit_seconds=0, device_seconds=0, phases={}
    )


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_converted_pair_gives_the_text_of_the_pair_and_needs_nothing_named(kind, tmp_path):
    result = CliRunner().invoke(
        main, ["convert", "--model", "demo", "--draft-model", f"demo/{kind}", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0 and str(tmp_path / "out") in result.stdout, result.output
    model, tokenizer = load(str(tmp_path / "out"), dtype="float32")
    ours, _ = load("demo", draft_model=f"demo/{kind}")
    found, want = answer(model, tokenizer), answer(ours, tokenizer)
    assert found == want and found[1].accepted > 10
    config = read_config(tmp_path / "out" / "draft")
    assert "is_causal" in config or config["layer_types"].count("sliding_attention") == 0
    assert config["dflash_config"]["sample_from_anchor"] == (kind == "dspark")


def test_a_targets_own_mtp_head_goes_into_draft(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(resolve("demo"), source)
    own = mx.load(str(resolve("demo/mtp") / "model.safetensors"))
    weights = mx.load(str(source / "model.safetensors"))
    # Beside convs in mlx's layout, norms are what they are.
    mx.save_safetensors(str(source / "model.safetensors"), weights | {f"mtp.{k}": v for k, v in own.items()})
    result = CliRunner().invoke(main, ["convert", "--model", str(source), "--out", str(tmp_path / "without")])
    assert "--draft-model mtp keeps it" in result.output and not (tmp_path / "without" / "draft").exists()
    out = convert(str(source), tmp_path / "out", "mtp", bits=8)
    model, tokenizer = load(str(out), dtype="float32")
    assert type(model.draft_model).__name__ == "MTP"
    split, _ = load(str(out), dtype="float32", draft_model="demo/mtp")
    found, want = answer(model, tokenizer), answer(split, tokenizer)
    assert found == want and found[1].accepted > 10
    assert mlx_lm.load(str(out))


def test_a_gguf_file_becomes_a_directory_of_mlx_lm(tmp_path):
    expected = mx.load(str(GOLDENS / "gguf" / "model.safetensors"))
    shutil.copy(GOLDENS / "gguf" / "model.gguf", tmp_path)
    small_tokenizer(tmp_path)
    out = convert(str(tmp_path / "model.gguf"), tmp_path / "out")
    theirs, _ = load_model(out)
    ids = expected["tokens"].tolist()
    logits = mx.stack(by_steps(theirs, theirs.make_cache(), ids))
    assert mx.allclose(logits, expected["logits"], rtol=0, atol=2e-5).item()


def test_every_drafter_config_of_the_goldens_says_the_same_in_plain_words():
    seen = 0
    for file in GOLDENS.rglob("config.json"):
        config = json.loads(file.read_text())
        try:
            parsed = DrafterConfig.from_dict(config)
        except ValueError:
            continue
        again = DrafterConfig.from_dict(plain_config(parsed, config))
        assert again.windows == parsed.windows and again.target_layer_ids == parsed.target_layer_ids
        assert again.first_row == parsed.first_row and again.rope_theta == parsed.rope_theta
        seen += 1
    assert seen >= 2


def test_a_run_that_fails_or_is_interrupted_leaves_nothing(tmp_path):
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert("demo", tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_killed_leaves_no_directory_of_that_name_and_the_next_one_cleans_up(tmp_path):
    code = f"""
import os, signal
from specmlx.loading.convert import convert
convert("demo", {str(tmp_path / "out")!r}, progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    assert convert("demo", tmp_path / "out") == tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


WRONG = {
    "a directory that is in use": (dict(model="demo"), "is not an empty directory"),
    "bits that mlx has not": (dict(model="demo", bits=7), "can't quantize to 7 bits"),
    "a drafter that does not fit": (
        dict(model="small", draft_model="demo/dflash"),
        "can't serve this target: hidden size",
    ),
    "a target as drafter": (dict(model="demo", draft_model="demo"), "is a language model"),
    "a drafter without files": (dict(model="demo", draft_model="ngram"), "has no files"),
    "a head that is not there": (dict(model="demo", draft_model="mtp"), "has no mtp.* tensors"),
    "weights that mlx_lm has no layout for": (dict(model="fp8"), "which mlx_lm can't load"),
    "what is quantized already": (dict(model="quantized", bits=4), "quantized already"),
    "no such model": (dict(model="./none"), "no such directory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_converted_is_refused_with_nothing_written(case, tmp_path):
    arguments, word = WRONG[case]
    out = tmp_path / "out"
    if case == "a directory that is in use":
        out.mkdir()
        (out / "file").touch()
    if arguments["model"] == "small":
        arguments = arguments | {"model": str(write(tmp_path / "small"))}
    elif arguments["model"] == "quantized":
        arguments = arguments | {"model": str(convert("demo", tmp_path / "quantized", bits=8))}
    elif arguments["model"] == "fp8":
        arguments = arguments | {"model": str(GOLDENS / "scaled" / "fp8")}
    with pytest.raises(ValueError) as error:
        convert(out=out, **arguments)
    assert word in str(error.value) and "\n" not in str(error.value)
    assert not out.exists() or case == "a directory that is in use"
    assert resolve("demo").is_dir()


def test_a_drafter_that_is_named_and_not_written_is_told_of_unless_none_was_asked_for(tmp_path):
    for flags, told in [((), 1), (("--draft-model", "none"), 0)]:
        out = tmp_path / f"out-{told}"
        result = CliRunner().invoke(main, ["convert", "--model", "demo", "--out", str(out), *flags])
        assert result.exit_code == 0 and not (out / "draft").exists()
        assert result.stderr.count("not written; --draft-model demo/dspark puts it in draft/") == told
