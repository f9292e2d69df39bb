"""Drafters from a directory, by the names of every publisher that `config` and `packaging` know, and mlx exports."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import BlockDrafter, Target
from specmlx.drafters.config import DFLASH2, DSPARK, QWEN35, DrafterConfig
from specmlx.drafters.dflash import DFlash
from specmlx.drafters.dflash2 import DFlash2, DFlash2Trunk
from specmlx.drafters.dspark import DSpark, DSparkTrunk
from specmlx.drafters.mtp import MTP
from specmlx.drafters.mtp_checkpoint import load_mtp
from specmlx.drafters.pairing import check_pair, is_split_mtp
from specmlx.drafters.vocabulary import DraftVocabulary, published_vocabulary
from specmlx.drafters.weights import check_names, quantize_as_stored
from specmlx.formats.checkpoint import read_config, read_weights, tensors_of
from specmlx.formats.module_weights import column_major
from specmlx.formats.scaled import is_scaled, read_scaled
from specmlx.formats.scaled_linear import place
from specmlx.targets.checkpoint import cast, check_sizes

PREFIX = "model."
# Early SpecForge's files.
LOGIT_HEAD = "logit_head."
SHARED = ("embed_tokens.", "lm_head.")
TABLES = {"own_embedding": "embed_tokens", "own_head": "lm_head"}
# Bare in files, modules with a weight in z-lab's memory.
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def load_drafter(path: str | Path, target: Target, dtype: mx.Dtype | None = None) -> BlockDrafter | MTP:
    """The drafter in a directory, paired with its target; `dtype` casts its floating-point weights.

    deepseek-ai's files hold frozen copies of the target's embedding and head: those are dropped, and the target's own
    serve; any other's tables are the drafter's own. Raises ValueError, one line that names the directory or file, for:
    no config.json or weights, an unreadable file, a pair that doesn't fit (told before any weight is read), a missing,
    extra or misshapen tensor.
    """
    path = Path(path)
    config = read_config(path)
    if is_split_mtp(config):
        return load_mtp(path, target, dtype)
    if reasons := check_pair(target.config, config):
        raise ValueError(f"the drafter in {path} can't serve this target: {'; '.join(reasons)}")
    check_sizes(config, tensors_of(path), path)
    parsed = DrafterConfig.from_dict(config)
    weights = {_renamed(name): weight for name, weight in read_weights(path).items()}
    if is_scaled(weights):
        weights = read_scaled(weights, config)
    weights = {name: weight for name, weight in weights.items() if not _is_copy(name, weight, parsed)}
    if parsed.family == QWEN35:
        # Cast first: 1 + w has fewer digits than w.
        norms = {name: w.astype(dtype or w.dtype) + 1 for name, w in weights.items() if name.endswith("norm.weight")}
        weights |= norms
    vocabulary = _vocabulary(weights, parsed, path)
    parsed = replace(parsed, **{field: _has(weights, table) for field, table in TABLES.items()})
    if parsed.enable_confidence_head is None:
        parsed = replace(parsed, enable_confidence_head=_has(weights, "confidence_head"))
    drafter = build(parsed, target, vocabulary)
    place(drafter.model, weights)
    quantize_as_stored(drafter.model, weights)
    check_names(drafter.model, weights, path)
    drafter.model.load_weights(list(weights.items()))
    if dtype is not None:
        cast(drafter.model, dtype)
    if mx.default_device() == mx.cpu:
        column_major(drafter.model)
    mx.eval(drafter.model.parameters())
    return drafter


def build(config: DrafterConfig, target: Target, vocabulary: DraftVocabulary | None = None) -> BlockDrafter:
    """A drafter with random weights, as training begins with."""
    if config.kind == DSPARK:
        return DSpark(DSparkTrunk(config), target, vocabulary)
    if config.kind == DFLASH2:
        return DFlash2(DFlash2Trunk(config), target, vocabulary)
    return DFlash(BlockTrunk(config), target, vocabulary)


def _renamed(name: str) -> str:
    name = name.removeprefix(PREFIX).removeprefix(LOGIT_HEAD)
    stem = name.removesuffix(".weight")
    return stem if stem in CODEBOOKS else name


def _has(weights: dict[str, mx.array], module: str) -> bool:
    return any(name.startswith(f"{module}.") for name in weights)


def _is_copy(name: str, weight: mx.array, config: DrafterConfig) -> bool:
    if not config.frozen_copies or not name.startswith(SHARED):
        return False
    expected = (config.vocab_size, config.hidden_size)
    # A quantized copy has as many rows, but narrower ones.
    dims = 1 if config.quantization else 2
    if weight.shape[:dims] != expected[:dims]:
        raise ValueError(f"{name} is {list(weight.shape)}, no copy of the target's {list(expected)} table")
    return True


def _vocabulary(weights: dict[str, mx.array], config: DrafterConfig, path: Path) -> DraftVocabulary | None:
    """The reduced vocabulary of the files, whose tensors are taken out of `weights`."""
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if config.draft_vocab_size == config.vocab_size:
        return None
    what = f"the drafter in {path} has a vocabulary of {config.draft_vocab_size} (the target's has {config.vocab_size})"
    if d2t is None:
        raise ValueError(f"{what} but no d2t: which ids are they?")
    if d2t.shape != (config.draft_vocab_size,) or (t2d is not None and t2d.shape != (config.vocab_size,)):
        shapes = f"d2t {list(d2t.shape)}" + ("" if t2d is None else f" and t2d {list(t2d.shape)}")
        raise ValueError(f"{what} but {shapes}")
    if not _has(weights, "lm_head"):
        raise ValueError(f"{what} but no lm_head of its own")
    try:
        return published_vocabulary(d2t, t2d, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
