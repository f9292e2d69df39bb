"""Every packaging of drafters, by its files: no tensor is loaded and unused, and a plain config.json says the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from drafter_kit import Greedy, StandInTarget, case_weights, golden_config, golden_drafter, golden_target, write_drafter
from mlx.utils import tree_flatten
from packaging_kit import DSPARK, lfm2, nvfp4, own_weights, packed

from specmlx.drafters.checkpoint import load_drafter, load_mtp
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.written import plain_config
from specmlx.loading.inspect import inspect_path
from specmlx.targets.checkpoint import load_target
from specmlx.targets.hybrid import Model

GOLDENS = Path(__file__).parents[1] / "goldens"
PUBLISHED = [name for name in json.loads((GOLDENS / "drafters" / "configs.json").read_text()) if "scaled" not in name]
PACKAGES = [path.name for path in sorted((GOLDENS / "speculators").iterdir()) if path.is_dir()]
TABLES = ("embed_tokens.weight", "lm_head.weight")


def nvfp4_file(path: Path) -> Path:
    config = packed(DSPARK, dspark_config={"projector_type": "dspark"})
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return write_drafter(path, config, nvfp4(own_weights())[0])


def lfm2_file(path: Path, *tables: str) -> Path:
    own = {name: mx.random.normal((96, 64), key=mx.random.key(i)) for i, name in enumerate(tables)}
    return write_drafter(path, lfm2(), own_weights() | own)


def export_file(path: Path) -> Path:
    def chosen(name: str, _: nn.Module) -> bool:
        return name.endswith(("proj", "fc")) and not name.startswith(("markov", "confidence"))

    drafter = golden_drafter("dspark_yarn")
    nn.quantize(drafter.model, 32, 8, class_predicate=chosen)
    config = golden_config("dspark_yarn") | {"quantization": {"group_size": 32, "bits": 8}}
    return write_drafter(path, config, dict(tree_flatten(drafter.model.parameters())))


def mtp_file(path: Path) -> Path:
    shutil.copytree(GOLDENS / "target_tied" / "checkpoint", path)
    shutil.copy(GOLDENS / "mtp" / "model-mtp.safetensors", path)
    return path


def split_mtp_file(path: Path) -> Path:
    whole = mtp_file(path.with_name("whole"))
    head = load_mtp(whole, hybrid(whole))
    config = {
        "model_type": "qwen3_5_mtp",
        "mtp_norms": "w",
        "text_config": json.loads((whole / "config.json").read_text()),
    }
    return write_drafter(path, config, dict(tree_flatten(head.model.parameters())))


def hybrid(path: Path) -> Model:
    model = load_target(path)[0]
    model.directory = path
    return model


def speculators_target() -> StandInTarget:
    expected = mx.load(str(GOLDENS / "speculators" / "expected.safetensors"))
    return StandInTarget(expected["embed_tokens"], expected["lm_head"])


def gemma4_target() -> StandInTarget:
    weights = mx.load(str(GOLDENS / "gemma4" / "shared" / "model.safetensors"))
    return StandInTarget(*(weights[name].astype(mx.float32) for name in TABLES))


def copied(folder: Path) -> Callable[[Path], Path]:
    return lambda path: Path(shutil.copytree(folder, path))


# What writes the files, and the target that they are for.
FILES = {
    **{
        name: (lambda path, name=name: write_drafter(path, golden_config(name), case_weights(name)), golden_target)
        for name in PUBLISHED
    },
    **{f"speculators {name}": (copied(GOLDENS / "speculators" / name), speculators_target) for name in PACKAGES},
    **{f"gemma4 {name}": (copied(GOLDENS / "gemma4" / name), gemma4_target) for name in ("shared", "values")},
    "qwen35": (copied(GOLDENS / "qwen35"), gemma4_target),
    "lithos nvfp4": (nvfp4_file, golden_target),
    "lfm2, its own table": (lambda path: lfm2_file(path, TABLES[0]), golden_target),
    "lfm2, a head beside it": (lambda path: lfm2_file(path, *TABLES), golden_target),
    "mlx export": (export_file, golden_target),
}
HEADS = {"mtp": (mtp_file, None), "split mtp": (split_mtp_file, None)}


def outcome(path: Path, target) -> tuple[mx.array, mx.array | None]:
    """Logits over the target's vocabulary and confidence, as a drafter proposes that is loaded anew."""
    load = load_mtp if (path / "model-mtp.safetensors").exists() else load_drafter
    drafter = load(path, target, mx.float32)
    width = len(drafter.tap_ids) * target.config.hidden_size
    context, policy = drafter.new_context(), Greedy()
    features = mx.random.normal((1, 9, width), key=mx.random.key(0))
    drafter.observe(context, mx.arange(1, 10, dtype=mx.int32)[None], features, 9)
    proposal = drafter.propose(context, mx.array([5], dtype=mx.int32), min(drafter.max_width, 7), policy)
    return policy.logits, proposal.confidence


def other(name: str, tensor: mx.array) -> mx.array:
    """A tensor with other values of the same kind."""
    if tensor.dtype == mx.bool_:
        return tensor != (mx.arange(tensor.size) == 3)
    if name == "d2t":
        # The last id becomes one that the vocabulary does not have.
        ids, last = (tensor + mx.arange(tensor.size)).tolist(), tensor.size - 1
        return mx.where(mx.arange(tensor.size) == last, min(set(range(96)) - set(ids)) - last, tensor)
    if tensor.dtype == mx.uint8 and name.endswith("_scale"):
        return tensor + (mx.arange(tensor.size, dtype=mx.uint8) % 8).reshape(tensor.shape)
    if not mx.issubdtype(tensor.dtype, mx.floating):
        return tensor ^ mx.array(0x11, dtype=tensor.dtype)
    if name.endswith(("layer_scalar", "weight_scale_2")):
        # Where a norm follows, it leaves the sign, and what is as small as its epsilon.
        return -tensor if name.endswith("layer_scalar") else 1e-3 * tensor
    noise = mx.random.normal(tensor.shape, key=mx.random.key(1))
    return (tensor + 0.3 * mx.maximum(mx.abs(tensor), 0.2) * noise - 0.1 * tensor).astype(tensor.dtype)


def moved(after: mx.array, before: mx.array) -> bool:
    return mx.where(after == before, 0, mx.abs(after - before)).max().item() > 1e-5


@pytest.mark.parametrize("kind", [*FILES, *HEADS])
def test_every_tensor_of_a_file_changes_what_it_feeds(kind, tmp_path):
    write, make = (FILES | HEADS)[kind]
    path = write(tmp_path / "files")
    target = make() if make else hybrid(tmp_path / "whole" if kind == "split mtp" else path)
    config = json.loads((path / "config.json").read_text())
    # deepseek-ai's files have copies of the target's tables, which are not loaded.
    copies = TABLES if config.get("architectures") in (["Qwen3DSparkModel"], ["Gemma4DSparkModel"]) else ()
    file = path / ("model-mtp.safetensors" if kind == "mtp" else "model.safetensors")
    logits, confidence = outcome(path, target)
    weights = {name: mx.array(value) for name, value in mx.load(str(file)).items()}
    mx.eval(weights)
    for name, tensor in weights.items():
        mx.save_safetensors(str(file), weights | {name: other(name, tensor)})
        if name in ("d2t", "t2d") and {"d2t", "t2d"} <= weights.keys():
            with pytest.raises(ValueError, match="t2d and d2t disagree"):
                outcome(path, target)
            offsets_only = {k: v for k, v in weights.items() if k != "t2d"} | {"d2t": other("d2t", weights["d2t"])}
            mx.save_safetensors(str(file), offsets_only)
        new_logits, new_confidence = outcome(path, target)
        if name in copies:
            assert not moved(new_logits, logits), name
        elif "confidence_head" in name:
            assert moved(new_confidence, confidence) and not moved(new_logits, logits), name
        else:
            assert moved(new_logits, logits), name


@pytest.mark.parametrize("kind", FILES)
def test_a_plain_config_loads_the_same_drafter_and_leaves_no_question(kind, tmp_path):
    write, make = FILES[kind]
    path, target = write(tmp_path / "files"), make()
    config = json.loads((path / "config.json").read_text())
    before = outcome(path, target)
    (path / "config.json").write_text(json.dumps(plain_config(DrafterConfig.from_dict(config), config)))
    after = outcome(path, target)
    assert mx.array_equal(after[0], before[0]).item()
    assert (before[1] is None and after[1] is None) or mx.array_equal(after[1], before[1]).item()
    assert inspect_path(path).questions == []
