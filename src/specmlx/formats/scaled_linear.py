"""Layers whose FP8 or FP4 codes stay packed as they are in the file, with scales that mlx's layouts have no place for.

w = code * block scale * tensor scale: mlx multiplies codes and block scales (mxfp8 with unit block scales, nvfp4), the
scale of the tensor or of an output channel multiplies the output, and one of a 128 x 128 block the input.
"""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

# mlx's (group size, bits) of the two layouts.
LAYOUTS = {"mxfp8": (32, 8), "nvfp4": (16, 4)}
# Floating-point parameters that stay float32 whatever the model's dtype is.
SCALES = ("output_scale", "block_scales")


class ScaledLinear(nn.Module):
    """x Wᵀ * output_scale, W packed by mode "mxfp8" or "nvfp4"; `output_scale` float32 `[]` or `[N]`."""

    def __init__(self, mode: str):
        super().__init__()
        self.group_size, self.bits = LAYOUTS[mode]
        self.mode = mode

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.quantized_matmul(_wide(x), self.weight, self.scales, **packing(self))
        y = (y * self.output_scale).astype(x.dtype)
        return y + self.bias if "bias" in self else y


class ScaledSwitchLinear(ScaledLinear):
    """The same for experts: W `[E, N, K]`, `output_scale` `[E, 1]` or `[E, N]`."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        options = {"rhs_indices": indices, "sorted_indices": sorted_indices} | packing(self)
        y = mx.gather_qmm(_wide(x), self.weight, self.scales, **options)
        return (y * self.output_scale[indices][..., None, :]).astype(x.dtype)


class BlockScaledLinear(nn.Module):
    """x Wᵀ with a float32 scale for each block of W, E4M3 codes `[N / b, b, K]`, `block_scales` `[N / b, K / b]`.

    The scales of a row block are multiplied into the input, in float32, so that no weight is rounded.
    """

    group_size, bits, mode = 32, 8, "mxfp8"

    def __init__(self, rows: int):
        super().__init__()
        # The last block may have rows that are none.
        self.rows = rows
        # Values that the scaled inputs may have at a time: 256 MiB.
        self.most = 1 << 26

    def __call__(self, x: mx.array) -> mx.array:
        flat = x.reshape(-1, x.shape[-1])
        # A row is as many rows as there are row blocks: long prompts in parts, so that they fit.
        at_once = max(1, self.most // (self.weight.shape[0] * x.shape[-1]))
        parts = [self._rows(flat[i : i + at_once]) for i in range(0, flat.shape[0], at_once)]
        y = (parts[0] if len(parts) == 1 else mx.concatenate(parts)).reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y

    def _rows(self, x: mx.array) -> mx.array:
        y = mx.quantized_matmul(_blocks_scaled(x, self.block_scales), self.weight, self.scales, **packing(self))
        return y.transpose(1, 0, 2).flatten(1)[:, : self.rows].astype(x.dtype)


class BlockScaledSwitchLinear(BlockScaledLinear):
    """The same for experts: codes `[E, N / b, b, K]`, `block_scales` `[E, N / b, K / b]`."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        blocks = self.weight.shape[1]
        flat = indices[..., None] * blocks + mx.arange(blocks, dtype=indices.dtype)
        options = {"rhs_indices": flat, "sorted_indices": sorted_indices} | packing(self)
        x_blocks = _blocks_scaled(x, self.block_scales[indices])
        y = mx.gather_qmm(x_blocks, self.weight.flatten(0, 1), self.scales.flatten(0, 1), **options)
        return y.swapaxes(-2, -3).flatten(-2)[..., : self.rows].astype(x.dtype)


def packing(layer: nn.Module) -> dict[str, Any]:
    """How a layer's matrix is packed, as mlx's functions name it."""
    return {"mode": layer.mode, "bits": layer.bits, "group_size": layer.group_size}


def _wide(x: mx.array) -> mx.array:
    # Codes without their tensor scale go up to 2688, which float16's range can't sum.
    return x.astype(mx.float32) if x.dtype == mx.float16 else x


def _blocks_scaled(x: mx.array, scales: mx.array) -> mx.array:
    """Rows `[..., M, K]` for each row block, times its scales `[..., N / b, K / b]`: `[..., N / b, M, K]`."""
    size = x.shape[-1] // scales.shape[-1]
    scaled = mx.unflatten(x[..., None, :, :].astype(mx.float32), -1, (-1, size)) * scales[..., None, :, None]
    return scaled.flatten(-2)


def place(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Put such a layer, with its weights, wherever `weights` have one; in place.

    Raises ValueError, with the tensor's name, where a weight's shape is not the layer's.
    """
    placed = []
    for path, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        parts = {name: weights[at] for name in ("weight", "scales", *SCALES) if (at := f"{path}.{name}") in weights}
        if not parts.keys() & SCALES:
            continue
        if not isinstance(layer, (nn.Linear, SwitchLinear)):
            raise ValueError(f"{path} has FP8 or FP4 codes: a {type(layer).__name__} can't")
        experts, want = isinstance(layer, SwitchLinear), list(layer.weight.shape)
        shape, words = [*parts["weight"].shape], parts["weight"].shape[-1]
        if "block_scales" in parts:
            new = (BlockScaledSwitchLinear if experts else BlockScaledLinear)(want[-2])
            parts.pop("output_scale", None)
            # The last block is filled up.
            size = shape.pop(-2)
            shape[-2], want[-2] = shape[-2] * size, math.ceil(want[-2] / size) * size
        else:
            # A group of nvfp4 is 2 words, one of mxfp8 8.
            mode = "nvfp4" if words == 2 * parts["scales"].shape[-1] else "mxfp8"
            new = (ScaledSwitchLinear if experts else ScaledLinear)(mode)
        shape[-1] = words * 32 // new.bits
        if shape != want:
            raise ValueError(f"{path}.weight is {shape}, should be {want}")
        if experts and (scale := parts.get("output_scale")) is not None and scale.ndim == 1:
            parts["output_scale"] = weights[f"{path}.output_scale"] = scale[:, None]
        for name, x in (parts | ({"bias": layer.bias} if "bias" in layer else {})).items():
            new[name] = x
        placed.append((path, new))
    model.update_modules(tree_unflatten(placed))
