"""A head of its own is kept whatever config.json says of it, and one that is the embeddings is tied."""

import json
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from any_lm_kit import SIZES, random_lm
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from publishers import as_published, modelopt, tensor, write_safetensors
from rig import TINY, mlx_lm_twin, same_bits, tiny, tokens

from specmlx.loading.convert import convert
from specmlx.targets.checkpoint import load_target

SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}
IDS = tokens(1, 5)
INDEX = "model.safetensors.index.json"


def hybrid(path: Path) -> None:
    config = json.loads(json.dumps(TINY | SMALL))
    save_model(path, mlx_lm_twin(tiny(0, **config), **config))
    save_config(config, path / "config.json")


def packed(path: Path) -> None:
    config = json.loads(json.dumps(TINY | SMALL))
    model, config = quantize_model(mlx_lm_twin(tiny(0, **config), **config), config, group_size=32, bits=4)
    save_model(path, model)
    save_config(config, path / "config.json")


def published(path: Path) -> None:
    weights = as_published(tiny(0, **SMALL))
    write_safetensors(path / "model.safetensors", {name: tensor("F32", w) for name, w in weights.items()})
    text = {key: value for key, value in (TINY | SMALL).items() if key not in ("model_type", "tie_word_embeddings")}
    save_config({"model_type": "qwen3_5", "text_config": text}, path / "config.json")


def fp8(path: Path) -> None:
    tensors, _ = modelopt(as_published(tiny(0, **SMALL)), np.random.default_rng(0))
    write_safetensors(path / "model.safetensors", tensors)
    save_config(TINY | SMALL | {"quantization_config": {"quant_method": "modelopt"}}, path / "config.json")


def llama(path: Path) -> None:
    save_model(path, random_lm("llama", tie_word_embeddings=False))
    save_config({"model_type": "llama", **SIZES}, path / "config.json")


def gemma(path: Path) -> None:
    # Its code ties where the files have no head, and reads no flag.
    model = random_lm("gemma3_text")
    assert "lm_head" in model
    save_model(path, model)
    config = {"sliding_window": 12, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    save_config({"model_type": "gemma3_text", **SIZES, **config}, path / "config.json")


WRITERS = [hybrid, packed, published, fp8, llama, gemma]
FLAGS = {
    "true": {"tie_word_embeddings": True},
    "false": {"tie_word_embeddings": False},
    "absent": {},
    "true outside, false inside": {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
    "false outside, true inside": {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
}


def flag(path: Path, changes: dict) -> None:
    config = json.loads((path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    if "text_config" in changes:
        changes = changes | {"text_config": config.get("text_config", config) | changes["text_config"]}
    (path / "config.json").write_text(json.dumps(config | changes))


def weights(path: Path) -> dict[str, mx.array]:
    return mx.load(str(path / "model.safetensors"))


def rewrite(path: Path, arrays: dict[str, mx.array]) -> None:
    mx.eval(arrays)
    (path / INDEX).unlink(missing_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), arrays)


def logits(path: Path) -> mx.array:
    model, _ = load_target(path)
    return model.verify(model.new_states(), IDS).logits


def warned(path: Path) -> tuple[mx.array, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = logits(path)
    return found, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("write", WRITERS)
def test_a_head_that_differs_from_the_embeddings_is_kept_whatever_the_flag_says(write, tmp_path):
    write(tmp_path)
    flag(tmp_path, {"tie_word_embeddings": False})
    if write in (hybrid, packed, llama, gemma):
        theirs, _ = load_model(tmp_path)
        want = theirs(IDS)
    else:
        want = logits(tmp_path)
    for name, changes in FLAGS.items():
        flag(tmp_path, changes)
        got, said = warned(tmp_path)
        assert same_bits([got], [want]), name
        assert len(said) == ("true" in name), (name, said)
        assert all("tie_word_embeddings is true, but lm_head isn't the embeddings" in text for text in said)


@pytest.mark.parametrize("write", [hybrid, packed, published, llama, gemma])
def test_a_head_that_is_the_embeddings_is_tied_without_a_word(write, tmp_path):
    write(tmp_path)
    arrays = weights(tmp_path)
    parts = [name for name in arrays if "lm_head." in name]
    (table,) = {name.rpartition(".")[0] for name in arrays if "embed_tokens." in name}
    arrays |= {name: arrays[f"{table}.{name.rpartition('.')[2]}"] for name in parts}
    rewrite(tmp_path, arrays)
    flag(tmp_path, FLAGS["false"])
    want = logits(tmp_path)
    for name in ("true", "absent", "true outside, false inside"):
        flag(tmp_path, FLAGS[name])
        got, said = warned(tmp_path)
        assert same_bits([got], [want]) and not said, name
        model, config = load_target(tmp_path)
        names = dict(tree_flatten(getattr(model, "lm", model).parameters()))
        assert config["tie_word_embeddings"] is True and not any("lm_head" in name for name in names)
    # Files without a head, and files whose only table is the head.
    headless = {name: value for name, value in arrays.items() if name not in parts}
    rewrite(tmp_path, headless)
    flag(tmp_path, FLAGS["false outside, true inside"] if write is published else FLAGS["true"])
    assert same_bits([warned(tmp_path)[0]], [want])
    if write is not gemma:
        rewrite(tmp_path, {name: value for name, value in arrays.items() if not name.startswith(f"{table}.")})
        assert same_bits([warned(tmp_path)[0]], [want])


@pytest.mark.parametrize("name", ["false", "absent"])
def test_a_hybrid_without_a_head_that_ties_none_is_refused_in_one_line(name, tmp_path):
    hybrid(tmp_path)
    rewrite(tmp_path, {name: value for name, value in weights(tmp_path).items() if "lm_head." not in name})
    flag(tmp_path, FLAGS[name])
    with pytest.raises(ValueError, match="has no lm_head: download it again, or set tie_word_embeddings"):
        load_target(tmp_path)


def test_a_conversion_has_the_head_of_the_files(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    hybrid(source)
    want = logits(source)
    (source / "tokenizer.json").write_text("{}")
    flag(source, FLAGS["true"])
    with pytest.warns(UserWarning, match="lm_head is kept"):
        out = convert(str(source), tmp_path / "out")
    theirs, config = load_model(out)
    assert config["tie_word_embeddings"] is False and same_bits([theirs(IDS)], [want])
