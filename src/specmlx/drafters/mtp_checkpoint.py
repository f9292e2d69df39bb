"""An MTP head from the target's own repository (`mtp.*`), or from one of its own (mlx-vlm's split)."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.drafters.mtp import MTP, MTPHead, NormedTarget
from specmlx.drafters.pairing import is_split_mtp, mtp_reasons
from specmlx.drafters.weights import check_names, quantize_as_stored
from specmlx.formats.checkpoint import read_config, read_weights
from specmlx.formats.dense import column_major
from specmlx.formats.scaled import is_scaled, read_scaled
from specmlx.formats.scaled_linear import place
from specmlx.targets.checkpoint import cast
from specmlx.targets.config import HybridConfig
from specmlx.targets.weights import stacked_experts

_PREFIX = re.compile(r"(?:model\.|language_model\.)*mtp\.")


def load_mtp(path: str | Path, target: NormedTarget, dtype: mx.Dtype | None = None) -> MTP:
    """The MTP head in a directory, paired with its target; `dtype` casts its floating-point weights.

    Published files hold norms as w - 1, and so does whatever has `mtp.` names without a target's convs in mlx's layout
    beside them; mlx exports and split repositories hold w. Raises ValueError, one line, for a directory without a head,
    a head that doesn't fit, and missing, extra or misshapen tensors.
    """
    path = Path(path)
    config = read_config(path)
    if reasons := mtp_reasons(config, target.config):
        raise ValueError(f"the MTP head in {path} can't serve this target: {'; '.join(reasons)}")
    weights = read_weights(path)
    named = {_PREFIX.sub("", name, count=1): w for name, w in weights.items() if _PREFIX.match(name)}
    if not named and not is_split_mtp(config):
        raise ValueError(
            f"{path} has no mtp.* tensors: conversions often drop the MTP head; "
            "take the publisher's own files or a split repository"
        )
    if named and not any(name.endswith("conv1d.weight") and w.shape[-1] == 1 for name, w in weights.items()):
        # Cast first: 1 + w has fewer digits than w.
        named = {name: w.astype(dtype or w.dtype) + 1 if "norm" in name else w for name, w in named.items()}
    return build_mtp(named or weights, config, target, path, dtype)


def build_mtp(
    weights: dict[str, mx.array],
    config: dict[str, Any],
    target: NormedTarget,
    where: Path,
    dtype: mx.Dtype | None = None,
) -> MTP:
    """A head of `MTPHead`'s tensors by its names (experts and codes as publishers have them), norms as w.

    Raises ValueError, one line that names `where`, for missing, extra or misshapen tensors.
    """
    if is_scaled(weights):
        weights = read_scaled(weights, config)
    weights = stacked_experts(weights)
    head = MTPHead(HybridConfig.from_dict(config))
    place(head, weights)
    quantize_as_stored(head, weights)
    check_names(head, weights, where)
    head.load_weights(list(weights.items()))
    if dtype is not None:
        cast(head, dtype)
    if mx.default_device() == mx.cpu:
        column_major(head)
    mx.eval(head.parameters())
    return MTP(head, target)
