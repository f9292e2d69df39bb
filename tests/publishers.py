"""Checkpoints as publishers write them: safetensors of any dtype, FP8 and FP4 codes with their meaning."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(code: int) -> float:
    """What an FP8 code means."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    assert code & 127 != 127, "NaN"
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e2m1(code: int) -> float:
    """What an FP4 code means."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def fp8_values(codes: np.ndarray) -> np.ndarray:
    """Values float32 `[N, K]` of FP8 codes, one by one."""
    values = np.zeros(codes.shape, np.float32)
    for i, row in enumerate(codes):
        for j, code in enumerate(row):
            values[i, j] = e4m3(int(code))
    return values


def fp4_values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values float32 `[N, K]` of FP4 codes, two a byte, low one first, with an FP8 scale for 16 of them."""
    values = np.zeros((codes.shape[0], 2 * codes.shape[1]), np.float32)
    for i, row in enumerate(codes):
        for j, byte in enumerate(row):
            for half, code in enumerate((int(byte) & 15, int(byte) >> 4)):
                column = 2 * j + half
                values[i, column] = e2m1(code) * e4m3(int(scales[i, column // 16]))
    return values


def random_fp8(rng: np.random.Generator, N: int, K: int) -> np.ndarray:
    """Codes of every finite value."""
    return rng.choice(np.array([c for c in range(256) if c & 127 != 127], np.uint8), (N, K))


def tensor(dtype: str, values: np.ndarray) -> tuple[str, list[int], bytes]:
    """A tensor of a safetensors file; BF16 takes float32 values."""
    if dtype == "BF16":
        values = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return dtype, list(values.shape), np.ascontiguousarray(values).tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def as_published(model) -> dict[str, np.ndarray]:
    """A hybrid's weights float32 by Hugging Face's names: convs [C, 1, K], norms less one, experts one by one."""
    files = {}
    for name, value in tree_flatten(model.parameters()):
        name = name.removeprefix("language_model.")
        name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        value = np.array(value.astype(mx.float32))
        if name.endswith("conv1d.weight"):
            value = value.transpose(0, 2, 1)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            value = value - 1
        if "switch_mlp" in name:
            files |= {name.replace("switch_mlp", f"experts.{i}"): expert for i, expert in enumerate(value)}
        else:
            files[name] = value
    return files


def modelopt(weights: dict[str, np.ndarray], rng: np.random.Generator):
    """nvidia/Qwen3.8-27B-NVFP4's layout with random codes: the file's tensors, and the dense weights that they mean.

    FP8 with one scale a tensor for the mixers' projections, NVFP4 for MLPs and head, BF16 for the rest (in_proj_a and
    in_proj_b, convs, norms, embeddings, routers).
    """
    tensors, dense = {"mtp.fc.weight": tensor("BF16", np.zeros((4, 8)))}, {}
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        kind = stem.rpartition(".")[2]
        if kind in ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"):
            codes, scale = random_fp8(rng, *value.shape), np.float32(rng.uniform(1, 3) * 1e-4)
            tensors[name] = tensor("F8_E4M3", codes)
            tensors[f"{stem}.weight_scale"] = tensor("F32", np.array(scale))
            tensors[f"{stem}.input_scale"] = tensor("F32", np.array(np.float32(0.02)))
            dense[name] = fp8_values(codes) * scale
        elif kind in ("gate_proj", "up_proj", "down_proj", "lm_head"):
            N, K = value.shape
            codes = rng.integers(0, 256, (N, K // 2), np.uint8)
            scales = rng.integers(0x60, 0x7F, (N, K // 16), np.uint8)
            scale = np.float32(rng.uniform(0.5, 1) * 1e-4)
            tensors[name] = tensor("U8", codes)
            tensors[f"{stem}.weight_scale"] = tensor("F8_E4M3", scales)
            tensors[f"{stem}.weight_scale_2"] = tensor("F32", np.array(scale))
            dense[name] = fp4_values(codes, scales) * scale
        else:
            tensors[name] = tensor("BF16", value)
            bits = np.ascontiguousarray(value, np.float32).view(np.uint32) & 0xFFFF0000
            dense[name] = bits.view(np.float32).reshape(value.shape)
    tensors["model.language_model.layers.1.self_attn.k_proj.k_scale"] = tensor("F32", np.array(np.float32(1)))
    return tensors, dense
