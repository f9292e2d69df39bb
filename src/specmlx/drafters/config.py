"""What a drafter's config.json says, whichever publisher wrote it."""

from dataclasses import dataclass, field
from typing import Any

from specmlx.drafters.packaging import GEMMA4_DSPARK, check_types, gemma4_words, unpacked
from specmlx.drafters.rope import ROPE_TYPES, rope_type

DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
QWEN3, QWEN35, GEMMA4 = "qwen3", "qwen3_5", "gemma4"
QWEN35_DSPARK = ["Qwen35DSparkModel"]
SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_BLOCK = 16
MARKOV_HEADS = ("vanilla", "gated", "rnn")
DSPARK_NAMES = (["Qwen3DSparkModel"], QWEN35_DSPARK, GEMMA4_DSPARK, ["DSparkDraftModel"], ["Lfm2DSparkDraftModel"])
# How mlx names its own; the others are told by the tensors (see `formats.scaled`).
QUANTIZATIONS = ("modelopt", "compressed-tensors", "fp8", "nvfp4")
# Of a matrix or a vocabulary, and of layers: what a file that is no model might say would take all memory.
MOST, MOST_LAYERS = 1 << 28, 1_000
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash (arXiv 2602.06036), DFlash 2 or DSpark (arXiv 2607.05147) drafter, with the publishers' names.

    target_layer_ids: 0-based layers of the target whose OUTPUT is tapped (hidden_states[i + 1] elsewhere).
    block_size: rows that the drafter runs.
    sample_from_anchor: whether the first of them, the anchor's, proposes the token after it (DSpark), or nothing
        and every other row the token at its own position (DFlash, DFlash 2).
    windows: each layer's sliding window, None where it attends to everything.
    family: whose layers it has: Qwen 3's, Qwen 3.5's (norms in its files are w - 1) or Gemma 4's.
    gated_attention: whether queries come with a gate of the attention's output, head by head (Qwen 3.5).
    rope_dims: how much of a head the rope turns, None for all of it (Qwen 3.5).
    attention_k_eq_v: whether values are the keys' projection (Gemma 4).
    draft_vocab_size: rows of the drafter's own head, where it has one: fewer than vocab_size for a reduced vocabulary.
    frozen_copies: whether the tables in its files are the target's own (deepseek-ai).
    own_embedding, own_head: whether it has these tables itself; its embedding is then the head too, where it has none.
    confidence_temperatures: what each slot's confidence logit is divided by.
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    rope_theta: float
    sample_from_anchor: bool
    rms_norm_eps: float = 1e-6
    num_target_layers: int | None = None
    is_causal: bool | None = None
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int | None = None
    rope_is_neox_style: bool = True
    attention_bias: bool = False
    family: str = QWEN3
    gated_attention: bool = False
    rope_dims: int | None = None
    attention_k_eq_v: bool = False
    draft_vocab_size: int | None = None
    frozen_copies: bool = False
    own_embedding: bool = False
    own_head: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool = True
    confidence_temperatures: tuple[float, ...] | None = None
    quantization: dict[str, Any] | None = None

    @property
    def max_width(self) -> int:
        """γ, the tokens of a whole proposal: DFlash block - 1, DSpark block."""
        return self.block_size - self.first_row

    @property
    def first_row(self) -> int:
        """The first row of the block that proposes a token."""
        return 0 if self.sample_from_anchor else 1

    def causal(self, window: int | None) -> bool:
        """Whether the block's rows see only the rows before them, in layers with this window.

        A config's own word (top-level is_causal, else dflash_config.causal) stands for all layers; without
        one, sliding layers are causal and full ones bidirectional, as z-lab's code and vLLM have it.
        """
        return window is not None if self.is_causal is None else self.is_causal

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "DrafterConfig":
        """Read a config.json. Raises ValueError, one line, for what is incomplete or not supported."""
        check_types(config)
        config = gemma4_words(unpacked(config))
        kind = kind_of(config)
        _refuse_variations(config, kind)
        lookup = _Lookup(config)
        sizes = {name: lookup.size(name) for name in SIZES}
        heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
        kv_heads = lookup.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})")
        depth = lookup("num_target_layers")
        block = lookup.size("block_size", None if kind == DSPARK else DEFAULT_BLOCK)
        anchored = bool(lookup("sample_from_anchor", kind == DSPARK))
        if not anchored and block < 2:
            raise ValueError(f"block_size {block} is too small: it proposes block_size - 1 tokens")
        rope, theta = _rope(config)
        head_dim = lookup.size("head_dim", sizes["hidden_size"] // heads)
        family = _family(config)
        causal = config.get("is_causal")
        return cls(
            kind=kind,
            **sizes,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            block_size=block,
            mask_token_id=lookup.token("mask_token_id"),
            target_layer_ids=_taps(lookup, kind, depth, layers),
            windows=_windows(config, layers),
            rope_theta=theta,
            sample_from_anchor=anchored,
            rms_norm_eps=_eps(config),
            num_target_layers=depth,
            is_causal=lookup.nested.get("causal") if causal is None else causal,
            rope_scaling=rope,
            max_position_embeddings=config.get("max_position_embeddings"),
            frozen_copies=config.get("architectures") in (["Qwen3DSparkModel"], GEMMA4_DSPARK),
            family=family,
            gated_attention=family == QWEN35 and bool(lookup("enable_qwen35_gated_q_proj", False)),
            rope_dims=_rope_dims(config, rope, head_dim) if family == QWEN35 else None,
            attention_k_eq_v=family == GEMMA4 and bool(config.get("attention_k_eq_v")),
            rope_is_neox_style=bool(lookup("rope_is_neox_style", True)),
            draft_vocab_size=lookup.size("draft_vocab_size", sizes["vocab_size"]),
            attention_bias=bool(config.get("attention_bias", False)),
            input_embedding_scale=float(lookup("input_embedding_scale", 1.0)),
            output_multiplier=float(lookup("output_multiplier", 1.0)),
            final_logit_softcapping=lookup("final_logit_softcapping") or None,
            **(_selector(lookup, sizes) if kind == DFLASH2 else {}),
            markov_rank=lookup.size("markov_rank") if kind == DSPARK else 0,
            markov_head_type=_markov(lookup),
            confidence_temperatures=_temperatures(lookup, block if anchored else block - 1),
            enable_confidence_head=lookup("enable_confidence_head") if kind == DSPARK else False,
            confidence_head_with_markov=bool(lookup("confidence_head_with_markov", True)),
            quantization=config.get("quantization"),
        )


def kind_of(config: dict[str, Any]) -> str:
    """The drafter's kind: DFLASH, DFLASH2 or DSPARK. Raises ValueError, one line, naming what it is instead."""
    nested = config.get("dflash_config") or {}
    names = config.get("architectures") or []
    if names == ["DFlash2DraftModel"] or (not names and "selector_rank" in nested):
        return DFLASH2
    if "block_size" not in config and any(key.startswith("dspark_") for key in config):
        raise ValueError("this is a language model with a DSpark head inside, no drafter: not supported yet")
    projector = nested.get("projector_type")
    if projector == "dspark" or "dspark_config" in config or (projector is None and names in DSPARK_NAMES):
        return DSPARK
    if names == ["DFlashDraftModel"] and ("selector_rank" in nested or "conv_kernel_size" in nested):
        raise ValueError(
            "architectures says DFlashDraftModel but dflash_config has DFlash 2's keys: which of both is it?"
        )
    if projector is None and (names == ["DFlashDraftModel"] or (not names and "target_layer_ids" in nested)):
        return DFLASH
    if is_language_model(config):
        what = names[0] if names else config.get("model_type")
        raise ValueError(f"{what} is a language model: it drafts by tokens alone, not by the target's layers")
    what = f"projector_type {projector!r}" if projector else f"architectures {names}"
    raise ValueError(f"unknown kind of drafter ({what}): specmlx loads DFlash, DFlash 2 and DSpark")


def is_language_model(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a whole language model."""
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    whole = any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
    return (
        whole
        or "text_config" in config
        or (not names and "dflash_config" not in config and "num_hidden_layers" in config)
    )


def default_taps(num_target_layers: int, count: int) -> list[int]:
    """The taps of a DFlash config that names none: evenly spaced, from layer 1 on (z-lab)."""
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]


class _Lookup:
    """A value from dflash_config, else from the config's top: publishers use either place."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.nested = config.get("dflash_config") or config.get("dspark_config") or {}

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self.nested.get(name)
        value = self.config.get(name) if value is None else value
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        value = self(name, default)
        most = MOST_LAYERS if name == "num_hidden_layers" else MOST
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"{name} must be a positive whole number, config.json has {value!r}")
        return value

    def token(self, name: str) -> int:
        value = self(name)
        if not isinstance(value, int):
            raise ValueError(f"{name} must be a token id, config.json has {value!r}")
        return value


def _taps(lookup: _Lookup, kind: str, depth: int | None, layers: int) -> tuple[int, ...]:
    taps = lookup("target_layer_ids")
    if taps is None and kind != DSPARK and depth is not None:
        taps = default_taps(depth, layers)
    if not isinstance(taps, list) or not taps or not all(isinstance(tap, int) for tap in taps):
        raise ValueError(f"target_layer_ids must be a list of layer numbers, config.json has {taps!r}")
    return tuple(taps)


def _selector(lookup: _Lookup, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of DFlash 2's convolutions and candidate selector."""
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    found = {name: lookup.size(name) for name in names}
    group, hidden = found["conv_group_size"], sizes["hidden_size"]
    if hidden % group:
        raise ValueError(f"conv_group_size is {group}: it must divide hidden_size {hidden}")
    if (k := found["selector_top_k"]) > (vocab := sizes["vocab_size"]):
        raise ValueError(f"selector_top_k is {k}: the vocabulary has {vocab}")
    return found


def _markov(lookup: _Lookup) -> str:
    if (head := lookup("markov_head_type", "vanilla")) not in MARKOV_HEADS:
        raise ValueError(f"markov_head_type is {head!r}: specmlx knows {', '.join(MARKOV_HEADS)}")
    return head


def _temperatures(lookup: _Lookup, slots: int) -> tuple[float, ...] | None:
    """Each slot's confidence temperature, if the head was calibrated."""
    if (values := lookup("confidence_temperatures")) is None:
        return None
    good = isinstance(values, list) and all(isinstance(v, int | float) and v > 0 for v in values)
    if not good or len(values) < slots:
        raise ValueError(f"confidence_temperatures must be {slots} positive numbers, one a slot: config has {values!r}")
    return tuple(map(float, values[:slots]))


def _eps(config: dict[str, Any]) -> float:
    if (eps := config.get("rms_norm_eps") or 1e-6) <= 0:
        raise ValueError(f"rms_norm_eps must be positive, config.json has {eps!r}")
    return eps


def _family(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return QWEN35 if names == QWEN35_DSPARK else GEMMA4 if names == GEMMA4_DSPARK else QWEN3


def _rope_dims(config: dict[str, Any], rope: dict[str, Any], head_dim: int) -> int | None:
    """How much of a head is turned. Only Qwen 3.5's own kind reads this: copies of its target's config say it too."""
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if not isinstance(share, int | float) or not 0 < share <= 1 or int(head_dim * share) % 2 or head_dim * share < 2:
        raise ValueError(f"partial_rotary_factor is {share!r}: it must be a share of head_dim {head_dim}, up to 1")
    return int(head_dim * share) if share != 1 else None


def _rope(config: dict[str, Any]) -> tuple[dict[str, Any], float]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json has no rope_theta, neither at its top nor in rope_parameters")
    if (kind := rope_type(rope)) not in ROPE_TYPES:
        raise ValueError(f"this drafter uses rope_type {kind!r}: not supported yet")
    turned = rope.get("partial_rotary_factor", 1.0)
    if kind == "proportional" and not (isinstance(turned, int | float) and 0 < turned <= 1):
        raise ValueError(f"rope_type {kind!r} needs a partial_rotary_factor up to 1, config.json has {turned!r}")
    if kind in ("linear", "yarn") and not (rope.get("factor") or 0) > 0:
        raise ValueError(f"rope_type {kind!r} needs a factor, config.json has {rope.get('factor')!r}")
    limits = rope.get("original_max_position_embeddings"), config.get("max_position_embeddings")
    if kind == "yarn" and not any(limits):
        raise ValueError("rope_type 'yarn' needs original_max_position_embeddings, config.json has none")
    positive = {name: rope.get(name) for name in ("beta_fast", "beta_slow", "original_max_position_embeddings")}
    positive |= {"rope_theta": theta - 1, "max_position_embeddings": limits[1]}
    if wrong := [name for name, value in positive.items() if value is not None and value <= 0]:
        raise ValueError(f"config.json's {wrong[0]} is too small for a rope")
    return rope, float(theta)


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window, sliding = config.get("sliding_window"), config.get("use_sliding_window")
    types = config.get("layer_types")
    if types is None:
        # transformers' Qwen3Config: layers from max_window_layers on slide, if sliding is on at all.
        first = config.get("max_window_layers", 28) if sliding and window else layers
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    if len(types) != layers:
        raise ValueError(f"layer_types names {len(types)} layers but num_hidden_layers is {layers}")
    if unknown := sorted(set(types) - {SLIDING, FULL}):
        raise ValueError(f"layer_types has {unknown}: a drafter's layers are {SLIDING!r} or {FULL!r}")
    if SLIDING in types and (not window or window < 2 or sliding is False):
        found = f"sliding_window {window!r}, use_sliding_window {sliding!r}"
        raise ValueError(f"layer_types has {SLIDING!r} but config.json turns no window on ({found})")
    return tuple(window if kind == SLIDING else None for kind in types)


def _refuse_variations(config: dict[str, Any], kind: str) -> None:
    # Maths that we don't compute must not be passed over: the text would stay right, only acceptance falls.
    lookup = _Lookup(config)
    scale, act = lookup("attention_value_scale", 1), config.get("hidden_act", "silu")
    other = None if "quantization" in config else config.get("quantization_config")
    other = None if other and _short(other).lower() in QUANTIZATIONS else other
    variations = {
        "attention_sink_bias": lookup("attention_sink_bias"),
        f"attention_value_scale {scale}": scale != 1,
        "dflash_config.use_swa": lookup("use_swa"),
        "gated attention (enable_qwen35_gated_q_proj)": _family(config) != QWEN35
        and lookup("enable_qwen35_gated_q_proj"),
        "log_snr_conditioning": lookup("log_snr_conditioning"),
        f"hidden_act {act!r}": act != "silu",
        f"quantization_config {_short(other)!r}": other,
    }
    if refused := [what for what, found in variations.items() if found]:
        raise ValueError(f"this drafter uses {', '.join(refused)}: not supported yet")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("quant_method") or sorted(value)
    return str(value)
