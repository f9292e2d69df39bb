"""FP8 and FP4 checkpoints stay packed: every code means what its format says, and what is absurd is refused."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear
from publishers import as_published, e2m1, e4m3, fp8_values, modelopt, random_fp8, tensor, write_safetensors
from rig import EXPERTS, TINY, in_rounds, same_bits, tiny, tokens

from specmlx.formats.scaled import read_scaled
from specmlx.formats.scaled_linear import place
from specmlx.targets.checkpoint import load_target
from specmlx.targets.config import HybridConfig
from specmlx.targets.hybrid import Model

SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_scheme": None}


def placed(weights: dict[str, np.ndarray], layer: nn.Module, config: dict | None = None) -> nn.Module:
    """The layer named "w" that weights make of a dense one."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = layer

    holder = Holder()
    place(holder, read_scaled({f"w.{k}": mx.array(v) for k, v in weights.items()}, config or {}))
    return holder.w


def weight_of(layer: nn.Module, K: int) -> np.ndarray:
    """W float32 `[N, K]`, read through the layer itself: what it makes of the identity."""
    return np.array(layer(mx.eye(K)).T)


def test_every_fp8_code_is_its_value_times_the_scale_of_its_tensor_or_row_to_the_last_bit():
    codes = np.array([[c for c in range(256) if c & 127 != 127] + [0, 0]], np.uint8)
    codes = np.concatenate([codes, codes[:, ::-1]])
    for scale in (np.float32(3.7e-3), np.array([[3.7e-3], [1.1e-4]], np.float32), np.array([2.5e-3], np.float32)):
        layer = placed(
            {"weight": codes, "weight_scale": scale, "input_scale": np.float32(2)}, nn.Linear(256, 2, bias=False)
        )
        want = np.zeros(codes.shape, np.float32)
        for i, row in enumerate(codes):
            for j, code in enumerate(row):
                want[i, j] = np.float32(e4m3(int(code))) * np.broadcast_to(scale.reshape(-1), (2,))[i]
        np.testing.assert_array_equal(weight_of(layer, 256), want)


@pytest.mark.parametrize("publisher", ["modelopt", "compressed-tensors"])
def test_every_fp4_code_under_every_block_scale_is_its_value_to_the_last_bit(publisher):
    # 127 rows, one for each block scale, and all 16 codes in each.
    codes = np.tile(np.array([2 * i | (2 * i + 1) << 4 for i in range(8)], np.uint8), (127, 4))
    scales = np.arange(127, dtype=np.uint8)[:, None].repeat(4, 1)
    factor = np.float32(3.6e-4)
    if publisher == "modelopt":
        parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    else:
        divisor = np.array([2777.0], np.float32)
        factor = np.float32(1) / divisor[0]
        parts = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}
    want = np.zeros((127, 64), np.float32)
    for i in range(127):
        for j in range(64):
            want[i, j] = np.float32(e2m1(j % 16) * e4m3(i)) * factor
    np.testing.assert_array_equal(weight_of(placed(parts, nn.Linear(64, 127, bias=False)), 64), want)


@pytest.mark.parametrize("N", [256, 200])
def test_fp8_blocks_have_their_own_scales(N):
    rng = np.random.default_rng(0)
    codes = random_fp8(rng, N, 384)
    scale = rng.uniform(1e-4, 1e-3, (2, 3)).astype(np.float32)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    layer = placed({"weight": codes, "weight_scale_inv": scale}, nn.Linear(384, N, bias=False), config)
    values, want = fp8_values(codes), np.zeros((N, 384), np.float32)
    for i in range(N):
        for j in range(384):
            want[i, j] = values[i, j] * scale[i // 128, j // 128]
    np.testing.assert_array_equal(weight_of(layer, 384), want)
    rows = mx.random.normal((1, 23, 384), key=mx.random.key(1))
    whole = layer(rows)
    layer.most = 5 * 2 * 384
    assert mx.array_equal(layer(rows), whole).item(), "five rows at a time"
    x = mx.random.normal((2, 3, 384), key=mx.random.key(0))
    np.testing.assert_allclose(np.array(layer(x)), np.array(x) @ want.T, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["tensor", "channel", "block", "fp4"])
def test_experts_have_scales_of_their_own_in_any_order_of_rows(kind):
    rng = np.random.default_rng(1)
    E, N, K = 5, 64, 64
    singles, parts = [], []
    config = {"quantization_config": {"weight_block_size": [32, 32]}}
    for _ in range(E):
        if kind == "fp4":
            scales = rng.integers(0x40, 0x60, (N, K // 16), np.uint8)
            factor = np.float32(rng.uniform(0.01, 0.03))
            codes = rng.integers(0, 256, (N, K // 2), np.uint8)
            part = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
        else:
            shape = {"tensor": (), "channel": (N, 1), "block": (2, 2)}[kind]
            scale = np.asarray(rng.uniform(1e-3, 3e-3, shape), np.float32)
            part = {"weight": random_fp8(rng, N, K), "weight_scale": scale}
        parts.append(part)
        singles.append(
            placed(part, nn.Linear(K, N, bias=False), {"quantization_config": {"weight_block_size": [32, 32]}})
        )
    weights = {f"w.{i}.{k}": mx.array(v) for i, part in enumerate(parts) for k, v in part.items()}
    read = read_scaled(weights, config)
    stacked = {}
    for name in {name.split(".", 2)[2] for name in read}:
        stacked[f"w.{name}"] = mx.stack([read[f"w.{i}.{name}"] for i in range(E)])

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = SwitchLinear(K, N, E, bias=False)

    holder = Holder()
    place(holder, stacked)
    x = mx.random.normal((2, 3, 1, 1, K), key=mx.random.key(1))
    indices = mx.array(rng.integers(0, E, (2, 3, 4)), dtype=mx.uint32)
    got = holder.w(x, indices)
    for b in range(2):
        for t in range(3):
            for k in range(4):
                want = singles[indices[b, t, k].item()](x[b, t, 0])
                assert mx.allclose(got[b, t, k], want, rtol=1e-5, atol=1e-5).item()
    order = mx.array(np.sort(np.array(indices.reshape(-1))))
    rows = mx.random.normal((24, 1, K), key=mx.random.key(2))
    got = holder.w(rows, order, sorted_indices=True)
    for i in range(24):
        assert mx.allclose(got[i], singles[order[i].item()](rows[i]), rtol=1e-5, atol=1e-5).item()


def write(path: Path, **changes) -> dict[str, mx.array]:
    """A tiny model in nvidia/Qwen3.8-27B-NVFP4's layout, and the dense weights that its codes mean."""
    config = TINY | SMALL | changes
    tensors, dense = modelopt(as_published(tiny(0, **config)), np.random.default_rng(0))
    names = sorted(tensors)
    for i in range(2):
        write_safetensors(path / f"model-{i + 1:05}-of-00002.safetensors", {n: tensors[n] for n in names[i::2]})
    text = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    whole = {"model_type": config["model_type"], "text_config": text, "quantization_config": MODELOPT}
    (path / "config.json").write_text(json.dumps(whole))
    return {n: mx.array(v).astype(mx.bfloat16 if tensors[n][0] == "BF16" else mx.float32) for n, v in dense.items()}


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_modelopt_checkpoint_gives_the_logits_of_the_dense_weights_that_it_means(changes, tmp_path):
    dense = write(tmp_path, **changes)
    model, _ = load_target(tmp_path, dtype=mx.float32)
    reference = Model(HybridConfig.from_dict(TINY | SMALL | changes))
    reference.load_weights(list(reference.sanitize(dense).items()))
    reference.set_dtype(mx.float32)
    reference.eval()
    ids = tokens(1, 12)
    got, want = (m.verify(m.new_states(), ids).logits for m in (model, reference))
    assert mx.allclose(got, want, rtol=0, atol=1e-4).item() and want.std().item() > 0.1
    layer = model.layers[0].linear_attn.in_proj_qkv
    assert layer.weight.dtype == mx.uint32 and layer.output_scale.dtype == mx.float32


@pytest.mark.linux_bits
@pytest.mark.parametrize("dtype", [mx.float32, None])
def test_rows_of_a_modelopt_checkpoint_have_the_same_bits_in_passes_of_any_width(dtype, tmp_path):
    write(tmp_path)
    model, _ = load_target(tmp_path, dtype=dtype)
    ids = tokens(2, 20)[0].tolist()
    want = in_rounds(model, model.new_states(), ids, seed=0, most=1)
    assert want[0].dtype == (dtype or mx.bfloat16)
    assert same_bits(in_rounds(model, model.new_states(), ids, seed=1), want)


GATE = "model.language_model.layers.0.mlp.gate_proj"
QKV = "model.language_model.layers.0.linear_attn.in_proj_qkv"


def spoil(path: Path, name: str, change) -> None:
    """Rewrite one tensor `(dtype, shape, bytes)` of the two files; None takes it out."""
    for file in path.glob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if name not in header:
            continue
        body, tensors = data[8 + length :], {}
        for key, entry in header.items():
            if key != "__metadata__":
                a, b = entry["data_offsets"]
                tensors[key] = (entry["dtype"], entry["shape"], body[a:b])
        new = change(*tensors.pop(name))
        write_safetensors(file, tensors | ({} if new is None else {name: new}))


def scaled_by(factor: float):
    return lambda dtype, shape, data: tensor(dtype, np.frombuffer(data, np.float32).reshape(shape) * np.float32(factor))


def with_byte(code: int, at: int):
    return lambda dtype, shape, data: (dtype, shape, data[:at] + bytes([code]) + data[at + 1 :])


WRONG = {
    "a NaN code": (f"{QKV}.weight", with_byte(0x7F, 5), "NaN codes"),
    "a negative NaN code": (f"{QKV}.weight", with_byte(0xFF, 99), "NaN codes"),
    "a NaN block scale": (f"{GATE}.weight_scale", with_byte(0x7F, 3), "NaN or negative"),
    "a negative block scale": (f"{GATE}.weight_scale", with_byte(0xB0, 3), "NaN or negative"),
    "the scale's reciprocal": (
        f"{GATE}.weight_scale_2",
        lambda dtype, shape, data: tensor(dtype, 1 / np.frombuffer(data, np.float32).reshape(shape)),
        "largest weight would be",
    ),
    "a scale of zero": (f"{QKV}.weight_scale", scaled_by(0), "zero, negative or not finite"),
    "a negative scale": (f"{QKV}.weight_scale", scaled_by(-1), "zero, negative or not finite"),
    "an infinite scale": (f"{QKV}.weight_scale", scaled_by(np.inf), "zero, negative or not finite"),
    "no tensor scale": (f"{GATE}.weight_scale_2", lambda *_: None, "weight_scale_2"),
    "no block scales": (f"{GATE}.weight_scale", lambda *_: None, "weight_scale"),
    "no codes": (f"{QKV}.weight", lambda *_: None, "in_proj_qkv.weight is missing"),
    "fewer block scales": (
        f"{GATE}.weight_scale",
        lambda dtype, shape, data: (dtype, [shape[0], shape[1] - 1], data[: shape[0] * (shape[1] - 1)]),
        "should be F8_E4M3",
    ),
    "fewer rows": (
        f"{QKV}.weight",
        lambda dtype, shape, data: (dtype, [shape[0] - 1, shape[1]], data[: (shape[0] - 1) * shape[1]]),
        "should be",
    ),
    "AWQ's input scales": (
        f"{GATE}.weight_scale_2",
        lambda dtype, shape, data: (dtype, shape, data),
        None,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_right_is_refused_with_the_tensors_name(case, tmp_path):
    write(tmp_path)
    name, change, word = WRONG[case]
    if word is None:
        spoil(tmp_path, name, change)
        spoilt = {f"{GATE}.pre_quant_scale": tensor("F32", np.ones(64, np.float32))}
        write_safetensors(tmp_path / "model-00003-of-00003.safetensors", spoilt)
        name, word = f"{GATE}.pre_quant_scale", "pre_quant_scale"
    else:
        spoil(tmp_path, name, change)
    with pytest.raises(ValueError) as error:
        load_target(tmp_path)
    message = str(error.value)
    assert word in message and "\n" not in message and str(tmp_path) in message
    assert ".".join(name.split(".")[2:6]) in message


def test_the_divisor_trap_shows_itself_by_the_size_of_the_weights():
    # Layer 0's down_proj of nvidia's file: as a multiplier the largest weight is 0.98, as a divisor 7.9e4.
    codes, scales = np.full((1, 8), 0x77, np.uint8), np.array([[0x7E]], np.uint8)
    factor = np.float32(0.98 / 6 / 448)
    right = placed({"weight": codes, "weight_scale": scales, "weight_scale_2": factor}, nn.Linear(16, 1, bias=False))
    assert weight_of(right, 16).max() == pytest.approx(0.98)
    for parts in (
        {"weight": codes, "weight_scale": scales, "weight_scale_2": 1 / factor},
        {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": factor},
    ):
        with pytest.raises(ValueError, match=r"w: its largest weight would be 7\.4e\+06"):
            placed(parts, nn.Linear(16, 1, bias=False))


GOLDENS = Path(__file__).parents[1] / "goldens" / "scaled"


@pytest.mark.parametrize("name", ["nvfp4-pack-quantized", "float-quantized", "float-quantized-block", "fp8"])
def test_what_the_publishers_packages_wrote_gives_the_logits_of_transformers(name):
    expected = mx.load(str(GOLDENS / name / "expected.safetensors"))
    model, _ = load_target(GOLDENS / name, dtype=mx.float32)
    packed = {type(module).__name__ for _, module in model.named_modules() if "scales" in module}
    # A matrix of one block has one scale.
    assert packed == {"ScaledLinear"} | ({"BlockScaledLinear"} if name in ("float-quantized-block", "fp8") else set())
    logits = model.verify(model.new_states(), expected["tokens"][None]).logits[0]
    assert mx.allclose(logits, expected["logits"], rtol=0, atol=1e-3).item()
    assert mx.array_equal(logits.argmax(-1), expected["logits"].argmax(-1)).item()


@pytest.mark.parametrize("name", ["nvfp4-pack-quantized", "float-quantized", "float-quantized-block", "fp8"])
@pytest.mark.parametrize("every", [False, True])
def test_what_the_publishers_packages_write_is_refused_without_its_scales(name, every, tmp_path):
    shutil.copytree(GOLDENS / name, tmp_path, dirs_exist_ok=True)
    scales = sorted(key for key in mx.load(str(GOLDENS / name / "model.safetensors")) if "scale" in key)
    stem = scales[0].rpartition(".")[0]
    for scale in scales:
        if every or scale.startswith(stem):
            spoil(tmp_path, scale, lambda *_: None)
    with pytest.raises(ValueError, match="scale is missing|but no weight_scale") as error:
        load_target(tmp_path)
    assert f"{stem}.weight" in str(error.value) or every
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nvfp4-pack-quantized", "float-quantized", "float-quantized-block", "fp8"])
def test_a_negative_scale_of_the_publishers_packages_is_refused_by_name(name, tmp_path):
    shutil.copytree(GOLDENS / name, tmp_path, dirs_exist_ok=True)
    weights = mx.load(str(GOLDENS / name / "model.safetensors"))
    scale = next(key for key, w in weights.items() if "_scale" in key and w.dtype != mx.uint8 and "input" not in key)
    spoil(tmp_path, scale, lambda dtype, shape, data: (dtype, shape, data[:-1] + bytes([data[-1] | 0x80])))
    with pytest.raises(ValueError, match="zero, negative or not finite") as error:
        load_target(tmp_path)
    assert scale.rpartition(".")[0] in str(error.value)
