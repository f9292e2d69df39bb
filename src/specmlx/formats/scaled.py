"""Checkpoints whose FP8 and FP4 weights have tensor, channel or block scales beside them, without dequantizing.

ModelOpt, compressed-tensors (`nvfp4-pack-quantized`, `float-quantized`) and Hugging Face `fp8` name the parts
differently; here they become the parameters of the layers of `formats.scaled_linear`. Activations stay as they are:
scales of inputs and of keys and values are not used.
"""

import math
from typing import Any

import mlx.core as mx

from specmlx.formats.config import read, shown

# A weight whose codes and scales make it larger than this has its scale the wrong way round.
MOST = 1e3
_MARKS = (".weight_scale", ".weight_scale_inv", ".weight_packed")
_UNUSED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale")
_PARTS = (".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".weight_global_scale", ".weight")


def is_scaled(names: Any) -> bool:
    """Whether tensors of these names are quantized weights with scales of a publisher other than mlx."""
    return any(name.endswith(_MARKS) for name in names)


def read_scaled(weights: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """The tensors under the names that the layers of `formats.scaled_linear` have; others stay as they are.

    F8 tensors are the uint8 arrays that mx.load makes of them. Raises ValueError, one line with the tensor's name, for
    NaN codes, negative or NaN block scales, a part that is missing or misshapen, and scales that make weights of an
    absurd size.
    """
    block = _block_size(config)
    names = {name.rpartition(".")[0] for name in weights if name.endswith(_MARKS)}
    used = {name for name in weights if name.rpartition(".")[0] in names and name.endswith(_PARTS)}
    found = {name: value for name, value in weights.items() if name not in used and not name.endswith(_UNUSED)}
    for name, value in found.items():
        if name.endswith(".weight") and value.dtype == mx.uint8:
            raise ValueError(f"{name} has FP8 or FP4 codes but no weight_scale: can't tell what they stand for")
    for name in sorted(names):
        parts = {part: weights[name + part] for part in _PARTS if name + part in weights}
        found |= {f"{name}.{key}": value for key, value in _layer(name, parts, block).items()}
    return found


def _layer(name: str, parts: dict[str, mx.array], block: int) -> dict[str, mx.array]:
    codes = parts.get(".weight_packed", parts.get(".weight"))
    if codes is None or codes.dtype != mx.uint8 or codes.ndim != 2:
        kind = "missing" if codes is None else f"{codes.dtype} {list(codes.shape)}"
        raise ValueError(f"{name}.weight is {kind}: FP8 and FP4 codes are matrices of bytes")
    packed = ".weight_packed" in parts
    if packed or ".weight_scale_2" in parts:
        whole = ".weight_global_scale" if packed else ".weight_scale_2"
        if missing := [part for part in (whole, ".weight_scale") if part not in parts]:
            raise ValueError(f"{name}{missing[0]} is missing")
        scale = parts[whole].astype(mx.float32)
        return _fp4(name, codes, parts[".weight_scale"], 1 / scale if packed else scale)
    scale = parts.get(".weight_scale_inv", parts.get(".weight_scale"))
    if scale.dtype == mx.uint8:
        raise ValueError(f"{name} has block scales but no tensor scale (weight_scale_2): can't tell its weights' size")
    return _fp8(name, codes, scale.astype(mx.float32), block)


def _fp4(name: str, codes: mx.array, scales: mx.array, scale: mx.array) -> dict[str, mx.array]:
    N, K = codes.shape[0], codes.shape[1] * 2
    if scales.dtype != mx.uint8 or scales.shape != (N, K // 16) or K % 16:
        raise ValueError(
            f"{name}.weight_scale is {scales.dtype} {list(scales.shape)}, should be F8_E4M3 {[N, K // 16]}"
        )
    if mx.any(_is_nan(scales) | (scales > 0x80)).item():
        raise ValueError(f"{name}.weight_scale has NaN or negative codes: the file is corrupt")
    # A block's largest code is 6.
    _check_size(name, 6 * mx.from_fp8(scales.max(), mx.float32).item(), scale)
    return {"weight": codes.view(mx.uint32), "scales": scales, "output_scale": scale.reshape(())}


def _fp8(name: str, codes: mx.array, scale: mx.array, block: int) -> dict[str, mx.array]:
    N, K = codes.shape
    if K % 32:
        raise ValueError(f"{name}.weight is {[N, K]}: mlx's layout needs a multiple of 32 columns")
    if mx.any(_is_nan(codes)).item():
        raise ValueError(f"{name}.weight has NaN codes (0x7f or 0xff): the file is corrupt")
    _check_size(name, mx.from_fp8((codes & 0x7F).max(), mx.float32).item(), scale)
    layer = {"weight": codes.view(mx.uint32), "scales": mx.full((N, K // 32), 127, dtype=mx.uint8)}
    if scale.size == 1:
        return layer | {"output_scale": scale.reshape(())}
    if scale.shape in ((N,), (N, 1)):
        return layer | {"output_scale": scale.reshape(N)}
    blocks = (math.ceil(N / block), K // block)
    if scale.shape != blocks or K % block:
        have, want = list(scale.shape), list(blocks)
        raise ValueError(f"{name} is {[N, K]} with scales {have}: {block} x {block} blocks would make {want}")
    missing = blocks[0] * block - N
    layer = {key: mx.pad(x, [(0, missing), (0, 0)]).reshape(blocks[0], block, -1) for key, x in layer.items()}
    return layer | {"block_scales": scale}


def _is_nan(codes: mx.array) -> mx.array:
    """Which codes (uint8) of FP8 E4M3 are not a number; it has no infinities (OCP 8-bit floating point, 2023)."""
    return (codes & 0x7F) == 0x7F


def _check_size(name: str, most_code: float, scale: mx.array) -> None:
    if not mx.all(mx.isfinite(scale) & (scale > 0)).item():
        raise ValueError(f"{name}: its scale is zero, negative or not finite, so the file is corrupt")
    if (most := most_code * scale.max().item()) > MOST:
        raise ValueError(f"{name}: its largest weight would be {most:.2g}, so its scale is not meant as it is named")


def _block_size(config: dict[str, Any]) -> int:
    quantization = read(config, "quantization_config", dict, {})
    groups = read(quantization, "config_groups", dict, {})
    weights = [read(read(groups, name, dict, {}), "weights", dict, {}) for name in groups]
    places = [(quantization, "weight_block_size"), *((part, "block_structure") for part in weights)]
    for part, name in places:
        if size := read(part, name, [int], None, above=0):
            if len(set(size)) != 1:
                raise ValueError(f"{name} is {shown(size)}: blocks must be square")
            return size[0]
    return 128
