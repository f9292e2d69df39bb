"""Names and layouts of published hybrid weights, mapped to mlx-lm's."""

import re

import mlx.core as mx

OTHER_MODELS = ("visual", "vision_tower", "vision_model", "mtp")
_OFFSET_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_ONE_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(.+)")


def sanitize(weights: dict[str, mx.array], tied: bool) -> dict[str, mx.array]:
    """Weights under mlx-lm's names: one prefix, no vision or MTP weights, no head where it is tied.

    Raw Hugging Face files are told by their conv1d layout `[C, 1, K]`: those convs are transposed to `[C, K, 1]` and
    their norms, stored as w - 1, get 1 added (as mlx-lm does). Experts with tensors of their own, or whose gate and
    up projections are one tensor, become mlx-lm's `switch_mlp`. Converted files and a second call change nothing.
    """
    weights = {_renamed(k): v for k, v in weights.items() if not any(part in OTHER_MODELS for part in k.split("."))}
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
    return stacked_experts(sanitized)


def stacked_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Each layer's experts in one array `[E, N, K]` a projection. Raises ValueError where one is missing."""
    experts: dict[str, dict[int, mx.array]] = {}
    stacked = {}
    for key, value in weights.items():
        if match := _ONE_EXPERT.fullmatch(key):
            experts.setdefault(f"{match[1]}.switch_mlp.{match[3]}", {})[int(match[2])] = value
        elif key.endswith(".experts.gate_up_proj"):
            mlp = key.removesuffix(".experts.gate_up_proj")
            gate, up = mx.split(value, 2, axis=-2)
            stacked |= {f"{mlp}.switch_mlp.gate_proj.weight": gate, f"{mlp}.switch_mlp.up_proj.weight": up}
        elif key.endswith(".experts.down_proj"):
            stacked[key.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")] = value
        else:
            stacked[key] = value
    for key, values in experts.items():
        if missing := sorted(set(range(max(values) + 1)) - values.keys()):
            raise ValueError(f"{key} lacks experts {missing[:5]}")
        stacked[key] = mx.stack([values[i] for i in range(len(values))])
    return stacked


def _renamed(key: str) -> str:
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if key.startswith(prefix):
            return "language_model.model." + key.removeprefix(prefix)
    return key if key.startswith("language_model.") else "language_model." + key
