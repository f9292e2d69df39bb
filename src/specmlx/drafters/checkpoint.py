"""Drafters from a directory: z-lab's DFlash and DFlash 2, deepseek-ai's and RadixArk's DSpark, mlx exports of these."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import BlockDrafter, Target
from specmlx.drafters.config import DFLASH2, DSPARK, DrafterConfig
from specmlx.drafters.dflash import DFlash
from specmlx.drafters.dflash2 import DFlash2, DFlash2Trunk
from specmlx.drafters.dspark import DSpark, DSparkTrunk
from specmlx.drafters.pairing import check_pair
from specmlx.formats.checkpoint import read_config, weight_files
from specmlx.formats.dense import column_major

PREFIX = "model."
SHARED = ("embed_tokens.", "lm_head.")
# Bare in files, modules with a weight in z-lab's memory.
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def load_drafter(path: str | Path, target: Target, dtype: mx.Dtype | None = None) -> BlockDrafter:
    """The drafter in a directory, paired with its target; `dtype` casts its floating-point weights.

    deepseek-ai's files hold frozen copies of the target's embedding and head: those are dropped, and the
    target's own serve. Raises ValueError, one line that names the directory or file, for: no config.json or
    weights, an unreadable file, a pair that doesn't fit (told before any weight is read), a missing, extra or
    misshapen tensor.
    """
    path = Path(path)
    config = read_config(path)
    if reasons := check_pair(config, target.config):
        raise ValueError(f"the drafter in {path} can't serve this target: {'; '.join(reasons)}")
    parsed = DrafterConfig.from_dict(config)
    weights = read_weights(path)
    weights = {_renamed(name): weight for name, weight in weights.items()}
    weights = {name: weight for name, weight in weights.items() if not _is_shared(name, weight, parsed)}
    if parsed.enable_confidence_head is None:
        has_head = any(name.startswith("confidence_head.") for name in weights)
        parsed = replace(parsed, enable_confidence_head=has_head)
    drafter = build(parsed, target)
    if parsed.quantization:
        _quantize(drafter.model, parsed.quantization, weights)
    _check_names(drafter.model, weights, path)
    drafter.model.load_weights(list(weights.items()))
    if dtype is not None:
        drafter.model.set_dtype(dtype)
    if mx.default_device() == mx.cpu:
        column_major(drafter.model)
    mx.eval(drafter.model.parameters())
    return drafter


def build(config: DrafterConfig, target: Target) -> BlockDrafter:
    """A drafter with random weights, as training begins with."""
    if config.kind == DSPARK:
        return DSpark(DSparkTrunk(config), target)
    if config.kind == DFLASH2:
        return DFlash2(DFlash2Trunk(config), target)
    return DFlash(BlockTrunk(config), target)


def read_weights(path: Path) -> dict[str, mx.array]:
    """All tensors of a directory's safetensors files. Raises ValueError that names a cut or corrupt file."""
    weights: dict[str, mx.array] = {}
    for file in weight_files(path):
        try:
            weights.update(mx.load(str(file)))
        except RuntimeError as error:
            raise ValueError(f"{file} can't be read: {error}") from None
    return weights


def _renamed(name: str) -> str:
    name = name.removeprefix(PREFIX)
    stem = name.removesuffix(".weight")
    return stem if stem in CODEBOOKS else name


def _is_shared(name: str, weight: mx.array, config: DrafterConfig) -> bool:
    # Only deepseek-ai's copies are the target's tables; a DFlash file with one has a table of its own.
    if config.kind != DSPARK or not name.startswith(SHARED):
        return False
    expected = (config.vocab_size, config.hidden_size)
    # A quantized copy has as many rows, but narrower ones.
    dims = 1 if config.quantization else 2
    if weight.shape[:dims] != expected[:dims]:
        raise ValueError(f"{name} is {list(weight.shape)}, no copy of the target's {list(expected)} table")
    return True


def _quantize(model: nn.Module, quantization: dict[str, Any], weights: dict[str, mx.array]) -> None:
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


def _check_names(model: nn.Module, weights: dict[str, mx.array], path: Path) -> None:
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
