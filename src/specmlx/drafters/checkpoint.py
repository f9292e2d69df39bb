"""Drafters from a directory: z-lab's DFlash and DFlash 2, deepseek-ai's and RadixArk's DSpark, mlx exports of these."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import BlockDrafter, Target
from specmlx.drafters.config import DFLASH2, DSPARK, DrafterConfig
from specmlx.drafters.dflash import DFlash
from specmlx.drafters.dflash2 import DFlash2, DFlash2Trunk
from specmlx.drafters.dspark import DSpark, DSparkTrunk
from specmlx.drafters.mtp import MTP
from specmlx.drafters.mtp_checkpoint import load_mtp
from specmlx.drafters.pairing import check_pair, is_split_mtp
from specmlx.drafters.weights import check_names, quantize_as_stored, read_weights
from specmlx.formats.checkpoint import read_config
from specmlx.formats.dense import column_major

PREFIX = "model."
SHARED = ("embed_tokens.", "lm_head.")
# Bare in files, modules with a weight in z-lab's memory.
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def load_drafter(path: str | Path, target: Target, dtype: mx.Dtype | None = None) -> BlockDrafter | MTP:
    """The drafter in a directory, paired with its target; `dtype` casts its floating-point weights.

    deepseek-ai's files hold frozen copies of the target's embedding and head: those are dropped, and the
    target's own serve. Raises ValueError, one line that names the directory or file, for: no config.json or
    weights, an unreadable file, a pair that doesn't fit (told before any weight is read), a missing, extra or
    misshapen tensor.
    """
    path = Path(path)
    config = read_config(path)
    if is_split_mtp(config):
        return load_mtp(path, target, dtype)
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
        quantize_as_stored(drafter.model, parsed.quantization, weights)
    check_names(drafter.model, weights, path)
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
