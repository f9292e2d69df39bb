"""Drafters from a directory, by the names of every publisher that `config` and `packaging` know, and mlx exports."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from specmlx.drafters.base import DraftVocabulary
from specmlx.drafters.block_drafter import BlockDrafter, DFlash
from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, QWEN35, DrafterConfig
from specmlx.drafters.dflash2 import DFlash2
from specmlx.drafters.dspark import DSpark
from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.drafters.mtp_norms import settle_norms
from specmlx.drafters.pairing import check_pair, is_split_mtp, mtp_reasons
from specmlx.formats.checkpoint import read_config, read_weights, shards_of, tensors_of
from specmlx.formats.module_weights import column_major
from specmlx.formats.scaled import is_scaled, read_scaled
from specmlx.formats.scaled_linear import place
from specmlx.targets.checkpoint import cast, check_sizes
from specmlx.targets.config import HybridConfig
from specmlx.targets.gguf import gguf_files, has_head, head_weights, read_parts
from specmlx.targets.gguf_config import config_of
from specmlx.targets.hybrid import Model
from specmlx.targets.target import Target
from specmlx.targets.weights import stacked_experts

TABLES = {"own_embedding": "embed_tokens", "own_head": "lm_head"}
# Without the prefixes of publishers and of early SpecForge. Codebooks are bare in files, modules in z-lab's memory.
_NAME = re.compile(r"(?:model\.)?(?:logit_head\.)?(.*?)(?:(?<=_codebook)\.weight)?")
_MTP = re.compile(r"(?:model\.|language_model\.)*mtp\.")
# mlx's layouts: with biases of any of these bits in groups of so many, without them what the pair says.
_BITS, _SIZES = (2, 3, 4, 5, 6, 8), (16, 32, 64, 128)
_MODES = {(32, 4): "mxfp4", (32, 8): "mxfp8", (16, 4): "nvfp4"}


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
    weights = {_NAME.fullmatch(name)[1]: weight for name, weight in read_weights(path).items()}
    if is_scaled(weights):
        weights = read_scaled(weights, config)
    copied = [name for name in weights if parsed.frozen_copies and name.split(".")[0] in TABLES.values()]
    for name in copied:
        # A quantized copy has as many rows, but narrower ones.
        shape, dims = [parsed.vocab_size, parsed.hidden_size], 1 if parsed.quantization else 2
        if [*weights[name].shape[:dims]] != shape[:dims]:
            raise ValueError(f"{name} is {list(weights[name].shape)}, no copy of the target's {shape} table")
        del weights[name]
    if parsed.family == QWEN35:
        # Cast first: 1 + w has fewer digits than w.
        weights |= {name: w.astype(dtype or w.dtype) + 1 for name, w in weights.items() if name.endswith("norm.weight")}
    vocabulary = _vocabulary(weights, parsed, path)
    modules = {name.split(".")[0] for name in weights}
    found = {field: table in modules for field, table in TABLES.items()}
    if parsed.enable_confidence_head is None:
        found["enable_confidence_head"] = "confidence_head" in modules
    drafter = build(replace(parsed, **found), target, vocabulary)
    load_weights(drafter.model, weights, path, dtype)
    return drafter


def build(config: DrafterConfig, target: Target, vocabulary: DraftVocabulary | None = None) -> BlockDrafter:
    """A drafter with random weights, as training begins with."""
    kind = {DSPARK: DSpark, DFLASH2: DFlash2, DFLASH: DFlash}[config.kind]
    return kind(kind.trunk(config), target, vocabulary)


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


def load_mtp(path: str | Path, target: Model, dtype: mx.Dtype | None = None) -> MTP:
    """The MTP head in a directory or a GGUF file, paired with its target; `dtype` casts its floating-point weights.

    Published files hold norms as w - 1. Converted ones hold w, w - 1, or both, and no file says so but ours: norms are
    then what the target's own text shows (see `settle_norms`), which stderr is told. Raises ValueError, one line, for a
    directory without a head, a head that doesn't fit, and missing, extra or misshapen tensors.
    """
    path = Path(path)
    parts = read_parts(files) if (files := gguf_files(path)) else []
    config = config_of(parts) if files else read_config(path)
    if files and not has_head(parts):
        raise ValueError(f"{files[0]} has no MTP head (no nextn.* tensors): take a file that was converted with it")
    if reasons := mtp_reasons(config, target.config):
        raise ValueError(f"the MTP head in {files[0] if files else path} can't serve this target: {'; '.join(reasons)}")
    if files:
        # Its norms are w: llama.cpp's converter writes them so. All is computed in float32, unless it is cast.
        weights = head_weights(parts, config, MTPHead(HybridConfig.from_dict(config)))
        return build_mtp(weights, config, target, files[0], dtype or mx.float32)
    weights = read_weights(path)
    named = {_MTP.sub("", name, count=1): w for name, w in weights.items() if _MTP.match(name)}
    if not named and not is_split_mtp(config):
        hint = "conversions often drop the MTP head; take the publisher's own files or a split repository"
        raise ValueError(f"{path} has no mtp.* tensors: {hint}")
    lowered, doubtful = (set(), set()) if config.get("mtp_norms") == "w" else _norms(path, weights, bool(named))
    # Cast first: 1 + w has fewer digits than w.
    weights = {name: w.astype(dtype or w.dtype) + 1 if name in lowered else w for name, w in (named or weights).items()}
    drafter = build_mtp(weights, config, target, path, dtype)
    if doubtful:
        print(f"the MTP head in {path}: {settle_norms(drafter, target, doubtful)}", file=sys.stderr)
    return drafter


def _norms(path: Path, weights: dict[str, mx.array], prefixed: bool) -> tuple[set[str], set[str]]:
    """The head's norms that are w - 1 for certain, and those that may be, by their names without the prefix.

    Files that PyTorch wrote, and those beside convs in its layout, are the publishers'.
    """
    raw = any(name.endswith("conv1d.weight") and w.shape[-1] != 1 for name, w in weights.items())
    lowered, doubtful = set(), set()
    for file, entries in shards_of(path).items():
        if norms := [name for name in entries if "norm" in name and bool(_MTP.match(name)) == prefixed]:
            written = mx.load(str(file), format="safetensors", return_metadata=True)[1].get("format")
            certain = prefixed and (written == "pt" or (raw and written != "mlx"))
            (lowered if certain else doubtful).update(_MTP.sub("", name, count=1) for name in norms)
    return lowered, doubtful


def build_mtp(
    weights: dict[str, mx.array], config: dict[str, Any], target: Model, where: Path, dtype: mx.Dtype | None = None
) -> MTP:
    """A head of `MTPHead`'s tensors by its names (experts and codes as publishers have them), norms as w.

    Raises ValueError, one line that names `where`, for missing, extra or misshapen tensors.
    """
    if is_scaled(weights):
        weights = read_scaled(weights, config)
    head = MTPHead(HybridConfig.from_dict(config))
    load_weights(head, stacked_experts(weights), where, dtype)
    return MTP(head, target)


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
        inputs, columns, groups = module.weight.shape[-1], packed.shape[-1] * 32, scales.shape[-1]
        fits = [(s, b) for s in _SIZES for b in _BITS if (s * groups, b * inputs) == (inputs, columns)]
        size, bits = fits[0] if fits else (0, 0)
        mode = "affine" if size and f"{name}.biases" in weights else _MODES.get((size, bits))
        if mode is None:
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
