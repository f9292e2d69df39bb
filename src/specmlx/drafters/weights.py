"""Whether the tensors of a drafter's files are the ones that it needs."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def quantize_as_stored(model: nn.Module, quantization: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Make the layers whose `weights` have scales quantized ones, as config.json's `quantization` says (mlx-lm's way).

    Raises ValueError where it says too little.
    """

    def chosen(name: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{name}.scales" not in weights or not isinstance(module, nn.Linear | nn.Embedding):
            return False
        override = quantization.get(name)
        return override if isinstance(override, dict) else True

    try:
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=chosen,
        )
    except KeyError as missing:
        raise ValueError(f"config.json's quantization has no {missing.args[0]}") from None


def check_names(model: nn.Module, weights: dict[str, mx.array], path: Path) -> None:
    """Raise ValueError, one line that lists names, unless `weights` are the model's: none missing, extra, misshapen."""
    wanted = dict(tree_flatten(model.parameters()))
    problems = []
    for what, names in (
        ("missing", wanted.keys() - weights.keys()),
        ("extra", weights.keys() - wanted.keys()),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            problems.append(f"{what} {', '.join(sorted(names)[:5])}{more}")
    for name in sorted(wanted.keys() & weights.keys()):
        have, want = weights[name], wanted[name]
        if have.shape != want.shape:
            problems.append(f"{name} is {list(have.shape)}, should be {list(want.shape)}")
        elif mx.issubdtype(have.dtype, mx.floating) != mx.issubdtype(want.dtype, mx.floating):
            problems.append(f"{name} is {have.dtype}, which config.json says nothing about")
    if problems:
        raise ValueError(f"the weights in {path} don't fit its config.json: {'; '.join(problems)}")
