"""An MTP head from the target's own repository (`mtp.*`), or from one of its own (mlx-vlm's split)."""

import re
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.drafters.mtp_norms import settle_norms
from specmlx.drafters.pairing import is_split_mtp, mtp_reasons
from specmlx.drafters.weights import load_weights
from specmlx.formats.checkpoint import read_config, read_weights, shards_of
from specmlx.formats.scaled import is_scaled, read_scaled
from specmlx.targets.config import HybridConfig
from specmlx.targets.gguf import gguf_files, has_head, head_weights, read_parts
from specmlx.targets.gguf_config import config_of
from specmlx.targets.hybrid import Model
from specmlx.targets.weights import stacked_experts

_PREFIX = re.compile(r"(?:model\.|language_model\.)*mtp\.")


def load_mtp(path: str | Path, target: Model, dtype: mx.Dtype | None = None) -> MTP:
    """The MTP head in a directory or a GGUF file, paired with its target; `dtype` casts its floating-point weights.

    Published files hold norms as w - 1. Converted ones hold w, w - 1, or both, and no file says so but ours: norms are
    then what the target's own text shows (see `mtp_norms`), which stderr is told. Raises ValueError, one line, for a
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
        wide = {name: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w for name, w in weights.items()}
        return build_mtp(wide, config, target, files[0], dtype)
    weights = read_weights(path)
    named = {_PREFIX.sub("", name, count=1): w for name, w in weights.items() if _PREFIX.match(name)}
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
        if norms := [name for name in entries if "norm" in name and bool(_PREFIX.match(name)) == prefixed]:
            written = mx.load(str(file), format="safetensors", return_metadata=True)[1].get("format")
            certain = prefixed and (written == "pt" or (raw and written != "mlx"))
            (lowered if certain else doubtful).update(_PREFIX.sub("", name, count=1) for name in norms)
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
