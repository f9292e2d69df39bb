"""The tensors of a drafter's files, and whether they are the ones that it needs."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from specmlx.formats.module_weights import column_major
from specmlx.formats.scaled_linear import place
from specmlx.targets.checkpoint import cast

# mlx's layouts: with biases of any of these bits in groups of so many, without them what the pair says.
_BITS, _SIZES = (2, 3, 4, 5, 6, 8), (16, 32, 64, 128)
_MODES = {(32, 4): "mxfp4", (32, 8): "mxfp8", (16, 4): "nvfp4"}


def load_weights(model: nn.Module, weights: dict[str, mx.array], path: Path, dtype: mx.Dtype | None) -> None:
    """Give a model its weights, in layers of the formats that they are in; `dtype` casts those of floating point.

    Raises ValueError, one line that names `path`, for a missing, extra or misshapen tensor.
    """
    place(model, weights)
    _quantize_as_stored(model, weights)
    _check_names(model, weights, path)
    model.load_weights(list(weights.items()))
    if dtype is not None:
        cast(model, dtype)
    if mx.default_device() == mx.cpu:
        column_major(model)
    mx.eval(model.parameters())


def _quantize_as_stored(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Make the layers whose `weights` have scales quantized ones, of the bits, group size and mode of their shapes.

    What config.json says of them is the target's where a head is in its files. Raises ValueError, one line, for shapes
    that are none of mlx's.
    """

    def chosen(name: str, module: nn.Module) -> bool | dict[str, Any]:
        packed, scales = (weights.get(f"{name}.{part}") for part in ("weight", "scales"))
        if packed is None or scales is None or not isinstance(module, nn.Linear | nn.Embedding | SwitchLinear):
            return False
        inputs, columns, groups = module.weight.shape[-1], packed.shape[-1] * 32, scales.shape[-1] or 1
        size, bits = inputs // groups, columns // inputs
        mode = "affine" if f"{name}.biases" in weights else _MODES.get((size, bits))
        if (size * groups, bits * inputs) != (inputs, columns) or size not in _SIZES or bits not in _BITS or not mode:
            shapes = f"weight {list(packed.shape)}, scales {list(scales.shape)}"
            raise ValueError(f"{name} is packed as mlx packs nothing of {inputs} inputs: {shapes}")
        return {"group_size": size, "bits": bits, "mode": mode}

    nn.quantize(model, class_predicate=chosen)


def _check_names(model: nn.Module, weights: dict[str, mx.array], path: Path) -> None:
    """Raise ValueError, one line that lists names, unless `weights` are the model's: none missing, extra, misshapen."""
    wanted, problems = dict(tree_flatten(model.parameters())), []
    for what, names in (("missing", wanted.keys() - weights.keys()), ("extra", weights.keys() - wanted.keys())):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            problems.append(f"{what} {', '.join(name[:80] for name in sorted(names)[:5])}{more}")
    for name in sorted(wanted.keys() & weights.keys()):
        have, want = weights[name], wanted[name]
        if have.shape != want.shape:
            problems.append(f"{name} is {list(have.shape)}, should be {list(want.shape)}")
        elif mx.issubdtype(have.dtype, mx.floating) != mx.issubdtype(want.dtype, mx.floating):
            problems.append(f"{name} is {have.dtype}, which config.json says nothing about")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"the weights in {path} don't fit its config.json: {'; '.join(problems[:4])}{more}")
