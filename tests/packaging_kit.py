"""Drafters' files as their publishers pack them."""

import mlx.core as mx
import numpy as np
from drafter_kit import (
    case_weights,
    golden_config,
)

DSPARK = golden_config("dspark")


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def packed(config: dict, **fields) -> dict:
    """DSpark's own fields inside `dflash_config`, as SpecForge writes them, or `dspark_config`."""
    names = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    flat = {name: value for name, value in config.items() if name not in (*names, "num_anchors")}
    nested = {name: config[name] for name in (*names, "confidence_head_with_markov")}
    return {**flat, "architectures": ["DSparkDraftModel"], **{key: {**nested, **more} for key, more in fields.items()}}


def own_weights() -> dict[str, mx.array]:
    weights = case_weights("dspark")
    return {name: w.astype(mx.float32) for name, w in weights.items() if not name.startswith(("embed", "lm_head"))}


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Values of E4M3 codes without sign."""
    exponent, mantissa = codes >> 3 & 15, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def nvfp4(weights: dict[str, mx.array]):
    """Every matrix that has whole groups in NVFP4, and what it stands for, number by number."""
    random, codes_of, dense = np.random.default_rng(0), {}, {}
    for name, w in weights.items():
        N, K = w.shape[0], w.shape[-1]
        if w.ndim < 2 or K % 32 or "markov_w1" in name or N == 1:
            codes_of[name] = dense[name] = w
            continue
        codes, scales = random.integers(0, 16, (N, K)), random.integers(0x20, 0x40, (N, K // 16))
        tensor = np.float32(2.0 / np.sqrt(K) / 6)
        value = np.where(codes & 8, -1, 1) * E2M1[codes & 7] * np.repeat(e4m3(scales), 16, axis=1) * tensor
        codes_of[name] = mx.array((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        codes_of[f"{name}_scale"] = mx.array(scales.astype(np.uint8))
        codes_of[f"{name}_scale_2"] = mx.array(tensor)
        dense[name] = mx.array(value.astype(np.float32))
    return codes_of, dense


def lfm2(**changes) -> dict:
    config = packed(DSPARK, dflash_config={}, **changes)
    return {**config, "architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False, "block_size": 9}
