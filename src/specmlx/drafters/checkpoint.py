"""Drafters from a directory, by the names of every publisher that `config` and `packaging` know, and mlx exports."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import BlockDrafter, DFlash
from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, QWEN35, DrafterConfig
from specmlx.drafters.dflash2 import DFlash2, DFlash2Trunk
from specmlx.drafters.dspark import DSpark, DSparkTrunk
from specmlx.drafters.mtp import MTP
from specmlx.drafters.mtp_checkpoint import load_mtp
from specmlx.drafters.pairing import check_pair, is_split_mtp
from specmlx.drafters.vocabulary import DraftVocabulary
from specmlx.drafters.weights import load_weights
from specmlx.formats.checkpoint import read_config, read_weights, tensors_of
from specmlx.formats.scaled import is_scaled, read_scaled
from specmlx.targets.checkpoint import check_sizes
from specmlx.targets.target import Target

# The latter in early SpecForge's files.
PREFIXES = ("model.", "logit_head.")
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
    weights = {}
    for name, weight in read_weights(path).items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        stem = name.removesuffix(".weight")
        weights[stem if stem in CODEBOOKS else name] = weight
    if is_scaled(weights):
        weights = read_scaled(weights, config)
    if parsed.frozen_copies:
        weights = {name: weight for name, weight in weights.items() if not _is_copy(name, weight, parsed)}
    if parsed.family == QWEN35:
        # Cast first: 1 + w has fewer digits than w.
        weights |= {name: w.astype(dtype or w.dtype) + 1 for name, w in weights.items() if name.endswith("norm.weight")}
    vocabulary = _vocabulary(weights, parsed, path)
    modules = {name.split(".")[0] for name in weights}
    parsed = replace(parsed, **{field: table in modules for field, table in TABLES.items()})
    if parsed.enable_confidence_head is None:
        parsed = replace(parsed, enable_confidence_head="confidence_head" in modules)
    drafter = build(parsed, target, vocabulary)
    load_weights(drafter.model, weights, path, dtype)
    return drafter


def build(config: DrafterConfig, target: Target, vocabulary: DraftVocabulary | None = None) -> BlockDrafter:
    """A drafter with random weights, as training begins with."""
    kinds = {DSPARK: (DSpark, DSparkTrunk), DFLASH2: (DFlash2, DFlash2Trunk), DFLASH: (DFlash, BlockTrunk)}
    drafter, trunk = kinds[config.kind]
    return drafter(trunk(config), target, vocabulary)


def _is_copy(name: str, weight: mx.array, config: DrafterConfig) -> bool:
    """Whether it is a part of a copy of the target's table. Raises ValueError for one of another size."""
    if not name.startswith(tuple(f"{table}." for table in TABLES.values())):
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
    if not any(name.startswith("lm_head.") for name in weights):
        raise ValueError(f"{what} but no lm_head of its own")
    try:
        # Offsets from draft to target ids.
        vocabulary = DraftVocabulary(d2t.astype(mx.int64) + mx.arange(d2t.size), config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if t2d is not None and [i for i, has in enumerate(t2d.tolist()) if has] != sorted(vocabulary.ids.tolist()):
        raise ValueError(f"{path}: t2d and d2t disagree about the ids of the draft vocabulary: which of both is right?")
    return vocabulary
