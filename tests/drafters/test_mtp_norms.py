"""Norms of an MTP head that a converter has left as w - 1, all or some, and heads of other bits than the target's."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from drafter_kit import Greedy
from mlx.utils import tree_flatten
from rig import EXPERTS, tiny, tokens

import specmlx
from specmlx.drafters.checkpoint import build_mtp, load_mtp
from specmlx.drafters.mtp import MTPHead
from specmlx.drafters.mtp_norms import settle_norms

DEMO = Path(specmlx.__file__).parent / "demo"
LAYER = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
OTHERS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "mtp.norm")


@pytest.fixture(scope="module")
def demo():
    target, _ = specmlx.load("demo", draft_model=None)
    return target, mx.load(str(DEMO / "mtp" / "model.safetensors"))


def converted(path: Path, weights: dict[str, mx.array], metadata: dict[str, str] | None, **config) -> Path:
    """A head's directory with such a config beside the demo's, its target left out: one conv tells of its layout."""
    path.mkdir()
    conv = {"model.layers.0.linear_attn.conv1d.weight": mx.zeros((4, 4, 1))}
    mx.save_safetensors(str(path / "model.safetensors"), conv | weights, metadata)
    text = json.loads((DEMO / "target" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(text | config))
    shutil.copy(DEMO / "target" / "tokenizer.json", path)
    return path


@pytest.mark.parametrize(
    ("lowered", "says"),
    [
        ((), "norms read as w ("),
        (LAYER + OTHERS, "norms read as w - 1 ("),
        (LAYER, "norms read as w, but w - 1 in input_layernorm, k_norm, post_attention_layernorm, q_norm ("),
        (OTHERS, "norms read as w, but w - 1 in norm, pre_fc_norm_embedding, pre_fc_norm_hidden ("),
    ],
)
def test_norms_of_a_converted_head_are_read_as_they_guess_the_targets_text(demo, lowered, says, tmp_path, capsys):
    target, weights = demo
    right = {f"mtp.{name}": w for name, w in weights.items()}
    stored = {
        name: w - 1 if f"mtp.{name}".removesuffix(".weight").endswith(lowered) else w for name, w in right.items()
    }
    loaded = load_mtp(converted(tmp_path / "target", stored, {"format": "mlx"}), target, mx.float32)
    assert says in capsys.readouterr().err
    for name, weight in tree_flatten(loaded.model.parameters()):
        assert mx.allclose(weight, right[f"mtp.{name}"].astype(mx.float32), atol=1e-3).item(), name


@pytest.mark.parametrize("lowered", ["pre_fc_norm_hidden", "q_norm"])
def test_a_head_with_one_norm_of_the_other_kind_guesses_as_the_right_one_does(demo, lowered):
    target, weights = demo
    config = json.loads((DEMO / "target" / "config.json").read_text())
    one = {name: w - 1 if f".{name}".endswith(f".{lowered}.weight") else w for name, w in weights.items()}
    names = [name for name in weights if "norm" in name]
    right, found = (
        settle_norms(build_mtp(stored, config, target, DEMO, mx.float32), target, names) for stored in (weights, one)
    )
    assert right.endswith("(49 of 64 tokens guessed)")
    assert int(found.split("(")[1].split()[0]) >= 49


def test_a_split_repository_whose_norms_are_w_minus_1_is_found_out_unless_its_config_says_w(demo, tmp_path, capsys):
    target, weights = demo
    stored = {name: w - 1 if "norm" in name else w for name, w in weights.items()}
    folder = converted(tmp_path / "split", {}, None, model_type="qwen3_5_mtp")
    mx.save_safetensors(str(folder / "model.safetensors"), stored, {"format": "mlx"})
    norm = load_mtp(folder, target, mx.float32).model.norm.weight
    assert mx.allclose(norm, weights["norm.weight"].astype(mx.float32), atol=1e-3).item()
    assert "norms read as w - 1 (" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_norms": "w"}))
    assert mx.array_equal(load_mtp(folder, target, mx.float32).model.norm.weight, stored["norm.weight"]).item()
    assert capsys.readouterr().err == ""


def test_a_head_as_pytorch_wrote_it_beside_a_converted_target_has_w_minus_1_and_nothing_is_tried(
    demo, tmp_path, capsys
):
    target, weights = demo
    folder = converted(tmp_path / "target", {}, {"format": "mlx"})
    head = {f"mtp.{name}": w - 1 if "norm" in name else w for name, w in weights.items()}
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), head, {"format": "pt"})
    loaded = load_mtp(folder, target, mx.float32).model
    assert mx.allclose(loaded.norm.weight, weights["norm.weight"].astype(mx.float32), atol=1e-3).item()
    assert capsys.readouterr().err == ""


def test_a_head_that_guesses_nothing_either_way_is_left_as_it_is(demo):
    target, weights = demo
    noise = {name: mx.random.normal(w.shape, key=mx.random.key(3)) for name, w in weights.items() if "norm" not in name}
    config = json.loads((DEMO / "target" / "config.json").read_text())
    head = build_mtp({**weights, **noise}, config, target, DEMO, mx.float32)
    names = [name for name in weights if "norm" in name]
    said = settle_norms(head, target, names)
    assert "norms read as w, by their names" in said and "either way" in said
    assert mx.array_equal(head.model.norm.weight, weights["norm.weight"].astype(mx.float32)).item()


@pytest.mark.parametrize("changes", [{}, EXPERTS])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_head_of_a_float_target_drafts_as_its_unpacked_numbers(changes, bits):
    target = tiny(3, **changes)
    mx.random.seed(4)
    packed = MTPHead(target.config)
    nn.quantize(packed, 32, bits)
    stored, dense = dict(tree_flatten(packed.parameters())), {}
    for name, w in stored.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in stored:
            w = mx.dequantize(w, stored[f"{stem}.scales"], stored[f"{stem}.biases"], 32, bits)
        if not name.endswith((".scales", ".biases")):
            dense[name] = w
    config = {"quantization": {"group_size": 128, "bits": 2}} | vars(target.config)

    def logits(weights: dict[str, mx.array]) -> mx.array:
        drafter, ids, policy = build_mtp(weights, config, target, Path("head")), tokens(5, 9), Greedy()
        context = drafter.new_context()
        drafter.observe(context, ids, target.features(ids, drafter.tap_ids)[1], 9)
        drafter.propose(context, mx.array([3]), 3, policy)
        return policy.logits

    assert mx.allclose(logits(stored), logits(dense), atol=1e-4).item()
