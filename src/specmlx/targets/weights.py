"""Names and layouts of published hybrid weights, mapped to mlx-lm's."""

import mlx.core as mx

_OTHER_MODELS = ("visual", "vision_tower", "vision_model", "mtp")
_OFFSET_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)


def sanitize(weights: dict[str, mx.array], tied: bool) -> dict[str, mx.array]:
    """Weights under mlx-lm's names: one prefix, no vision or MTP weights, no head where it is tied.

    Raw Hugging Face files are told by their conv1d layout `[C, 1, K]`: those convs are transposed to `[C, K, 1]` and
    their norms, stored as w - 1, get 1 added (as mlx-lm does). Converted files and a second call change nothing.
    """
    weights = {_renamed(k): v for k, v in weights.items() if not any(part in _OTHER_MODELS for part in k.split("."))}
    raw = any(k.endswith("conv1d.weight") and v.shape[-1] != 1 for k, v in weights.items())
    sanitized = {}
    for key, value in weights.items():
        if tied and key.startswith("language_model.lm_head."):
            continue
        if key.endswith("conv1d.weight") and value.shape[-1] != 1:
            value = value.moveaxis(2, 1)
        if raw and key.endswith(_OFFSET_NORMS):
            value = value + 1.0
        sanitized[key] = value
    return sanitized


def _renamed(key: str) -> str:
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if key.startswith(prefix):
            return "language_model.model." + key.removeprefix(prefix)
    return key if key.startswith("language_model.") else "language_model." + key
