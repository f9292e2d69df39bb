"""Geometry of a Qwen3.5-family text model, dense or with mixtures of experts."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"
QWEN3_NEXT = "qwen3_next"
MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", QWEN3_NEXT)
# What values of other types than a config should have may raise.
UNFIT = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError)
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
# Of a layer, a matrix or a vocabulary; and of layers.
_MOST, _MOST_LAYERS = 1 << 28, 10_000
_SIZES = (
    *_REQUIRED,
    "decoder_sparse_step",
    "num_key_value_heads",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "full_attention_interval",
)


@dataclass
class HybridConfig:
    """The text part of a `qwen3_5`, `qwen3_5_moe` or `qwen3_next` config.json: Hugging Face's names, mlx-lm's defaults.

    `intermediate_size` is the dense MLPs' and may be 0 where every layer has experts.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int = 0
    model_type: str = "qwen3_5"
    num_key_value_heads: int = 8
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 131072
    linear_num_value_heads: int = 64
    linear_num_key_heads: int = 16
    linear_key_head_dim: int = 192
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    full_attention_interval: int = 4
    layer_types: list[str] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    norm_topk_prob: bool = True
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.25}
    )
    draft_model: str | None = None

    def __post_init__(self):
        for name in _SIZES:
            self._check_size(name, _MOST_LAYERS if name == "num_hidden_layers" else _MOST)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self._check_size("head_dim", _MOST)
        if not isinstance(self.mlp_only_layers, list):
            raise ValueError(f"mlp_only_layers is {self.mlp_only_layers!r}: it must be a list of layers")
        if self.layer_types is None:
            self.layer_types = [
                LINEAR if (i + 1) % self.full_attention_interval else FULL for i in range(self.num_hidden_layers)
            ]
        self.rope_parameters = dict(self.rope_parameters)
        if "type" not in self.rope_parameters:
            self.rope_parameters["type"] = self.rope_parameters.get("rope_type", "default")
        self._validate()

    def _check_size(self, name: str, most: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name} is {value!r}: it must be a positive integer")

    def _validate(self):
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers but num_hidden_layers is {self.num_hidden_layers}"
            )
        if unknown := sorted(set(self.layer_types) - {LINEAR, FULL}):
            raise ValueError(f"layer_types has {unknown}: specmlx knows {LINEAR!r} and {FULL!r}")
        for kind in (LINEAR, FULL):
            if kind not in self.layer_types:
                raise ValueError(f"not a hybrid: no layer is {kind!r}; specmlx runs Gated DeltaNet hybrids")
        needed = [] if all(map(self.has_experts, range(self.num_hidden_layers))) else ["intermediate_size"]
        needed += _EXPERTS if self.num_experts else ()
        for name in needed:
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a positive integer")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok} but there are {self.num_experts} experts"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.linear_num_value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.linear_num_key_heads})"
            )

    @property
    def fused_projections(self) -> bool:
        """Whether q, k, v, z and b, a come out of one matrix each, a key head's share at a time (`qwen3_next`)."""
        return self.model_type == QWEN3_NEXT

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` has a mixture of experts for its MLP."""
        if self.model_type != QWEN3_NEXT:
            return self.num_experts > 0
        sparse = (index + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and sparse and index not in self.mlp_only_layers

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "HybridConfig":
        """The text config of a whole config.json, or of its `text_config` part; unknown keys are ignored.

        Raises ValueError where a required key is missing or the geometry is not a hybrid's.
        """
        text = {**params, **(params.get("text_config") or {})}
        text["model_type"] = params.get("model_type", text.get("model_type"))
        if text["model_type"] == QWEN3_NEXT:
            text.setdefault("norm_topk_prob", False)
            text.setdefault("rope_parameters", _flat_rope(text))
        if missing := [key for key in _REQUIRED if key not in text]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in text.items() if key in known and value is not None})


def _flat_rope(text: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a config that has its parts at the top level."""
    names = ("rope_theta", "partial_rotary_factor")
    return {**(text.get("rope_scaling") or {}), **{name: text[name] for name in names if name in text}}


def check_target(config: dict[str, Any], path: Path | str) -> None:
    """Raise ValueError in one line for a drafter's config, and for a hybrid's that makes no sense."""
    names = config.get("architectures")
    architectures = " ".join(map(str, names)) if isinstance(names, list) else str(names)
    if any(word in architectures for word in ("DFlash", "DSpark", "Speculator")):
        raise ValueError(f"{path} is a drafter ({architectures}), not a target: pass it as draft_model")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{path} has model_type {model_type!r}: its config.json is no language model's")
    if model_type not in MODEL_TYPES:
        return
    try:
        HybridConfig.from_dict(config)
    except UNFIT as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())[:400]}") from None
