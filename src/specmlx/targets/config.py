"""Geometry of a Qwen3.5-family text model, dense or with mixtures of experts."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specmlx.formats.config import MOST, read, read_field, shown, text_of
from specmlx.formats.quantization import check_quantization
from specmlx.formats.rope import MOST_POSITIONS, max_length, rope_parameters, rotary_dims

LINEAR, FULL = "linear_attention", "full_attention"
QWEN3_NEXT = "qwen3_next"
MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", QWEN3_NEXT)
# What values of other types than a config should have may raise.
UNFIT = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError)
_SHARE = 0.25
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_FROM_ZERO = {"least": 0, "most": MOST}
# All others are 1 to MOST.
_BOUNDS = {
    "num_hidden_layers": {"above": 0, "most": 10_000},
    "max_position_embeddings": {"above": 0, "most": MOST_POSITIONS},
    **dict.fromkeys(("intermediate_size", "num_experts", "mlp_only_layers", *_EXPERTS), _FROM_ZERO),
}


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
    rope_parameters: dict[str, Any] = field(default_factory=lambda: rope_parameters({}, _SHARE))
    draft_model: str | None = None

    def __post_init__(self):
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = [
                LINEAR if (i + 1) % self.full_attention_interval else FULL for i in range(self.num_hidden_layers)
            ]
        self._validate()

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
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"{missing[0]} is 0: it must be a positive integer")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok} but there are {self.num_experts} experts"
            )
        pairs = ("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads")
        for many, few in pairs:
            if (a := getattr(self, many)) % (b := getattr(self, few)):
                raise ValueError(f"{many} ({a}) must be a multiple of {few} ({b})")
        rotary_dims(self.rope_parameters, self.head_dim)

    @property
    def max_length(self) -> int:
        """How many positions the model has: max_position_embeddings, or what its rope stretches them to."""
        return max_length(self.rope_parameters, self.max_position_embeddings)

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

        Its rope is what transformers reads there. Raises ValueError, one line, for a field that is missing, of another
        kind or out of range, and where the geometry is not a hybrid's.
        """
        text = text_of(params)
        text["model_type"] = params.get("model_type", text.get("model_type"))
        if text["model_type"] == QWEN3_NEXT:
            text.setdefault("norm_topk_prob", False)
        found = {f.name: read_field(text, f, **_BOUNDS.get(f.name, {"above": 0, "most": MOST})) for f in fields(cls)}
        # A composite config's top says nothing of the text model's rope.
        positions = {"max_position_embeddings": found["max_position_embeddings"]}
        found["rope_parameters"] = rope_parameters({**(params.get("text_config") or params), **positions}, _SHARE)
        return cls(**{name: value for name, value in found.items() if value is not None})


def check_target(config: dict[str, Any], path: Path | str) -> None:
    """Raise ValueError in one line for a drafter's config, and for a hybrid's that makes no sense."""
    names = config.get("architectures")
    architectures = " ".join(map(str, names)) if isinstance(names, list) else str(names)
    if any(word in architectures for word in ("DFlash", "DSpark", "Speculator")):
        raise ValueError(f"{path} is a drafter ({architectures}), not a target: pass it as draft_model")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{path} has model_type {shown(model_type)}: its config.json is no language model's")
    try:
        read(config, "draft_model", str, None)
        check_quantization(config, hybrid=model_type in MODEL_TYPES)
        if model_type in MODEL_TYPES:
            HybridConfig.from_dict(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
