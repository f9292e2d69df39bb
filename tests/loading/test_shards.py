"""Which files of a folder count: an index decides, and nothing is taken from a file that is left over."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from any_lm_kit import SIZES, random_lm
from drafter_kit import case_weights, golden_config, golden_target, write_drafter
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config, save_model
from publishers import as_published, modelopt, write_safetensors
from rig import TINY, mlx_lm_twin, same_bits, tiny

from specmlx.drafters.checkpoint import load_drafter, load_mtp
from specmlx.drafters.mtp import MTPHead
from specmlx.formats.checkpoint import read_weights, tensors_of
from specmlx.formats.header import read_header
from specmlx.loading.convert import convert
from specmlx.loading.inspect import inspect_path
from specmlx.loading.resolve import resolve
from specmlx.targets.checkpoint import load_target

SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}
INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def hybrid(path: Path) -> None:
    config = json.loads(json.dumps(TINY | SMALL))
    save_model(path, mlx_lm_twin(tiny(0, **config), **config))
    save_config(config, path / "config.json")


def llama(path: Path) -> None:
    save_model(path, random_lm("llama"))
    save_config({"model_type": "llama", **SIZES}, path / "config.json")


def fp8(path: Path) -> None:
    config = TINY | SMALL
    tensors, _ = modelopt(as_published(tiny(0, **config)), np.random.default_rng(0))
    write_safetensors(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "modelopt"}}))


def drafter(path: Path) -> None:
    write_drafter(path, golden_config("dspark"), case_weights("dspark"))


def mtp(path: Path) -> None:
    mx.random.seed(1)
    weights = dict(tree_flatten(MTPHead(tiny(0, **SMALL).config).parameters()))
    write_drafter(path, {"model_type": "qwen3_5_mtp", "text_config": TINY | SMALL}, weights)


def target(path: Path) -> list[mx.array]:
    model, _ = load_target(path)
    return parameters(getattr(model, "lm", model))


def parameters(module) -> list[mx.array]:
    return [value for _, value in sorted(tree_flatten(module.parameters()))]


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], list[mx.array]]]] = {
    "hybrid": (hybrid, target),
    "llama": (llama, target),
    "fp8": (fp8, target),
    "drafter": (drafter, lambda path: parameters(load_drafter(path, golden_target()).model)),
    "mtp": (mtp, lambda path: parameters(load_mtp(path, tiny(0, **SMALL)).model)),
}


def raw(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    data, entries = file.read_bytes(), read_header(file)
    start = 8 + int.from_bytes(data[:8], "little")
    return {n: (e.dtype, list(e.shape), data[start + e.start : start + e.end]) for n, e in entries.items()}


def spread(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Put a folder's one file in two shards with an index; returns other tensors of the same names, all zeros."""
    tensors = raw(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for i in (1, 2):
        file = (A, B)[i - 1]
        write_safetensors(path / file, {name: tensors[name] for name in names[i - 1 :: 2]})
        places |= dict.fromkeys(names[i - 1 :: 2], file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return {name: (dtype, shape, bytes(len(data))) for name, (dtype, shape, data) in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_decides_which_files_count_and_without_one_a_tensor_in_two_files_is_refused(kind, tmp_path):
    write, load = KINDS[kind]
    write(tmp_path)
    want = load(tmp_path)
    stray = spread(tmp_path)
    assert same_bits(load(tmp_path), want)
    # One sorts before the shards, one behind them, and one is no file at all.
    for name in ("model.safetensors", "model-zz.safetensors"):
        write_safetensors(tmp_path / name, stray)
    (tmp_path / "model-fifo.safetensors").symlink_to("/dev/zero")
    assert same_bits(load(tmp_path), want)
    found = inspect_path(tmp_path)
    assert found.files == 2 and found.tensors == len(stray)
    (tmp_path / "model-fifo.safetensors").unlink()
    (tmp_path / INDEX).unlink()
    for read in (load, inspect_path):
        with pytest.raises(ValueError) as error:
            read(tmp_path)
        names = re.fullmatch(rf"{tmp_path}: (\S+) is in (\S+) and in (\S+): delete .+", str(error.value))
        assert names[1] in stray and names[2] < names[3] and {A, B, "model.safetensors"} & set(names.groups()), names


def test_an_index_says_which_of_its_files_a_tensor_is_taken_from(tmp_path):
    hybrid(tmp_path)
    want = target(tmp_path)
    stray = spread(tmp_path)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    for file in set(places.values()):
        write_safetensors(tmp_path / file, stray | raw(tmp_path / file))
    assert same_bits(target(tmp_path), want)


def test_a_file_beside_the_shards_counts_where_the_index_names_it_whatever_it_is_called(tmp_path):
    hybrid(tmp_path)
    want = target(tmp_path)
    spread(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / B).rename(tmp_path / "extra_00.safetensors")
    places = {name: file.replace(B, "extra_00.safetensors") for name, file in index["weight_map"].items()}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert same_bits(target(tmp_path), want)


def test_files_of_other_names_are_read_where_none_is_called_model(tmp_path):
    hybrid(tmp_path)
    want = target(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.00.safetensors")
    assert same_bits(target(tmp_path), want)


BAD = {
    "a missing file": (lambda places: dict.fromkeys(places, "model-00003-of-00003.safetensors"), "lacks model-00003"),
    "a file above": (lambda places: dict.fromkeys(places, f"../{A}"), f"'../{A}'"),
    "a file elsewhere": (lambda places: dict.fromkeys(places, "/dev/zero"), "'/dev/zero'"),
    "the folder": (lambda places: dict.fromkeys(places, ".."), "'..'"),
    "a file of another kind": (lambda places: dict.fromkeys(places, 3), "no weight_map"),
    "a list": (lambda places: sorted(places), "no weight_map"),
    "nothing": (lambda places: {}, "no weight_map"),
    "a tensor that isn't there": (lambda places: places | {"extra.weight": A}, f"{A} lacks extra.weight"),
    "a tensor that is in the other": (lambda places: dict.fromkeys(places, A) | {max(places): B}, f"{A} lacks "),
}


@pytest.mark.parametrize("case", BAD)
def test_an_index_that_its_files_contradict_is_refused_in_one_line(case, tmp_path):
    hybrid(tmp_path)
    spread(tmp_path)
    spoil, word = BAD[case]
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": spoil(index["weight_map"])}))
    for read in (target, inspect_path, read_weights):
        with pytest.raises(ValueError) as error:
            read(tmp_path)
        text = str(error.value)
        assert word in text and "\n" not in text and len(text.replace(str(tmp_path), "")) <= 200, text


def test_a_conversion_holds_the_files_that_count_and_no_other(tmp_path):
    source, draft = tmp_path / "source", tmp_path / "source-drafter"
    shutil.copytree(resolve("demo"), source)
    shutil.copytree(resolve("demo/dflash"), draft)
    want, wanted = read_weights(source), read_weights(draft)
    for folder in (source, draft):
        write_safetensors(folder / "model.safetensors", spread(folder))
    out = convert(str(source), tmp_path / "out", draft_model=str(draft))
    assert tensors_of(out).keys() == want.keys() and not (out / "draft" / "model.safetensors").exists()
    for folder, weights in ((out, want), (out / "draft", wanted)):
        found = read_weights(folder)
        assert all(mx.array_equal(found[name].astype(w.dtype), w).item() for name, w in weights.items())
