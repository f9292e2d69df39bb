"""Drafters that are found by themselves: which of those in a Hub cache is taken, and what is said where none is."""

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner

from specmlx.cli import main
from specmlx.cli.models import for_models
from specmlx.drafters.ngram import NGram
from specmlx.generation.generate import stream_generate
from specmlx.loading.auto_drafter import choose_drafter
from specmlx.loading.catalog import KNOWN, billions
from specmlx.loading.hub import PATTERNS, base_models, cached_id, cached_repos, download
from specmlx.loading.load import load, load_drafter, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put(cache: Path, name: str, source: Path, readme: str = "", **changes) -> Path:
    """A repository in a Hub cache, as huggingface_hub lays it out."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    shutil.copytree(source, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    config = json.loads((snapshot / "config.json").read_text()) | changes
    (snapshot / "config.json").write_text(json.dumps(config))
    if readme:
        (snapshot / "README.md").write_text(readme)
    return snapshot


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The demo's target without a drafter of its own."""
    path = tmp_path_factory.mktemp("target") / "model"
    shutil.copytree(resolve("demo"), path)
    config = json.loads((path / "config.json").read_text())
    config.pop("draft_model", None)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def model(target):
    return load(str(target), draft_model=None)[0]


def made_for(*bases: str) -> str:
    return "---\nlicense: mit\nbase_model:\n" + "".join(f"- {base}\n" for base in bases) + "tags:\n- x\n---\n# Title\n"


def test_a_published_drafter_goes_before_one_made_for_the_base_model_and_that_before_one_of_the_same_sizes(
    target, model, tmp_path
):
    dspark, dflash = resolve("demo/dspark"), resolve("demo/dflash")
    put(tmp_path, "a/any", dflash)
    name = "Qwen/Qwen3.8-27B"
    first = choose_drafter("some/fork", target, model.config, tmp_path)
    assert "a/any" in first.name.replace("--", "/") and "same sizes" in first.reason
    put(tmp_path, "b/tuned", dspark, made_for("Qwen/Qwen3.8-27B"))
    assert choose_drafter(name, target, model.config, tmp_path).reason == "b/tuned (made for Qwen/Qwen3.8-27B)"
    put(tmp_path, "RadixArk/Qwen3.8-27B-DSpark", dspark)
    third = choose_drafter(name, target, model.config, tmp_path)
    assert third.reason == "RadixArk/Qwen3.8-27B-DSpark (published for Qwen/Qwen3.8-27B)"
    put(tmp_path, "z-lab/Qwen3.8-27B-DFlash2", dflash)
    assert choose_drafter(name, target, model.config, tmp_path).reason.startswith("z-lab/")
    fork = put(tmp_path / "other", "me/fork", target, made_for("Qwen/Qwen3.8-27B"))
    assert cached_id(fork) == "me/fork" and cached_id(target) is None
    assert choose_drafter(str(fork), fork, model.config, tmp_path).reason.startswith("z-lab/")


def test_what_does_not_fit_is_never_taken_and_the_command_that_fetches_one_is_named(target, model, tmp_path):
    put(tmp_path, "z-lab/Qwen3.8-27B-DFlash2", resolve("demo/dflash"), hidden_size=5120)
    put(tmp_path, "x/target", target)
    put(tmp_path, "x/odd", resolve("demo/dflash"), architectures=7, dflash_config=[1])
    broken = put(tmp_path, "x/broken", resolve("demo/dflash"))
    (broken / "config.json").write_text("{")
    choice = choose_drafter("Qwen/Qwen3.8-27B", target, model.config, tmp_path)
    assert choice.name is None and choice.reason.endswith("to fetch one: hf download incoai/Qwen3.8-27B-DFlash2")
    assert choose_drafter("x/y", target, model.config, tmp_path).reason.startswith("no drafter: ")
    assert [repo.id for repo in cached_repos(tmp_path)] == ["x/odd", "x/target", "z-lab/Qwen3.8-27B-DFlash2"]


def test_an_mtp_head_in_the_targets_files_is_the_last_resort(target, model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    weights = mx.load(str(copy / "model.safetensors"))
    mx.save_safetensors(str(copy / "model.safetensors"), weights | {"mtp.norm.weight": mx.zeros(8)})
    assert choose_drafter("x/y", copy, model.config, tmp_path / "none").name == "mtp"
    put(tmp_path / "cache", "a/any", resolve("demo/dflash"))
    assert choose_drafter("x/y", copy, model.config, tmp_path / "cache").name != "mtp"


@pytest.fixture
def local_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_load_takes_what_is_in_the_cache_and_says_so(target, local_cache, capsys):
    put(local_cache, "a/any", resolve("demo/dflash"))
    model, _ = load(str(target))
    assert type(model.draft_model).__name__ == "DFlash"
    assert "draft_model='auto' took a/any" in capsys.readouterr().err
    weights = next(local_cache.rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-9])
    model, _ = load(str(target))
    assert type(model.fallback) is NGram and "can't be used" in model.no_draft_reason


def test_prompt_lookup_drafts_where_there_is_no_other_and_the_result_says_so(target, local_cache, capsys, recwarn):
    model, tokenizer = load(str(target))
    said = capsys.readouterr().err
    assert said.startswith("draft_model='auto' took prompt lookup: no drafter: ") and said.count("\n") == 1
    assert model.draft_model is model.fallback and type(model.fallback) is NGram
    plain = list(stream_generate(model, tokenizer, "one two", 12, draft_model=None))
    assert plain[-1].stats.mode == "plain"
    for width in ("full", "auto", 3):
        found = list(stream_generate(model, tokenizer, "one two", 12, num_draft_tokens=width))
        assert [r.token for r in found] == [r.token for r in plain]
        # What "auto" says goes by what it has measured.
        if width != "auto":
            assert found[-1].stats.mode == "speculative"
            assert found[-1].stats.reason.startswith("prompt lookup drafts: no drafter: ")
    # Asked for by name, it is a drafter like any other.
    asked, _ = load(str(target), draft_model="ngram")
    assert asked.fallback is None and asked.no_draft_reason is None
    assert load(str(target), draft_model=None)[0].draft_model is None
    assert not recwarn.list
    with pytest.raises(ValueError, match="draft_quantize is 8 but there is no drafter"):
        load(str(target), draft_quantize="8")


def test_a_config_can_not_name_a_drafter_outside_of_its_directory(target, tmp_path, local_cache):
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    shutil.copytree(resolve("demo/dflash"), tmp_path / "secret")
    config = json.loads((copy / "config.json").read_text())
    for name in ("../secret", str(tmp_path / "secret"), "draft/../../secret"):
        (copy / "config.json").write_text(json.dumps(config | {"draft_model": name}))
        model, _ = load(str(copy))
        assert type(model.fallback) is NGram and "is not on this machine" in model.no_draft_reason


def test_a_repository_in_the_cache_is_used_offline_and_one_that_is_not_says_so(target, local_cache, model):
    put(local_cache, "x/target", target)
    put(local_cache, "x/narrow", resolve("demo/dflash"), hidden_size=64)
    assert load("x/target", draft_model=None)[0].config.hidden_size == 128
    assert download("x/target").name == COMMIT and download("x/target", revision=COMMIT).name == COMMIT
    with pytest.raises(ValueError, match="the drafter x/narrow can't serve this target: hidden size"):
        load_drafter("x/narrow", model)
    (put(local_cache, "x/files", target) / "config.json").unlink()
    with pytest.raises(ValueError, match=r"x/files has no config.json: .*hf download x/files FILE.gguf"):
        load("x/files")
    for revision in (None, "deadbeef"):
        with pytest.raises(ValueError, match="x/absent is neither a directory nor in the local Hub cache"):
            load("x/absent", revision=revision)
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".gguf")) for pattern in PATTERNS)


@pytest.mark.parametrize(
    ("text", "bases"),
    [
        ("---\nbase_model: a/b\n---\n", ["a/b"]),
        ("---\nbase_model:\n- a/b\n- 'c/d'\ntags:\n- e/f\n---\n", ["a/b", "c/d"]),
        ("---\nbase_model: [1, {}, a/b]\n---\n", ["a/b"]),
        ("---\nbase_model: a/b\n- no YAML\n---\n", []),
        ("---\nbase_model: ../../etc\n---\n", []),
        ("# no front matter\nbase_model: a/b\n", []),
        ("---\nlicense: mit\n", []),
        ("", []),
    ],
)
def test_base_models_are_read_from_the_front_matter_alone(text, bases, tmp_path):
    (tmp_path / "README.md").write_text(text)
    assert base_models(tmp_path) == bases


def test_models_lists_what_is_known_and_what_is_here(local_cache, target):
    put(local_cache, "Qwen/Qwen3.8-27B", target)
    put(local_cache, "me/mine", resolve("demo/dspark"))
    result = CliRunner().invoke(main, ["models", "--json"])
    found = json.loads(result.stdout)
    assert [t["ids"][0] for t in found["targets"]] == [t.ids[0] for t in KNOWN]
    first = found["targets"][0]
    assert first["cached"] == ["Qwen/Qwen3.8-27B"] and first["fits"] == (27e9 * 4.5 / 8 <= found["memory_gb"] * 1e9)
    assert [other["id"] for other in found["others_cached"]] == ["me/mine"]
    assert for_models(48 << 30, 64 << 30)[0] == 48 << 30 and for_models(None, 64 << 30)[0] == 48 << 30
    text = CliRunner().invoke(main, ["models"]).output
    assert re.match(r"[\d.]+ GB for models on this machine \((the working set|75% of its memory)", text)
    assert "τ 4.8 (Inco's article" in text and "me/mine" in text and "[in the cache]" in text


def test_the_catalogue_states_a_source_for_every_figure_and_no_pair_twice():
    pairs = [(target.ids[0], drafter.id) for target in KNOWN for drafter in target.drafters]
    assert len(set(pairs)) == len(pairs)
    assert all(bool(d.tau) == bool(d.source) for target in KNOWN for d in target.drafters)
    assert [billions(name) for name in ("Qwen/Qwen3.8-27B", "a/LFM2.5-1.2B-Instruct", "a/b")] == [27, 1.2, None]
